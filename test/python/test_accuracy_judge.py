"""benchmarks/accuracy: the equivalence test, and the tables that it makes."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "accuracy"))

pytest.importorskip("torch")

import records
import report
from judge import judge
from plan import Cell, cells
from tasks import TASKS


def _around(mean: float, spread: float, count: int) -> dict[int, float]:
    """Scores with exactly that mean and population standard deviation."""
    return {seed: mean + (spread if seed % 2 else -spread) for seed in range(count)}


def test_a_verdict_is_students_lower_bound() -> None:
    exact = dict.fromkeys(range(20), 50.0)
    verdict = judge(_around(50.02, 0.1, 20), exact, 0.1, False)
    error = 0.1 * math.sqrt(20 / 19) / math.sqrt(20)
    assert verdict.pairs == 20
    assert verdict.mean == pytest.approx(0.02)
    assert verdict.standard_error == pytest.approx(error)
    # The table of Student's distribution: 1.729 for 19 degrees of freedom and 95 %.
    assert verdict.least == pytest.approx(0.02 - 1.7291 * error, rel=1e-4)


@pytest.mark.parametrize(
    ("mean", "spread", "word"),
    [
        (0.0, 0.05, "equivalent"),
        (5.0, 0.05, "equivalent"),  # better
        (-0.08, 0.02, "equivalent"),
        (-0.08, 0.2, "open"),
        (0.0, 1.0, "open"),
        (-0.5, 0.1, "worse"),
        (-0.5, 5.0, "open"),
    ],
)
def test_words(mean: float, spread: float, word: str) -> None:
    exact = _around(90.0, 3.0, 40)
    mine = {seed: exact[seed] + d for seed, d in _around(mean, spread, 40).items()}
    assert judge(mine, exact, 0.1, False).word == word


def test_a_relative_margin_is_of_the_exact_mean() -> None:
    exact = _around(-2.0, 0.1, 10)
    assert judge(exact, exact, 0.005, True).margin == pytest.approx(0.01)
    assert judge({0: -2.1, 1: -1.9, 77: 5.0}, exact, 0.1, False).pairs == 2
    with pytest.raises(ValueError, match="two common seeds"):
        judge({0: 1.0}, exact, 0.1, False)


def test_a_choice_that_diverges_is_worse_and_the_rest_is_compared(tmp_path: Path) -> None:
    exact = _around(90.0, 3.0, 40)
    mine = {seed: score + 0.5 for seed, score in exact.items()} | {7: math.nan, 9: -math.inf}
    verdict = judge(mine, exact, 0.1, False)
    assert (verdict.word, verdict.pairs, verdict.diverged) == ("worse", 40, 2)
    assert verdict.mean == pytest.approx(0.5)
    with pytest.raises(ValueError, match="exact training has diverged"):
        judge(exact, mine, 0.1, False)

    path = tmp_path / "scores.jsonl"
    row, exact_row = Cell("digits", "topk:0.1"), Cell("digits", "exact")
    for seed, score in enumerate([90.5, math.nan, 91.5]):
        records.add(path, exact_row, seed, 90.0 + seed)
        records.add(path, row, seed, score)
    scores = records.load(path)
    (found,) = (line for line in report.tables(scores).splitlines() if "topk:0.1 " in line)
    assert found.startswith("| topk:0.1 | 91.000 | +0.000 ±") and found.endswith("| 3 | worse |")
    assert "; 1 diverged |" in found
    report.plot(tmp_path / "plot.png", scores)


@pytest.mark.parametrize("seeds", [1, 3])
def test_a_choice_of_which_every_seed_diverges_says_so(seeds: int) -> None:
    mine = Cell("text", "topk:0.01")
    scores = {mine: dict.fromkeys(range(seeds), math.nan)}
    assert report.line(mine, scores).endswith(" diverged")
    assert f"| topk:0.01 | diverged | | {seeds} | |\n" in report.tables(scores)
    # The margin is a part of the mean of exact trainings that have not diverged.
    scores[Cell("text", "exact")] = {0: -3.0, 1: math.nan, 2: -math.inf}
    assert report.line(mine, scores).endswith(" diverged")
    assert f"(margin {3 * TASKS['text'].margin:.4f})" in report.tables(scores)


def test_scores_are_kept_by_seed_and_none_twice(tmp_path: Path) -> None:
    path = tmp_path / "scores.jsonl"
    exact, other = Cell("digits", "exact"), Cell("digits", "exact", ranks=4)
    for seed in range(3):
        records.add(path, exact, seed, 90.123456789 + seed)
        records.add(path, other, seed, -seed)
    assert records.load(path) == {
        exact: {0: 90.12346, 1: 91.12346, 2: 92.12346},
        other: {0: 0.0, 1: -1.0, 2: -2.0},
    }
    for seed in (1, 4):
        with pytest.raises(ValueError, match="has seeds 0 to 2 of"):
            records.add(path, other, seed, 1.0)
    assert len(path.read_text().splitlines()) == 2


def test_the_page_has_every_row(tmp_path: Path) -> None:
    path, page = tmp_path / "scores.jsonl", tmp_path / "page.md"
    page.write_text("before\n<!-- accuracy:begin -->\nold\n<!-- accuracy:end -->\nafter\n")
    exact, int8 = Cell("digits", "exact"), Cell("digits", "int8")
    for seed in range(10):
        records.add(path, exact, seed, 90.0 + seed)
        records.add(path, int8, seed, 90.0 + seed + (0.01 if seed % 2 else -0.02))
    scores = records.load(path)
    assert scores[int8][3] == 93.01
    assert report.line(int8, scores).endswith("equivalent, 10 seeds")
    report.write(page, scores)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    same_table = [cell for cell, _ in cells() if report.exact_of(cell) == exact]
    assert text.count("| not measured |") == len(same_table) - 2
    assert "| int8 | 94.495 | -0.005 ± 0.005, at least -0.014 | 10 | equivalent |" in text
    assert (tmp_path / "accuracy.png").stat().st_size > 10_000


def test_more_steps_are_compared_with_exact_training_of_the_usual_number() -> None:
    exact, usual = Cell("text", "exact"), Cell("text", "topk:0.01")
    longer = Cell("text", "topk:0.01", length=1.2)
    scores = {
        exact: {seed: -2.0 - seed for seed in range(5)},
        usual: {seed: -2.5 - seed for seed in range(5)},
        longer: {seed: -1.75 - seed for seed in range(5)},
    }
    assert report.name(longer) == report.name(usual) + ", 1.2 × the steps"
    lines = report.tables(scores).splitlines()
    assert "| topk:0.01 | -4.5000 | -0.5000 ± 0.0000, at least -0.5000 | 5 | worse |" in lines
    better = "-3.7500 | +0.2500 ± 0.0000, at least +0.2500 | 5 | equivalent |"
    assert f"| topk:0.01, 1.2 × the steps | {better}" in lines


def test_conditions_without_scores_keep_their_table_and_the_plot_its_tasks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- accuracy:begin -->\n<!-- accuracy:end -->\n")
    scores = {
        Cell(task, choice, ranks=ranks): {seed: -float(seed) - ranks for seed in range(4)}
        for task in ("digits", "text")
        for choice in ("exact", "int8")
        for ranks in ((2, 4) if task == "digits" else (2,))
    }
    report.write(page, scores)
    whole, drawn = page.read_text(), (tmp_path / "accuracy.png").read_bytes()
    of_text = {cell: {0: -5.0, 1: -6.0} for cell in scores if cell.task == "text"}
    report.write(page, of_text)
    changed = page.read_text()
    assert (tmp_path / "accuracy.png").read_bytes() == drawn
    assert changed != whole
    assert [line for line in changed.splitlines() if line.startswith("**")] == [
        re.sub(r"\(margin 0.01.*\)", "(margin 0.0275)", line)
        for line in whole.splitlines()
        if line.startswith("**")
    ]
    tables = [text.partition("\n\n**text")[0] for text in (whole, changed)]
    assert tables[0] == tables[1]
    report.write(page, scores)
    assert page.read_text() == whole

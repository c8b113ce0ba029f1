"""The tables and the plot of docs/accuracy.md, from scores. Pure but for write()."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from choices import CHOICES, EXACT
from judge import Verdict, judge
from plan import Cell, cells
from records import Scores
from tasks import TASKS

_BEGIN, _END = "<!-- accuracy:begin -->", "<!-- accuracy:end -->"
_PLOT = "accuracy.png"


def name(cell: Cell) -> str:
    """Return a row's conditions in words."""
    text = f"{cell.task} {cell.optimizer} {cell.ranks} ranks, rate x {cell.scale:g}"
    return f"{text}: {cell.label}"


def exact_of(cell: Cell) -> Cell:
    """Return the cell of exact training under the same conditions, of the usual length."""
    return replace(cell, choice=EXACT.name, length=1.0)


def verdict_of(cell: Cell, scores: Scores) -> Verdict | None:
    """Return how a cell compares with exact training; None without two finite seeds of both."""
    task = TASKS[cell.task]
    mine, exact = scores.get(cell, {}), scores.get(exact_of(cell), {})
    if sum(math.isfinite(mine[seed]) for seed in mine.keys() & exact.keys()) < 2:
        return None
    return judge(mine, exact, task.margin, task.relative)


def line(cell: Cell, scores: Scores) -> str:
    """Return a line about a cell that has scores."""
    places = _places(_margin(cell, scores))
    text = f"{name(cell):55} {_mean(scores[cell].values(), places)}"
    verdict = verdict_of(cell, scores)
    if verdict is None or cell.choice == EXACT.name:
        return text
    text += f"  {_difference(verdict, places)} (margin {verdict.margin:.{places}f})"
    return f"{text}: {verdict.word}, {verdict.pairs} seeds"


def _mean(scores: Iterable[float], places: int) -> str:
    """Return the mean of trainings that have not diverged as a text that says if all have."""
    finite = list(filter(math.isfinite, scores))
    return f"{statistics.fmean(finite):.{places}f}" if finite else "diverged"


def _margin(cell: Cell, scores: Scores) -> float:
    task = TASKS[cell.task]
    exact = list(filter(math.isfinite, scores.get(exact_of(cell), {}).values()))
    return task.margin * (abs(statistics.fmean(exact)) if task.relative and exact else 1)


def _places(margin: float) -> int:
    """Return how many decimal places show a hundredth of the margin."""
    return 2 - math.floor(math.log10(margin))


def _difference(verdict: Verdict, places: int) -> str:
    mean, error = f"{verdict.mean:+.{places}f}", f"{verdict.standard_error:.{places}f}"
    text = f"{mean} ± {error}, at least {verdict.least:+.{places}f}"
    return f"{text}; {verdict.diverged} diverged" if verdict.diverged else text


def _seeds(row: str) -> int:
    """Return the number of seeds that a row of a table tells."""
    number = row.split("|")[4].strip()
    return int(number) if number else 0


def _rows(group: Iterable[Cell], scores: Scores, earlier: dict[str, str]) -> Iterator[str]:
    """Yield the rows of a table; those of earlier scores stay if they are of more seeds."""
    for cell in group:
        values = scores.get(cell, {})
        before = earlier.get(cell.label)
        if before is not None and _seeds(before) > len(values):
            yield before
            continue
        if not values:
            yield f"| {cell.label} | | | | not measured |"
            continue
        places = _places(_margin(cell, scores))
        mean = _mean(values.values(), places)
        verdict = verdict_of(cell, scores)
        if cell.choice == EXACT.name or verdict is None:
            yield f"| {cell.label} | {mean} | | {len(values)} | |"
            continue
        difference = _difference(verdict, places)
        yield f"| {cell.label} | {mean} | {difference} | {verdict.pairs} | {verdict.word} |"


def tables(scores: Scores, before: str = "") -> str:
    """Return a table for each set of conditions that has scores, in the order of the plan.

    before: the tables of earlier scores; those of conditions that have none now stay, and so do
        rows of more seeds.
    """
    split = re.split(r"(?m)^(?=\*\*)", before)
    earlier = {table.partition("** (margin ")[0]: table.strip() for table in split}
    groups: dict[Cell, list[Cell]] = {}
    for cell, _ in cells():
        groups.setdefault(exact_of(cell), []).append(cell)
    parts = []
    for exact, group in groups.items():
        task = TASKS[exact.task]
        title = (
            f"**{exact.task}, {exact.optimizer}, {exact.ranks} ranks, "
            f"{exact.scale:g} × the tuned rate"
        )
        if not any(scores.get(cell) for cell in group):
            if title in earlier:
                parts.append(earlier[title])
            continue
        margin = _margin(exact, scores)
        rows = {
            row.split("|")[1].strip(): row
            for row in earlier.get(title, "").splitlines()[4:]
            if row.startswith("|")
        }
        parts.append(
            f"{title}** (margin {margin:.{_places(margin)}f})\n\n"
            f"| gradients travel as | {task.score} | difference | seeds | |\n"
            f"|---|---|---|---|---|\n" + "\n".join(_rows(group, scores, rows))
        )
    return "\n\n".join(parts)


def plot(path: Path, scores: Scores) -> None:
    """Draw the differences of all seeds for the tuned rate, SGD and two ranks, by task.

    There must be scores of exact training and of another choice for one task at least.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    tasks = [
        task
        for task in TASKS.values()
        if sum(bool(scores.get(Cell(task.name, choice))) for choice in CHOICES) > 1
    ]
    height = 3.2 * len(tasks)
    figure, axes = pyplot.subplots(len(tasks), 1, figsize=(9, height), squeeze=False)
    for axis, task in zip(axes[:, 0], tasks, strict=True):
        axis.set(title=f"{task.name}: {task.score}, difference to exact with the same seed")
        exact = scores[Cell(task.name, EXACT.name)]
        found = {
            choice: list(filter(math.isfinite, (mine[n] - exact[n] for n in sorted(both))))
            for choice in CHOICES
            if choice != EXACT.name
            and (both := (mine := scores.get(Cell(task.name, choice), {})).keys() & exact.keys())
        }
        axis.boxplot(list(found.values()), orientation="horizontal", tick_labels=list(found))
        margin = _margin(Cell(task.name, EXACT.name), scores)
        axis.axvline(-margin, color="red", linestyle=":", label=f"margin {margin:.3g}")
        axis.axvline(0, color="grey", linewidth=0.8)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def write(page: Path, scores: Scores) -> None:
    """Replace the tables that have scores between the page's markers.

    And the plot beside it, if there are scores of every task and choice that it shows.
    """
    before, _, rest = page.read_text().partition(_BEGIN)
    earlier, _, after = rest.partition(_END)
    lacking = {Cell(task, choice) for task in TASKS for choice in CHOICES} - scores.keys()
    if not (page.with_name(_PLOT).exists() and lacking):
        plot(page.with_name(_PLOT), scores)
    page.write_text(f"{before}{_BEGIN}\n{tables(scores, earlier)}\n{_END}{after}")

"""A part of `make accuracy`: what loses whole points of accuracy shows with a few seeds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ACCURACY = Path(__file__).parents[2] / "benchmarks" / "accuracy"
sys.path.append(str(ACCURACY))

import records
import report
from plan import Cell

CHOICES = ("int8", "topk:0.01", "rotate:8")


@pytest.mark.parametrize(
    ("ranks", "choices"),
    [
        # What loses most where something is lost.
        (2, CHOICES[1:2]),
        pytest.param(2, CHOICES, marks=pytest.mark.full),
        pytest.param(4, CHOICES, marks=pytest.mark.full),
    ],
)
def test_codecs_end_where_exact_training_ends(
    tmp_path: Path, ranks: int, choices: tuple[str, ...]
) -> None:
    file = tmp_path / "scores.jsonl"
    only = rf"digits sgd {ranks} ranks, rate x 1: ({'|'.join(choices)})$"
    subprocess.run(
        [sys.executable, ACCURACY / "run.py", file, "--only", only, "--seeds", "2"],
        check=True,
        timeout=600,
    )
    scores = records.load(file)
    for choice in choices:
        verdict = report.verdict_of(Cell("digits", choice, ranks=ranks), scores)
        assert verdict is not None
        assert verdict.pairs == 2
        # Seeds differ by 0.6 points, so a mean of two has a standard error of 0.4.
        assert verdict.mean > -1.2, (choice, verdict)

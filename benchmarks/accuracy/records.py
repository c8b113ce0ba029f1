"""The file of scores: a line of JSON for each cell, with the scores of seeds 0, 1, 2, and so on.

It belongs to the repository, because rows need more seeds than a day trains. Whoever changes what
a codec computes deletes its lines. Belongs to one process.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

from plan import Cell

Scores = dict[Cell, dict[int, float]]

_DIGITS = 7  # significant ones; margins are some thousandths of a score


def load(path: Path) -> Scores:
    """Return the scores of a file, by cell and seed; none where there is no file."""
    scores: Scores = defaultdict(dict)
    if path.exists():
        for line in path.read_text().splitlines():
            record = json.loads(line)
            found = record.pop("scores")
            scores[Cell(**record)] = dict(enumerate(found))
    return scores


def add(path: Path, cell: Cell, seed: int, score: float) -> None:
    """Add the score of a cell's next seed to the file. Raises ValueError for any other seed."""
    scores = load(path)
    if seed != len(scores[cell]):
        raise ValueError(f"{path} has seeds 0 to {len(scores[cell]) - 1} of {cell}, not {seed}")
    scores[cell][seed] = float(f"{score:.{_DIGITS}g}")
    lines = [
        json.dumps({**asdict(cell), "scores": list(of_seeds.values())})
        for cell, of_seeds in scores.items()
        if of_seeds
    ]
    beside = path.with_name(path.name + ".new")  # a run may be stopped at any time
    beside.write_text("\n".join(lines) + "\n")
    beside.replace(path)

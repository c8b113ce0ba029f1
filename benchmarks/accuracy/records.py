"""The file of scores: a line of JSON for each cell and seed. Belongs to one process."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

from plan import Cell

Scores = dict[Cell, dict[int, float]]


def load(path: Path) -> Scores:
    """Return the scores of a file, by cell and seed; none where there is no file."""
    scores: Scores = defaultdict(dict)
    if path.exists():
        for line in path.read_text().splitlines():
            record = json.loads(line)
            seed, score = record.pop("seed"), record.pop("score")
            scores[Cell(**record)][seed] = score
    return scores


def add(path: Path, cell: Cell, seed: int, score: float) -> None:
    """Append a score to the file."""
    with path.open("a") as file:
        file.write(json.dumps({**asdict(cell), "seed": seed, "score": score}) + "\n")

"""Trains the cells of docs/accuracy.md, compares them with exact training, and writes the page.

    python benchmarks/accuracy/run.py scores.jsonl --page docs/accuracy.md
    python benchmarks/accuracy/run.py scores.jsonl --only "digits sgd 2 .*int8" --seeds 40

Scores are added to the file, and seeds that it has are not trained again, so a run can be stopped
at any time. Everything takes hours.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import records
import report
from choices import ALL, EXACT
from plan import Cell, cells


def train(cell: Cell, first: int, end: int, path: Path) -> None:
    """Train with the seeds first to end - 1 and add the scores to the file.

    Raises CalledProcessError if the job fails.
    """
    here = Path(__file__).parent
    command = [sys.executable, "-m", "perseus.run", "-np", str(cell.ranks), sys.executable]
    command += [str(here / "worker.py"), cell.task, cell.optimizer]
    command += [str(cell.scale), str(cell.length)]
    choice = ALL[cell.choice]
    command += [str(first), str(end), choice.wrapping()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **choice.environment()}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        for line in job.stdout:
            _, found, rest = line.partition('{"seed"')  # perseusrun says whose line it is
            if found:
                records.add(path, cell, **json.loads(found + rest))
    if job.returncode != 0:
        raise subprocess.CalledProcessError(job.returncode, command)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="of scores; see records.py")
    parser.add_argument("--only", default="", metavar="REGEX", help="of the rows' names")
    parser.add_argument("--seeds", type=int, help="per cell; default the plan's")
    parser.add_argument("--page", type=Path, help="the page to write the tables into")
    given = parser.parse_args()
    given.file.parent.mkdir(parents=True, exist_ok=True)
    wanted = [(cell, seeds) for cell, seeds in cells() if re.search(given.only, report.name(cell))]
    exact = {report.exact_of(cell) for cell, _ in wanted}
    for cell, seeds in [(cell, seeds) for cell, seeds in cells() if cell in exact] + [
        (cell, seeds) for cell, seeds in wanted if cell.choice != EXACT.name
    ]:
        first, end = len(records.load(given.file)[cell]), given.seeds or seeds
        if first < end:
            train(cell, first, end, given.file)
        print(report.line(cell, records.load(given.file)), flush=True)
    if given.page is not None:
        report.write(given.page, records.load(given.file))


if __name__ == "__main__":
    main()

"""Elastic jobs of three ranks, of which one fails, and what their ranks print.

When a rank enters a world it prints `enter RANK SIZE STEP PID`; at the end, `finished RANK …`.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from ranks.launch import run_ranks


@dataclass(frozen=True)
class ElasticJob:
    """worlds: the pids of each, by rank. steps: with which each began. end: what all ranks say."""

    worlds: list[list[str]]
    steps: list[int]
    end: str
    output: str


def run_elastic(program: Path, *arguments: object) -> ElasticJob:
    """Run the program on three ranks; it goes on with two, and takes a new one in after 1 s."""
    flags = ["--min-np", "2", "--blacklist-cooldown-range", "1", "2"]
    status, output = run_ranks(3, [*flags, sys.executable, str(program), *map(str, arguments)])
    assert status == 0, output
    entered = re.findall(r"enter (\d) (\d) (\d+) (\d+)", output)
    begins = list(dict.fromkeys(each[1:3] for each in entered))
    worlds = [[each[3] for each in sorted(entered) if each[1:3] == begin] for begin in begins]
    ends = re.findall(r"finished \d (.*)", output)
    assert len(ends) == 3 and len(set(ends)) == 1, output
    return ElasticJob(worlds, [int(step) for _, step in begins], ends[0], output)


def assert_rank_1_was_replaced(job: ElasticJob, step: int) -> None:
    """Rank 1 failed after the commit of `step`; survivors stayed, and a new process came."""
    first, without, (*survivors, new) = job.worlds
    assert without == survivors == [first[0], first[2]] and new not in first, job.output
    assert job.steps[1] == step, job.output

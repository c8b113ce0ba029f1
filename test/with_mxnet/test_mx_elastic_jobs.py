"""Elastic jobs of perseusrun with MXNet: a rank is killed and replaced."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("mxnet")

from ranks.launch import run_ranks

RANK = Path(__file__).with_name("elastic_rank.py")


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_a_killed_rank_is_replaced(tmp_path: Path, codec: str) -> None:
    flags = ["--min-np", "2", "--blacklist-cooldown-range", "1", "2"]
    status, output = run_ranks(3, [*flags, sys.executable, str(RANK), str(tmp_path), codec])
    assert status == 0, output
    entered = re.findall(r"enter (\d) (\d) (\d+) (\d+)", output)
    begins = dict.fromkeys(each[1:3] for each in entered)
    worlds = [sorted(each for each in entered if each[1:3] == begin) for begin in begins]
    first, without, again = ([each[3] for each in world] for world in worlds)
    assert without == [first[0], first[2]], output
    assert again[:2] == without and len(again) == 3 and again[2] not in first, output
    assert int(worlds[1][0][2]) == 3  # the commit before the step in which rank 1 was killed
    ends = re.findall(r"finished \d (\d+) (\d+) (\w+)", output)
    assert len(ends) == 3 and len(set(ends)) == 1, output
    steps, updates, _ = ends[0]
    assert steps == updates  # the optimizer's own count goes back, and along, with the state

"""Elastic jobs of perseusrun with TensorFlow: a rank is killed and replaced."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorflow")

from ranks.launch import run_ranks

RANK = Path(__file__).with_name("elastic_rank.py")


def test_a_killed_rank_is_replaced(tmp_path):
    flags = ["--min-np", "2", "--blacklist-cooldown-range", "1", "2"]
    status, output = run_ranks(3, [*flags, sys.executable, str(RANK), str(tmp_path)])
    assert status == 0, output
    entered = re.findall(r"enter (\d) (\d) (\d+) (\d+)", output)
    begins = dict.fromkeys(each[1:3] for each in entered)
    worlds = [sorted(each for each in entered if each[1:3] == begin) for begin in begins]
    first, without, again = ([each[3] for each in world] for world in worlds)
    assert without == [first[0], first[2]], output
    assert again[:2] == without and len(again) == 3 and again[2] not in first, output
    assert int(worlds[1][0][2]) == 3  # the commit before the step in which rank 1 was killed
    ends = re.findall(r"finished \d (\d+ \w+)", output)
    assert len(ends) == 3 and len(set(ends)) == 1, output

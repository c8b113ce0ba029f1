"""Elastic training on real ranks: worlds that end are left, and the next one is joined."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

import pytest
from ranks.launch import PARALLEL, run_ranks

pytest.importorskip("torch")


def _run(ranks: int, *command: object, flags: Sequence[str] = ()) -> str:
    status, output = run_ranks(ranks, [*flags, sys.executable, *map(str, command)])
    assert status == 0, output
    return output


def _expect_all_finished(ranks: int, *command: object) -> None:
    output = _run(ranks, *command)
    for rank in range(ranks):
        assert f"rank {rank} finished" in output


@pytest.mark.parametrize(
    ("ranks", "failing"),
    [
        *(
            pytest.param(ranks, failing, marks=pytest.mark.full)
            for ranks, failing in ((1, 0), (2, 1), (3, 1), (4, 2))
        ),
        (2, 0),
    ],
)
def test_a_failure_on_one_rank_costs_nothing_but_the_way_back_to_the_commit(ranks, failing):
    _expect_all_finished(ranks, PARALLEL / "programs" / "elastic_training.py", failing)


def test_a_killed_rank_is_replaced_and_survivors_keep_their_residuals(tmp_path):
    flags = ["--min-np", "2", "--blacklist-cooldown-range", "1", "2"]
    program = PARALLEL / "programs" / "elastic_replacement.py"
    output = _run(3, program, tmp_path, flags=flags)
    entered = re.findall(r"enter (\d) (\d) (\d+) (\w+) (\d+)", output)
    worlds = [[each for each in entered if each[1:3] == key] for key in _worlds(entered)]
    assert [len(world) for world in worlds] == [3, 2, 3], output
    first, without, again = ([each[4] for each in sorted(world)] for world in worlds)
    assert without == [first[0], first[2]] and again[:2] == without and again[2] not in first
    assert [each[3] for each in sorted(worlds[2])] == ["True", "True", "False"], output
    ends = re.findall(r"finished \d (\d+ \d+ \w+) True", output)
    assert len(ends) == 3 and len(set(ends)) == 1, output


def test_commits_without_copies_lose_no_step_of_the_survivors(tmp_path):
    program = PARALLEL / "programs" / "elastic_without_copies.py"
    output = _run(3, program, tmp_path, flags=["--min-np", "2"])
    entered = re.findall(r"enter (\d) (\d) (\d+) (\d+)", output)
    worlds = _worlds(entered)
    assert worlds == [("3", "0"), ("3", "6"), ("2", "8")], output
    first, second, third = (
        [each[3] for each in sorted(entered) if each[1:3] == world] for world in worlds
    )
    # The one that is behind takes over what the others have.
    assert second == [*first[1:], first[0]] and third == first[1:], output
    for pid in third:
        steps = re.findall(rf"did {pid} (\d+)", output)
        assert list(map(int, steps)) == list(range(12)), output
    assert re.findall(r"finished (\d) \d+ True", output) in (["0", "1"], ["1", "0"]), output


def _worlds(entered):
    """The sizes and steps with which worlds began, in their order."""
    return list(dict.fromkeys(each[1:3] for each in entered))


def test_the_elastic_demo_learns_digits_through_a_failure():
    pytest.importorskip("sklearn")
    pytest.importorskip("tqdm")
    example = PARALLEL.parent.parent / "examples" / "pytorch_elastic_mnist.py"
    output = _run(2, example, "--epochs", "4", "--fail-at-epoch", "1")
    assert "going on at epoch 1, batch 5" in output
    assert output.count("failing on purpose") == 1
    found = re.findall(r"test accuracy: (\d\.\d+)", output)
    assert len(found) == 1, output  # rank 0 alone
    assert float(found[0]) >= 0.85

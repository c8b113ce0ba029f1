"""Checks that fail on purpose, on one rank or all, between others that pass."""

from __future__ import annotations

import os

from perseus import basics, control


def check_everyone_passes() -> None:
    assert len(control.gather_lines("", "before")) == basics.size()


def check_one_fails_while_others_wait() -> None:
    answer = 40 + basics.rank()
    assert basics.rank() != 1 or answer == 42
    control.gather_lines("", "never on rank 1")


def check_the_next_has_a_world_of_everyone() -> None:
    lines = control.gather_lines(str(basics.rank()), "after")
    assert lines == [str(rank) for rank in range(basics.size())]


def check_everyone_fails_after_another_world() -> None:
    basics.shutdown()
    basics.init()
    raise ValueError(f"from rank {basics.rank()}")


def check_ranks_that_made_different_numbers_of_worlds_meet() -> None:
    first = basics.rank() == 0
    basics.shutdown()
    if first:
        basics._world.epoch += 3
        raise ValueError("in no world")


def check_they_have() -> None:
    assert control.gather_lines("here", "again") == ["here"] * basics.size()


def check_one_ends() -> None:
    if basics.rank() == 1:
        os._exit(3)
    control.barrier()


def check_nobody_gets_here() -> None:
    raise AssertionError("run after a rank has ended")

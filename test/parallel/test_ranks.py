"""Checks on ranks: one that fails shows its values, and those behind it run all the same."""

from __future__ import annotations

import pytest
from ranks import lockstep
from ranks.launch import Launch, checks_of


@pytest.fixture(scope="module")
def launched() -> Launch:
    names = ("failing_checks", "following_checks")
    return Launch({name: checks_of(name) for name in names}, 3)


def _failure(launched: Launch, check: str) -> str:
    with pytest.raises(pytest.fail.Exception) as failure:
        launched.expect("failing_checks", f"check_{check}")
    return str(failure.value)


@pytest.mark.parametrize(
    "check",
    ["everyone_passes", "the_next_has_a_world_of_everyone", "they_have"],
)
def test_what_passes_on_every_rank_passes(launched, check):
    launched.expect("failing_checks", f"check_{check}")


def test_the_rank_that_failed_comes_first_with_its_values(launched):
    text = _failure(launched, "one_fails_while_others_wait")
    assert text.startswith("on rank 1:\n"), text
    assert "assert (1 != 1 or 41 == 42)" in text, text
    assert "Horovod has been shut down" in text.partition("\non rank ")[2], text


def test_every_rank_that_failed_is_named(launched):
    text = _failure(launched, "everyone_fails_after_another_world")
    assert all(f"ValueError: from rank {rank}" in text for rank in range(3)), text


def test_a_failure_outside_a_world_is_one(launched):
    assert "in no world" in _failure(launched, "ranks_that_made_different_numbers_of_worlds_meet")


def test_a_rank_that_ends_leaves_what_follows_to_another_launch(launched):
    assert "not run to its end" in _failure(launched, "one_ends")
    assert "not run to its end" in _failure(launched, "nobody_gets_here")
    assert launched.modules == {"failing_checks"}


@pytest.mark.parametrize("error", ["of rank 0", ""])
def test_ranks_that_do_not_come_are_given_up(tmp_path, monkeypatch, error):
    monkeypatch.setattr(lockstep, "GRACE" if error else "PATIENCE", 0.1)
    with lockstep.Lockstep(tmp_path, 2) as both:
        step = lockstep.Step(tmp_path, 0)
        step.report("a", 0, error=error)
        assert "others did not end it" in step.everyone()["abandoned"]
        step.close()
    assert [report["error"] for report in both.reports["a"]] == [error]


def test_one_check_runs_alone():
    launched = Launch({"failing_checks": ["check_they_have"]}, 2)
    launched.expect("failing_checks", "check_they_have")
    assert launched.status == 0, launched.output
    with pytest.raises(pytest.fail.Exception):
        launched.expect("failing_checks", "check_everyone_passes")

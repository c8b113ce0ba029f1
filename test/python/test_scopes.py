"""Prefixes of reductions' names in one world and in the next; test/parallel has their use."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from perseus.gradients import scopes
from perseus.gradients.scopes import Scope
from perseus.process_sets import ProcessSet, global_process_set


@pytest.fixture(name="_first_world", autouse=True)
def _first_world_fixture() -> Iterator[None]:
    scopes._begin_world()
    yield
    gc.collect()


def _scope(process_set: ProcessSet = global_process_set) -> Scope:
    return Scope("sgd", process_set)


def test_numbers_follow_first_use():
    unused, first, second = _scope(), _scope(), _scope()
    assert (second.prefix(), first.prefix()) == ("sgd", "sgd_1")
    assert (second.prefix(), unused.prefix()) == ("sgd", "sgd_2")


def test_others_do_not_shift_numbers():
    part = ProcessSet([0])
    part.process_set_id = 1  # of which other ranks do not use anything
    assert _scope(part).prefix() == "sgd"
    assert Scope("adam", global_process_set).prefix() == "adam"
    assert _scope().prefix() == "sgd"


def test_old_ranks_number_as_new_ones_in_the_next_world():
    dropped, kept = _scope(), _scope()
    assert (dropped.prefix(), kept.prefix()) == ("sgd", "sgd_1")
    scopes._begin_world()
    assert kept.prefix() == "sgd"
    assert _scope().prefix() == "sgd_1"


def test_graphs_keep_what_they_contain():
    kept, others = _scope(), [_scope()]
    assert kept.prefix() == "sgd"
    for _ in range(2):  # another one in each world
        assert others[-1].prefix() == "sgd_1"
        kept.keep()
        others[-1].keep()
        others.clear()
        scopes._begin_world()
        assert kept.prefix() == "sgd"
        others.append(_scope())

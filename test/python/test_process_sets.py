"""Copies of process sets; test/parallel has the collectives on them."""

from __future__ import annotations

import copy
import pickle

import pytest

from perseus.process_sets import ProcessSet, global_process_set


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_the_global_set_is_pickled_by_name(protocol):
    """A file from one world holds in another one, with other ranks."""
    assert pickle.loads(pickle.dumps(global_process_set, protocol)) is global_process_set


def test_copies_of_the_global_set_are_the_set():
    assert copy.deepcopy(global_process_set) is global_process_set
    assert copy.copy(global_process_set) is global_process_set


def test_other_sets_are_copied_with_their_ranks():
    first = ProcessSet([3, 1])
    for again in (pickle.loads(pickle.dumps(first)), copy.deepcopy(first)):
        assert again is not first
        assert (again.ranks, again.process_set_id) == ([1, 3], None)

"""perseus.gradients: which gradients go together, and what `groups=` may be, in any framework."""

from __future__ import annotations

import pytest

from perseus.gradients.arguments import checked_groups
from perseus.gradients.bundles import bundles, split


def test_parts_are_contiguous_and_the_first_ones_are_larger():
    assert split("abcdefg", 3) == ["abc", "de", "fg"]


def test_without_groups_each_goes_by_itself():
    assert bundles("abc", None) == ((0,), (1,), (2,))
    assert bundles("", None) == bundles("", 2) == bundles("", [["a"]]) == ()


def test_a_number_of_groups_is_at_most_the_number_of_gradients():
    assert bundles("abcde", 2) == ((0, 1, 2), (3, 4))
    assert bundles("ab", 5) == ((0,), (1,))


def test_lists_come_first_in_the_order_of_gradients_without_what_is_missing():
    assert bundles("abcd", [["d", "b"], ["x"], []]) == ((1, 3), (0,), (2,))


def test_the_old_name_of_groups_warns_and_gives_way():
    with pytest.warns(DeprecationWarning, match="num_groups"):
        assert checked_groups(None, 3, "tensor", id) == 3
    with pytest.warns(DeprecationWarning, match="num_groups"):
        assert checked_groups(2, 3, "tensor", id) == 2


@pytest.mark.parametrize("groups", [0, -1, "ab", [1], ("a",)])
def test_what_is_no_group_is_refused(groups):
    with pytest.raises(ValueError, match="a positive integer or a list of lists of tensors"):
        checked_groups(groups, 0, "tensor", id)


def test_nothing_is_in_two_groups():
    with pytest.raises(ValueError, match="A tensor can only appear once in groups"):
        checked_groups([["a"], ["b", "a"]], 0, "tensor", str)

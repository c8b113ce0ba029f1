"""What rank 0 tells of its store: never a secret that was given, and enough to compare them."""

from __future__ import annotations

import json

import pytest

from perseus.run.bootstrap.announcement import (
    announcement,
    failure_announcement,
    read_announcement,
)

SECRET = b"0123456789abcdef"


def test_a_secret_that_rank_0_made_is_told() -> None:
    text = announcement("a.b", 6667, SECRET, given=False)
    assert read_announcement(text, None, 3) == ("a.b", 6667, SECRET)


def test_a_secret_that_was_given_is_compared_and_not_told() -> None:
    texts = [announcement("a.b", 6667, SECRET, given=True) for _ in range(2)]
    assert texts[0] != texts[1]
    for text in texts:
        assert SECRET.decode() not in text
        assert read_announcement(text, SECRET, 3) == ("a.b", 6667, SECRET)


@pytest.mark.parametrize(
    ("first", "other", "message"),
    [
        (SECRET, SECRET + b"!", "rank 3 has another secret than rank 0: give all ranks the same"),
        (SECRET, None, "rank 3 was given no secret, but rank 0 was: give all ranks the same"),
        (None, SECRET, "rank 3 was given a secret, but rank 0 was not: give all ranks the same"),
    ],
)
def test_a_rank_with_another_secret_or_none_is_named(
    first: bytes | None, other: bytes | None, message: str
) -> None:
    text = announcement("a.b", 6667, first or b"made by rank 0...", first is not None)
    with pytest.raises(ValueError, match=rf"^\[rendezvous\] {message}") as caught:
        read_announcement(text, other, 3)
    assert SECRET.decode() not in str(caught.value)


@pytest.mark.parametrize("index", [0, 1, 3, 4])
def test_an_address_that_somebody_else_has_put_in_is_refused(index: int) -> None:
    fields = json.loads(announcement("a.b", 6667, SECRET, given=True))
    fields[index] = 6668 if index == 1 else "another"
    with pytest.raises(ValueError, match="has another secret"):
        read_announcement(json.dumps(fields), SECRET, 3)


@pytest.mark.parametrize("given", [None, SECRET])
def test_what_keeps_rank_0_from_starting_is_an_error_of_one_line(given: bytes | None) -> None:
    text = failure_announcement(OSError("[rendezvous] ports are taken:\nstop the other job"))
    with pytest.raises(
        ValueError,
        match=r"^\[rendezvous\] rank 0 could not start: "
        r"\[rendezvous\] ports are taken: stop the other job$",
    ):
        read_announcement(text, given, 3)

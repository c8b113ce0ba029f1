"""The first of several failures is raised, and tells the others."""

from __future__ import annotations

import traceback

import pytest
import torch

import perseus.torch.horovod as hvd
from perseus.errors import MismatchError
from perseus.failures import Failures
from perseus.torch import reducer as reducers
from perseus.torch.session import session


def told_by(call) -> str:
    """The traceback of what it raises, a MismatchError."""
    with pytest.raises(MismatchError) as caught:
        call()
    return "".join(traceback.format_exception(caught.value))


def collected(*errors: Exception) -> Failures:
    failures = Failures()
    for error in errors:
        failures.add(error)
    return failures


def test_none_is_no_failure():
    failures = Failures()
    assert not failures
    failures.raise_first()


def test_what_failed_alike_is_told_once():
    failures = collected(MismatchError("b"), MismatchError("b"), ValueError("b"))
    assert failures
    text = told_by(failures.raise_first)
    assert text.count("MismatchError: b") == 1
    assert "not the only" not in text


def test_others_are_told_with_their_kind_and_in_order():
    text = told_by(collected(MismatchError("b"), ValueError("a"), KeyError("c")).raise_first)
    lines = [
        "MismatchError: b",
        "It was not the only failure: ValueError: a",
        "It was not the only failure: KeyError: 'c'",
    ]
    places = [text.index(line) for line in lines]
    assert places == sorted(places)


def test_very_many_are_counted():
    text = told_by(collected(*(MismatchError(f"<{i}>") for i in range(40))).raise_first)
    assert all(f"<{i}>" in text for i in range(17))
    assert "<17>" not in text
    assert "23 more failures are not shown." in text


def test_every_gradient_that_failed_is_told(monkeypatch):
    names = {torch.nn.Parameter(torch.ones(i + 1)): f"gradient.{i}" for i in range(3)}
    hvd.init()
    plan = reducers.Plan(compression=hvd.Compression.none)
    reducer = reducers.GradientReducer(
        list(names), names, plan, passes=1, step_of=lambda _: (0.0, 0.0)
    )
    waited = []

    def fails(handle: int) -> None:
        waited.append(handle)
        raise MismatchError(f"[engine] number {len(waited)} differs")

    with monkeypatch.context() as patch:
        patch.setattr(session, "synchronize", fails)
        text = told_by(reducer.synchronize)
    hvd.shutdown()
    assert len(waited) == len(set(waited)) == 3
    assert all(f"[engine] number {i} differs" in text for i in (1, 2, 3))

"""Local steps whose waiting is interrupted lose neither an exchange nor a turn."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from perseus.gradients.local_steps import LocalSteps, Pace
from perseus.process_sets import ProcessSet


@dataclass
class _Exchange:
    part: int
    due: int

    def received(self) -> bool:
        return False


class _Steps(LocalSteps):
    """Records what is begun and applied; wait() raises `interrupt` once."""

    def __init__(self, pace: Pace) -> None:
        super().__init__("steps", ProcessSet([0]), pace)
        self.events: list[tuple[str, int, int]] = []
        self.interrupt: BaseException | None = None

    def agree(self) -> None:
        pass

    def begin(self, part: int, due: int) -> _Exchange:
        self.events.append(("begin", part, due))
        return _Exchange(part, due)

    def wait(self, begun: _Exchange) -> None:
        if self.interrupt is not None:
            interrupt, self.interrupt = self.interrupt, None
            raise interrupt

    def apply(self, begun: _Exchange) -> None:
        self.events.append(("apply", begun.part, begun.due))

    send = receive = correct = replace = None


_Steps.__abstractmethods__ = frozenset()


def _taken(pace: Pace, interrupted: int) -> list[tuple[str, int, int]]:
    steps = _Steps(pace)
    for step in range(1, 13):
        steps.begin_step()
        if step == interrupted:
            steps.interrupt = KeyboardInterrupt()
            with pytest.raises(KeyboardInterrupt):
                steps.end_step()
        else:
            steps.end_step()
    steps.settle()
    return steps.events


@pytest.mark.parametrize("pace", [Pace(2, 1, 2), Pace(4, 2, 1), Pace(2, 2, 0)])
def test_an_interrupted_step_is_ended_before_the_next_one(pace):
    due = [due for event, _, due in _taken(pace, 0) if event == "apply"]
    for step in set(due):
        assert _taken(pace, step) == _taken(pace, 0)


@pytest.mark.parametrize("pace", [Pace(2, 2, 2), Pace(2, 1, 0), Pace(1, 1, 1)])
def test_what_was_sent_before_an_interrupt_is_not_sent_again(pace):
    class Interrupted(list):
        def append(self, each):
            super().append(each)
            raise KeyboardInterrupt

    steps = _Steps(pace)
    steps._under_way = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        for _ in range(pace.every):
            steps.begin_step()
            steps.end_step()
    steps._under_way = list(steps._under_way)
    steps.begin_step()
    if pace.parts == 2:
        steps.end_step()
    begun = [part for event, part, _ in steps.events if event == "begin"]
    assert sorted(begun) == list(range(pace.parts))


def test_an_exchange_that_fails_is_not_waited_for_again():
    steps = _Steps(Pace(1, 1, 1))
    steps.begin_step()
    steps.end_step()
    steps.begin_step()
    steps.interrupt = FloatingPointError()
    with pytest.raises(FloatingPointError):
        steps.end_step()
    steps.begin_step()
    assert steps.events == [("begin", 0, 2), ("begin", 0, 3)]

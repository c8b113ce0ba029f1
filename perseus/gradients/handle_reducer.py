"""Gradients reduced by operations whose handles the thread that steps waits for.

For frameworks that submit tensors as soon as Python has them. Where a graph or an engine orders
operations (TensorFlow, MXNet), nothing is waited for, and their reducers stand on Reducer alone.
Belongs to the thread that steps the optimizer; hooks may begin reductions in other threads, one at
a time for each reduction.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from perseus import basics
from perseus.failures import Failures
from perseus.gradients.plan import Plan
from perseus.gradients.reducer import Reducer
from perseus.operations import Kind

_ALLREDUCE = Kind.ALLREDUCE
_POLL_SECONDS = 0.001


class Session(Protocol):
    """A framework's door to the core, which knows where its tensors lie; see perseus._core."""

    submit: Callable[..., int]
    poll: Callable[[int], bool]
    synchronize: Callable[[int], Any]


class Reduction:
    """One operation, which reduces a gradient or a bundle of them under one name.

    key: what checkpoints call what codecs hold back of it.
    gradients: what begin() was given; their results once finish() has returned.
    others: functions that finish what was started beside the operation; each waits, and returns
        whether its result may be applied.
    """

    __slots__ = ("contexts", "gradients", "handle", "key", "name", "others", "sent")

    def __init__(self, name: str, key: str) -> None:
        self.name = name
        self.key = key
        self.handle = 0  # 0 = not under way
        self.gradients: list[Any] = []
        self.sent: list[Any] = []
        self.contexts: list[Any] = []
        self.others: list[Callable[[], bool]] = []

    def is_under_way(self) -> bool:
        """Whether it has begun and was not finished."""
        return self.handle != 0 or bool(self.others)


class HandleReducer(Reducer):
    """Begins reductions by a plan and finishes them; what a reduction is of is the adapter's.

    session: the framework's. reductions: those to drop when a new world begins, because the core
    numbers handles anew; an adapter puts them there.
    """

    def __init__(self, plan: Plan, session: Session) -> None:
        super().__init__(plan)
        self.reductions: list[Any] = []  # Reduction, or what an adapter has made of it
        self._session = session
        self._plain = plan.compression.in_core
        self._op = plan.op
        self._prescale = plan.prescale
        self._postscale = plan.postscale
        self._codec = plan.compression.codec
        self._codec_argument = plan.compression.argument
        _living.add(self)

    def begin(self, reduction: Reduction, gradients: list[Any]) -> None:
        """Start reducing dense gradients: in place, or what the compression makes of them."""
        reduction.gradients = gradients
        if not self._plain:
            pairs = [self.plan.compression.compress(gradient) for gradient in gradients]
            gradients = reduction.sent = [tensor for tensor, _ in pairs]
            reduction.contexts = [context for _, context in pairs]
        tensors = gradients[0] if len(gradients) == 1 else tuple(gradients)
        if self.residuals.waiting:
            self.residuals.hand_over(reduction.key)
        reduction.handle = self._session.submit(
            _ALLREDUCE, reduction.name, tensors, tensors, op=self._op, prescale=self._prescale,
            postscale=self._postscale, group=self.plan.process_set.process_set_id,
            gradient_of=self.number, codec=self._codec, codec_argument=self._codec_argument,
        )  # fmt: skip

    def finish(self, reductions: Iterable[Reduction], failures: Failures) -> bool:
        """Wait for those that are under way; whether all of them may be applied.

        What fails is added to the failures, and the others are waited for all the same.
        """
        wait = self._session.synchronize
        applies = True
        for reduction in reductions:
            try:
                if reduction.handle != 0:
                    # None: part of a sum that is not complete, or a NaN that is to be skipped.
                    if wait(reduction.handle) is None:
                        applies = False
                    elif not self._plain:
                        self._decompress(reduction)
            except Exception as error:
                failures.add(error)
            reduction.handle = 0
            if reduction.others:
                applies = _finish(reduction.others, failures) and applies
                reduction.others = []
            if not self._plain:
                reduction.sent = reduction.contexts = []
        return applies

    def wait(self) -> None:
        """Return once all that has begun has ended; it is still to be finished."""
        for reduction in self.reductions:
            while reduction.handle != 0 and not self._session.poll(reduction.handle):
                time.sleep(_POLL_SECONDS)

    def busy(self) -> bool:
        """Whether a reduction has begun and was not finished."""
        return any(reduction.is_under_way() for reduction in self.reductions)

    def forget_begun(self) -> None:
        """Drop reductions without waiting: they belong to a world that is gone."""
        for reduction in self.reductions:
            reduction.handle = 0
            reduction.gradients = reduction.sent = reduction.contexts = []
            reduction.others = []

    def written(self, gradient: Any, result: Any) -> Any:
        """The result, where the adapter wants it: here where it is."""
        del gradient
        return result

    def _decompress(self, reduction: Reduction) -> None:
        compression = self.plan.compression
        reduction.gradients = [
            self.written(gradient, compression.decompress(tensor, context))
            for gradient, tensor, context in zip(
                reduction.gradients, reduction.sent, reduction.contexts, strict=True
            )
        ]


def _finish(others: list[Callable[[], bool]], failures: Failures) -> bool:
    applies = True
    for finish in others:
        try:
            applies = finish() and applies
        except Exception as error:
            failures.add(error)
    return applies


_living: weakref.WeakSet[HandleReducer] = weakref.WeakSet()


def _begin_world() -> None:
    for reducer in _living:
        reducer.forget_begun()


basics.at_init(_begin_world)

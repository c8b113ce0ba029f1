"""Reduces gradients by operations with handles, for which the thread that steps waits.

It serves frameworks that submit tensors as soon as Python has them. In TensorFlow and MXNet, a
graph or an engine orders operations, so nothing waits for handles, and their reducers derive from
Reducer. Belongs to the thread that steps the optimizer; hooks may begin reductions in other
threads, one at a time for each reduction.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from perseus.failures import Failures
from perseus.gradients.plan import Plan
from perseus.gradients.reducer import Reducer
from perseus.operations import Kind
from perseus.worlds import outlives_worlds

_ALLREDUCE = Kind.ALLREDUCE
_POLL_SECONDS = 0.001


class Session(Protocol):
    """A framework's interface to the core, which takes its tensors; see perseus._core."""

    submit: Callable[..., int]
    poll: Callable[[int], bool]
    synchronize: Callable[[int], Any]


class Reduction:
    """One operation, which reduces a gradient or a bundle of gradients under one name.

    key: the name of its residuals in checkpoints.
    gradients: the arguments of begin(), and the results once it is finished.
    finished: whether finish() has waited for it, which an interrupt may end before the others. The
        adapter sets it to False before the next one.
    applies: whether its results may be applied, once it is finished. The adapter sets it to True
        before the next one, unless that begins with begin().
    others: functions that finish operations which were started beside this one. Each of them waits
        and returns whether its result may be applied.
    """

    __slots__ = (
        "applies", "contexts", "finished", "gradients", "handle", "key", "name", "others", "sent",
    )  # fmt: skip

    def __init__(self, name: str, key: str) -> None:
        self.name = name
        self.key = key
        self.handle = 0  # 0 = not in flight
        self.finished = False
        self.applies = True
        self.gradients: list[Any] = []
        self.sent: list[Any] = []
        self.contexts: list[Any] = []
        self.others: list[Callable[[], bool]] = []

    def is_under_way(self) -> bool:
        """Return whether it has begun and has not been finished."""
        return self.handle != 0 or bool(self.others)


class HandleReducer(Reducer):
    """Begins and finishes reductions according to a plan; an adapter decides what each one reduces.

    session: the framework's interface to the core.
    reductions: all reductions of the adapter, which it sets. When a new world begins, those in
        flight are dropped, because the core numbers handles anew.
    unapplied: whether there have been results since the adapter has last set this to False, which
        it does once a step has applied them.
    """

    def __init__(self, plan: Plan, session: Session) -> None:
        super().__init__(plan)
        self.reductions: list[Any] = []  # of Reduction, or of an adapter's subclass of it
        self.unapplied = False
        self._session = session
        self._plain = plan.compression.in_core
        self._op = plan.op
        self._prescale = plan.prescale
        self._postscale = plan.postscale
        self._codec = plan.compression.codec
        self._codec_argument = plan.compression.argument
        outlives_worlds(self)

    def begin(
        self,
        reduction: Reduction,
        gradients: list[Any],
        learning_rate: float = 0.0,
        momentum: float = 0.0,
    ) -> None:
        """Start reducing dense gradients, in place or as the tensors that compression returns.

        learning_rate, momentum: see perseus_request.
        """
        reduction.gradients = gradients
        reduction.applies = True
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
            learning_rate=learning_rate, momentum=momentum,
        )  # fmt: skip

    def finish(self, reductions: Sequence[Reduction], failures: Failures) -> bool:
        """Wait for reductions that are in flight; return whether all may be applied.

        An error is added to `failures`, and the other reductions are still waited for. After an
        interrupt, the next call goes on, and what it returns is true of all nevertheless.
        """
        wait = self._session.synchronize
        for reduction in reductions:
            if reduction.handle == 0 and not reduction.others:
                continue
            try:
                if reduction.handle != 0:
                    # None: the sum over steps is not complete, or a NaN is to be skipped.
                    if wait(reduction.handle) is None:
                        reduction.applies = False
                    else:
                        self.unapplied = True
                        if not self._plain:
                            self._decompress(reduction)
            except Exception as error:
                failures.add(error)
            reduction.handle = 0
            while reduction.others:
                try:
                    reduction.applies = reduction.others[0]() and reduction.applies
                except Exception as error:
                    failures.add(error)
                del reduction.others[0]
            if not self._plain:
                reduction.sent = reduction.contexts = []
            reduction.finished = True
        return all(reduction.applies for reduction in reductions)

    def wait(self) -> None:
        """Return once all reductions in flight have ended. They still have to be finished."""
        for reduction in self.reductions:
            while reduction.handle != 0 and not self._session.poll(reduction.handle):
                time.sleep(_POLL_SECONDS)

    def busy(self) -> bool:
        """Return whether any reduction has begun and has not been finished."""
        return any(reduction.is_under_way() for reduction in self.reductions)

    def begin_world(self) -> None:
        """Drop reductions without waiting, because their world has ended."""
        for reduction in self.reductions:
            reduction.handle = 0
            reduction.gradients = reduction.sent = reduction.contexts = []
            reduction.others = []

    def _decompress(self, reduction: Reduction) -> None:
        compression = self.plan.compression
        reduction.gradients = [
            compression.decompress(tensor, context)
            for tensor, context in zip(reduction.sent, reduction.contexts, strict=True)
        ]

"""Gradients on their way: reduced in place, in the engine's order, one operation for each or for
each bundle of them.

Used by the optimizer, the trainer and the store, which decide what happens with the results.
Belongs to the thread that steps them.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

from perseus import basics
from perseus.compression import applied_here
from perseus.failures import Failures
from perseus.gradients.outcome import Outcome
from perseus.gradients.participation import takes_part
from perseus.gradients.plan import Plan
from perseus.gradients.reducer import Reducer
from perseus.mxnet import ops
from perseus.mxnet.library import Batch, Op, mxnet

# Names, priorities, bundles, process set, and whether settings may withhold results.
_Key = tuple[tuple[str, ...], tuple[int, ...], tuple[tuple[int, ...], ...], int | None, bool]


class Outcomes:
    """What became of one step's gradients; nothing is waited for until that is asked for."""

    def __init__(self, arrays: list[Any]) -> None:
        self._arrays = arrays

    def applies(self) -> bool:
        """Whether together() is REDUCED, which it must be for the gradients to be used."""
        return self.together() == Outcome.REDUCED

    def together(self) -> Outcome:
        """What became of the step; equal on all ranks.

        Waits, where settings may withhold gradients; else it is REDUCED at once. MXNetError where a
        reduction failed.
        """
        numbers = [array.asscalar() for array in self._arrays]  # all, for all their errors
        return Outcome(max(numbers, default=Outcome.REDUCED))


class GradientReducer(Reducer):
    """Reduces lists of gradients by a plan.

    scope: what names begin with that is another thing in another process.
    `residuals` has the residuals of lossy codecs, by names without the scope; wait() before reading
    it.
    """

    def __init__(self, plan: Plan, scope: str = "") -> None:
        super().__init__(plan)
        self._scope = scope
        self._under_way: dict[str, Any] = {}  # what is being written to, by its name
        self._made: tuple[list[Any], _Key | None, Batch] = [], None, Batch([])

    def takes_part(self) -> bool:
        """Whether this rank has anything to reduce; ValueError where the set is not registered."""
        return takes_part(self.plan.process_set)

    def __call__(
        self,
        gradients: Sequence[Any],
        names: Sequence[str],
        priorities: Sequence[int] | None = None,
        bundles: Sequence[Sequence[int]] | None = None,
        outputs: Sequence[Any] | None = None,
    ) -> Outcomes:
        """Start reducing gradients; later ops on the outputs see the results.

        gradients: dense arrays. names: one for each, unique among all that this process has under
        way, and the same every step. priorities: the higher, the earlier; None: all the same.
        bundles: which are reduced by one operation, under the first one's name, as indices; None:
        each by itself. Names, priorities and bundles are the same on all ranks.
        outputs: arrays of the same shapes and dtypes; None: in place.
        """
        results = gradients if outputs is None else outputs
        if not gradients or not self.takes_part():
            for gradient, result in zip(gradients, results, strict=True):
                if result is not gradient:
                    gradient.copyto(result)
            return Outcomes([])
        outer = applied_here(self.plan.compression)
        pairs = [outer.compress(gradient) for gradient in gradients]
        sent = [array for array, _ in pairs]
        reduced_here = [
            result if array is gradient else array
            for gradient, array, result in zip(gradients, sent, results, strict=True)
        ]
        withheld = basics.may_withhold_gradients()
        key = (
            tuple(names),
            tuple(priorities or [0] * len(names)),
            tuple(map(tuple, bundles or [(index,) for index in range(len(names))])),
            self.plan.process_set.process_set_id,
            withheld,
        )
        batch = self._batch(sent, reduced_here, key)
        for op in batch.ops if self.residuals.waiting else ():
            self.residuals.hand_over(self._key_of(op.name.decode()))
        outcomes = []
        if withheld:
            for op in batch.ops:
                outcomes.append(mxnet.nd.zeros((1,), dtype="int32"))
                op.outcome = outcomes[-1].handle.value
        self._under_way.update(zip(names, reduced_here, strict=True))
        batch.push()
        for (_, context), reduced, result in zip(pairs, reduced_here, results, strict=True):
            if reduced is not result:
                result[:] = outer.decompress(reduced, context)
        return Outcomes(outcomes)

    def _batch(self, sent: list[Any], results: list[Any], key: _Key) -> Batch:
        """The ops, from the step before where all is as it was then: describing them takes long."""
        arrays, made_for, batch = self._made
        now = [*sent, *results]
        unchanged = len(arrays) == len(now) and all(map(is_, arrays, now))
        if not (unchanged and made_for == key):
            names, priorities, bundles, _, _ = key
            described = []
            for bundle in bundles:
                first = bundle[0]
                inputs, outputs = ([of[i] for i in bundle] for of in (sent, results))
                described.append(self._op(inputs, outputs, names[first], priorities[first]))
            batch = Batch(described)
            self._made = now, key, batch
        return batch

    def wait(self) -> None:
        """Return once all that was started has ended; MXNetError where a reduction failed."""
        under_way, self._under_way = self._under_way, {}
        failures = Failures()
        for array in under_way.values():
            try:
                array.wait_to_read()
            except Exception as error:
                failures.add(error)
        failures.raise_first()

    def forget(self) -> None:
        """Drop the core's sums and residuals, once nothing is under way. See wait."""
        self.wait()
        super().forget()

    def _key_of(self, name: str) -> str:
        return name.removeprefix(self._scope)

    def _op(self, arrays: list[Any], outputs: list[Any], name: str, priority: int) -> Op:
        plan = self.plan
        grouped = len(arrays) > 1
        self.residuals.know(self._key_of(name), name, grouped)
        made = ops.reduction(
            arrays, outputs, name, op=plan.op, prescale=plan.prescale,
            postscale=plan.postscale, priority=priority, process_set=plan.process_set,
            grouped=grouped,
        )  # fmt: skip
        made.gradient_of = self.number
        made.codec, made.codec_argument = plan.compression.codec, plan.compression.argument
        return made

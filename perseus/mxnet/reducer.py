"""Reduces gradients in the order of MXNet's engine, by one operation for each or for each bundle.

The optimizer, the trainer and the store use it and decide how to use the results. Belongs to the
thread that steps them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

from perseus import basics
from perseus.compression import Compressor, applied_here, inside
from perseus.failures import Failures
from perseus.gradients.outcome import Outcome
from perseus.gradients.participation import takes_part
from perseus.gradients.plan import Plan
from perseus.gradients.reducer import Reducer
from perseus.gradients.rotation import parts_of
from perseus.mxnet import ops
from perseus.mxnet.library import Batch, Op, mxnet

# Names, priorities, bundles, process set, whether settings may withhold results, and compression.
_Key = tuple[
    tuple[str, ...],
    tuple[int, ...],
    tuple[tuple[int, ...], ...],
    int | None,
    bool,
    type[Compressor],
]


class Outcomes:
    """The outcomes of one step's gradients, for which it waits only when they are asked for."""

    def __init__(self, arrays: list[Any]) -> None:
        self._arrays = arrays

    def applies(self) -> bool:
        """Return whether the gradients may be used, which is if together() is REDUCED."""
        return self.together() == Outcome.REDUCED

    def together(self) -> Outcome:
        """Return the outcome of the step, equal on all ranks.

        It is REDUCED at once unless the settings may withhold gradients; then it waits. Raises
        MXNetError if a reduction failed, ValueError if only some gradients have complete sums.
        """
        numbers = {array.asscalar() for array in self._arrays}  # reading one raises its error
        if numbers >= {Outcome.HELD, Outcome.REDUCED}:
            raise ValueError(
                "[mxnet] PERSEUS_ACCUMULATE_N_STEPS: some gradients of an update complete their "
                "sums, and others do not, since they were not in all updates before: update the "
                "same weights together each time, or one by one, with "
                "MXNET_OPTIMIZER_AGGREGATION_SIZE=1"
            )
        return Outcome(max(numbers, default=Outcome.REDUCED))


class GradientReducer(Reducer):
    """Reduces lists of gradients according to a plan.

    With `Compression.rotate` or PERSEUS_DOWNSAMPLE_N_ELEMENTS it reduces them inside hosts only,
    and its owner averages weights instead; see perseus.mxnet.rotation.

    scope: returns the prefix of names, which may change between worlds. The keys of `residuals` are
        names without it. Call wait() before reading the residuals.
    """

    def __init__(self, plan: Plan, scope: Callable[[], str] = str) -> None:
        super().__init__(plan)
        self._scope = scope
        self._in_flight: dict[str, Any] = {}  # arrays that operations write, by name
        self._made: tuple[list[Any], _Key | None, Batch] = [], None, Batch([])

    def takes_part(self) -> bool:
        """Return whether this rank has gradients to reduce; see participation.takes_part()."""
        return takes_part(self.plan.process_set)

    def __call__(
        self,
        gradients: Sequence[Any],
        names: Sequence[str],
        priorities: Sequence[int] | None = None,
        bundles: Sequence[Sequence[int]] | None = None,
        outputs: Sequence[Any] | None = None,
        *,
        learning_rate: float = 0.0,
    ) -> Outcomes:
        """Start reducing gradients. Later ops on the outputs see the results.

        gradients: dense arrays.
        names: one for each gradient, equal in every step, and unique among those in flight in this
            process.
        priorities: higher ones start earlier; None = all equal.
        bundles: indices of gradients that one operation reduces, under the first one's name; None =
            one operation for each gradient.
        outputs: arrays of the same shapes and dtypes; None = in place.
        learning_rate: see perseus_request.

        Names, priorities and bundles must be equal on all ranks.
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
            self._compression(),
        )
        batch = self._batch(sent, reduced_here, key)
        for op in batch.ops if self.residuals.waiting else ():
            self.residuals.hand_over(self._key_of(op.name.decode()))
        for op in batch.ops:
            op.learning_rate = learning_rate
        outcomes = []
        if withheld:
            for op in batch.ops:
                outcomes.append(mxnet.nd.zeros((1,), mxnet.cpu(), dtype="int32"))
                op.outcome = outcomes[-1].handle.value
        self._in_flight.update(zip(names, reduced_here, strict=True))
        batch.push()
        for (_, context), reduced, result in zip(pairs, reduced_here, results, strict=True):
            if reduced is not result:
                result[:] = outer.decompress(reduced, context)
        return Outcomes(outcomes)

    def _batch(self, sent: list[Any], results: list[Any], key: _Key) -> Batch:
        """Return the ops, which are those of the previous step if nothing has changed since.

        Describing ops takes long.
        """
        arrays, made_for, batch = self._made
        now = [*sent, *results]
        unchanged = len(arrays) == len(now) and all(map(is_, arrays, now))
        if not (unchanged and made_for == key):
            names, priorities, bundles, *_ = key
            described = []
            for bundle in bundles:
                first = bundle[0]
                inputs, outputs = ([of[i] for i in bundle] for of in (sent, results))
                described.append(self._op(inputs, outputs, names[first], priorities[first]))
            batch = Batch(described)
            self._made = now, key, batch
        return batch

    def wait(self) -> None:
        """Wait until all reductions have ended. Raises MXNetError if one failed."""
        in_flight, self._in_flight = self._in_flight, {}
        failures = Failures()
        for array in in_flight.values():
            try:
                array.wait_to_read()
            except Exception as error:
                failures.add(error)
        failures.raise_first()

    def forget(self) -> None:
        """Wait until all reductions have ended, then drop the core's sums and residuals."""
        self.wait()
        super().forget()

    def forget_sums(self) -> None:
        """Wait until all reductions have ended, then drop the core's sums, but no residuals."""
        self.wait()
        basics.forget_sums(self.number)

    def drop(self, key: str) -> None:
        """Drop the residual of a gradient, of which nothing may be in flight."""
        self._made = [], None, Batch([])  # the next step has to tell residuals its name again
        self.residuals.drop(key)

    def _compression(self) -> type[Compressor]:
        parts = parts_of(self.plan)
        return inside(parts) if parts > 1 else self.plan.compression

    def _key_of(self, name: str) -> str:
        return name.removeprefix(self._scope())

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
        compression = self._compression()
        made.codec, made.codec_argument = compression.codec, compression.argument
        return made

"""DistributedTrainer: gluon's Trainer with gradients that are averaged over all ranks.

Source of behaviour: Horovod 0.28.1, horovod.mxnet.
"""

# ruff: noqa: PLR0917 - the signatures are Horovod's

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mxnet as mx
import numpy as np

from perseus import basics
from perseus.arguments import checked_compression
from perseus.compression import Compressor
from perseus.gradients.arguments import checked_predivide_factor
from perseus.gradients.outcome import Outcome
from perseus.gradients.parameter_check import ParameterCheck
from perseus.gradients.plan import Plan
from perseus.gradients.residuals import Held
from perseus.mxnet import ops, residuals
from perseus.mxnet.compression import Compression
from perseus.mxnet.learning_rate import learning_rate
from perseus.mxnet.master_weights import master_weight
from perseus.mxnet.mpi_ops import Max, allreduce
from perseus.mxnet.optimizer import bundled, unwrapped
from perseus.mxnet.parameter_check import buffer_of
from perseus.mxnet.reducer import GradientReducer
from perseus.mxnet.rotation import Weight
from perseus.mxnet.sparse import sum_rows
from perseus.mxnet.weight_turns import TurningSource, WeightTurns
from perseus.process_sets import ProcessSet, checked, global_process_set
from perseus.worlds import outlives_worlds


class DistributedTrainer(TurningSource, mx.gluon.Trainer):  # type: ignore[misc]
    """A gluon Trainer whose step() averages gradients over all ranks before it updates.

    backward() and step() return before MXNet's engine has done the work. A reduction starts as soon
    as the engine has written its gradients, so the last layers are reduced while the first ones are
    computed. Small gradients share reductions of about 1 MiB, so a smaller model is reduced after
    backward. step(batch_size) takes the batch size of one rank.

    params: `net.collect_params()`, or a list of parameters, which is sorted by name; one context.
    optimizer, optimizer_params: as in gluon. A DistributedOptimizer is unwrapped, with a warning.
    compression: how gradients are encoded on their way. Without it the settings decide, by default
        float16 between hosts; Compression.none keeps full precision everywhere. Compression.rotate
        averages weights instead: hvd.synchronize_parameters() makes them equal. Weights are sent
        after step(), or by allreduce_grads(), if that is called instead, before update().
    gradient_predivide_factor: f: gradients are divided by f before and by size / f after the sum.
    prefix: put before the parameters' numbers, by which ranks match gradients; trainers that work
        at the same time need different ones.
    num_groups: the number of operations that reduce gradients; 0 = one for each gradient.
    process_set: the ranks that take part; the others train alone.

    Of row-sparse gradients (sparse_grad=True) only the rows are sent, in full precision,
    and step() waits for them; PERSEUS_ACCUMULATE_N_STEPS refuses them (MXNetError).
    step(…, ignore_stale_grad=True) updates a parameter with a new gradient on any rank; the other
    ranks contribute zeros, so ranks may use different layers. update(…, ignore_stale_grad=True) is
    a ValueError if allreduce_grads() has averaged old gradients with new ones. No rank updates
    while PERSEUS_ACCUMULATE_N_STEPS sums gradients up, or if a NaN is to be skipped, which lowers
    the loss scale of mx.contrib.amp on all ranks.

    Raises ValueError for inconsistent arguments.
    """

    def __init__(
        self,
        params: Any,
        optimizer: Any,
        optimizer_params: dict[str, Any] | None = None,
        compression: type[Compressor] = Compression.settings,
        gradient_predivide_factor: float = 1.0,
        prefix: str | None = None,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        optimizer = unwrapped(optimizer, "DistributedTrainer")
        if not isinstance(optimizer, (str, mx.optimizer.Optimizer)):
            raise ValueError(
                f"[mxnet] DistributedTrainer expected an optimizer or its name, such as 'sgd', got "
                f"{optimizer!r}"
            )
        checked_compression(compression, "mxnet")
        checked_predivide_factor(gradient_predivide_factor, ops.Average, "mxnet")
        checked(process_set)
        if isinstance(params, list):
            params = sorted(params, key=lambda parameter: str(parameter.name))
        super().__init__(params, optimizer, optimizer_params, kvstore=None)
        if self._contexts is not None and len(self._contexts) > 1:
            raise ValueError(
                f"[mxnet] DistributedTrainer needs one context for each rank, got {self._contexts}"
            )
        for parameter in self._params:
            if parameter._stype != "default":
                raise ValueError(
                    f"[mxnet] the weight of {parameter.name} is {parameter._stype}, which needs a "
                    "store: gluon.Trainer(…, kvstore='dist_sync_perseus')"
                )
        self._prefix = prefix or ""
        self._num_groups = num_groups
        self._applies = True
        self._skipped = False
        self._stale: dict[int, Any] = {}  # norms of old gradients that were averaged, added up
        self._in_sum: list[int] = []  # parameters of a sum that is not complete
        self._summed: set[int] = set()  # those of them with new gradients in it
        self._steps_now = False
        self._rescale: float | None = None  # rescale_grad as _rate() counts it
        self._turning: list[int] = []  # the weights that take a turn after this step
        self._check = ParameterCheck(process_set)
        plan = Plan(
            compression=compression,
            process_set=process_set,
            predivide_factor=gradient_predivide_factor,
        )
        self._reducer = GradientReducer(plan)
        # Without a reference to the trainer: it ends with its last reference.
        weight_of = partial(_weight_of, self._params, self._updaters)
        self._turns = WeightTurns(plan, f"trainer.{self._prefix}", weight_of)
        outlives_worlds(self)

    def begin_world(self) -> None:
        """See Lasting. The core's sums over steps have ended with the last world."""
        self._end_sum()

    def step(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """Average gradients over all ranks and update, as in gluon.

        batch_size: of one rank, by which gradients are divided once they are averaged: the same
            number on all ranks, such as the mean of their batch sizes, since weights drift apart
            otherwise.

        MismatchError if PERSEUS_PARAMETER_CHECK_N_STEPS finds that the ranks' parameters differ.
        """
        if self._check.due():
            self._check.compare((p.name, buffer_of(p.list_data()[0])) for _, p in self._trained())
        if ignore_stale_grad and self._reducer.takes_part():
            for _, parameter in self._trained():
                if not parameter.data()._fresh_grad:
                    parameter.zero_grad()
        self._steps_now, self._turning = True, []
        try:
            super().step(batch_size, ignore_stale_grad)
        finally:
            # Even if this rank does not update, alone: turns must be equally many on all ranks.
            self._steps_now = False
            if self._turning:
                self._turns.take(self._turning)

    def save_states(self, fname: str) -> None:
        """Wait for gradients and write gluon's states, followed by this rank's residuals.

        Plain MXNet can read such a file as well. Several ranks may write the same one.
        """
        path = Path(fname)
        # Gluon writes a file in place.
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.") as own:
            super().save_states(own.name)
            states = Path(own.name).read_bytes()
        residuals.write(path, states, self.residuals())

    def load_states(self, fname: str) -> None:
        """Load gluon's states, and the residuals in the file if this rank wrote them.

        Earlier residuals and sums over steps are dropped, and so is what `Compression.rotate` would
        still correct, as the parameters are loaded beside these states.
        """
        held = residuals.held_in(Path(fname).read_bytes())
        self._turns.drop()
        super().load_states(fname)
        self.go_on_with(held)

    def go_on_with(self, residuals: Mapping[str, Held], owner: int | None = None) -> None:
        """See Source."""
        self._end_sum()
        super().go_on_with(residuals, owner)

    def _trained(self) -> list[tuple[int, Any]]:
        """Return the parameters that have gradients, with their indices."""
        return [(i, p) for i, p in enumerate(self._params) if p.grad_req != "null"]

    def _end_sum(self) -> None:
        self._in_sum, self._stale = [], {}
        self._summed.clear()

    def _allreduce_grads(self) -> None:
        trained = self._trained()
        if not trained or not self._reducer.takes_part():
            return
        indices = [i for i, _ in trained]
        if self._in_sum and self._in_sum != indices:
            # The sums of new parameters would never be complete in the same step as the others'.
            self._reducer.forget_sums()
            self._end_sum()
        if not self._steps_now:  # step() has made them zeros, if it ignores them
            for i, p in trained:
                if not p.data()._fresh_grad:
                    self._stale[i] = self._stale.get(i, 0) + _norm(p.list_grad()[0])
        dense = {i: p.list_grad()[0] for i, p in trained if p._grad_stype == "default"}
        bundles, names = bundled(list(dense), self._num_groups, self._prefix)
        outcomes = self._reducer(
            list(dense.values()), names, [-i for i in dense], bundles,
            learning_rate=self._rate(list(dense)),
        )  # fmt: skip
        # Row-sparse gradients come last, because step() waits for them.
        usable = [self._average_rows(i, p) for i, p in trained if i not in dense]
        outcome = outcomes.together()
        if not all(usable):
            outcome = Outcome.SKIPPED
        self._in_sum = indices if outcome == Outcome.HELD else []
        self._applies, self._skipped = outcome == Outcome.REDUCED, outcome == Outcome.SKIPPED
        if not self._applies or not dense:
            return
        if self._steps_now:
            self._turning = list(dense)
        else:  # update() may come later, or, with a loss scaler, not on all ranks
            self._turns.take(list(dense))

    def _rate(self, indices: list[int]) -> float:
        """Return this step's learning rate; 0, for what is not known, before the first update.

        allreduce_grads() does not know the batch size that update() will get. It counts as that of
        the last step(), or else of the first update(), so that both forms may alternate.
        """
        if self._steps_now:
            self._rescale = self._optimizer.rescale_grad
        if self._rescale is None:
            return 0.0
        return learning_rate(self._optimizer, indices, self._rescale)

    def _average_rows(self, index: int, parameter: Any) -> bool:
        """Average a row-sparse gradient; returns whether it may be applied."""
        reducer, (gradient,) = self._reducer, parameter.list_grad()
        members = reducer.plan.process_set
        name = f"{self._prefix}{index}"
        total = sum_rows([gradient], name, -index, reducer.number, members)
        (total / members.size()).copyto(gradient)
        withheld = basics.may_withhold_gradients()
        return not (withheld and np.isnan(total.data.asnumpy()).any())

    def _update(self, ignore_stale_grad: bool = False) -> None:
        applies, self._applies = self._applies, True
        skipped, self._skipped = self._skipped, False
        if self._rescale is None:
            self._rescale = self._optimizer.rescale_grad
        if applies:
            stale, self._stale = self._stale, {}
            if ignore_stale_grad:
                self._agree_on_fresh({i for i, norm in stale.items() if norm.asscalar() != 0})
            self._summed.clear()
            super()._update(ignore_stale_grad)
            # After an overflow, which skips the update, gluon has left the marks on the gradients.
            for _, parameter in self._trained() if ignore_stale_grad else ():
                parameter.data()._fresh_grad = False
            return
        for index, parameter in self._trained():
            if parameter.data()._fresh_grad:
                self._summed.add(index)
            parameter.data()._fresh_grad = False
        if skipped:
            self._end_sum()
            self._lower_loss_scale()

    def _lower_loss_scale(self) -> None:
        """Let the loss scaler of mx.contrib.amp, if any, act as after an overflow."""
        scaler = getattr(self, "_amp_loss_scaler", None)
        if scaler is not None:
            # Only the rank with the NaN has it in its own gradients.
            infinite = SimpleNamespace(_grad=[mx.nd.full((1,), np.inf)])
            scaler.has_overflow([infinite])

    def _agree_on_fresh(self, stale: set[int]) -> None:
        """Mark gradients as new that are new on any rank: all ranks update the same ones.

        A sum over steps is new if it contains a new gradient. stale: parameters whose averages
            contain an old gradient of this rank; ValueError on all ranks if they are new elsewhere.
        """
        members, trained = self._reducer.plan.process_set, self._trained()
        if not trained or not self._reducer.takes_part():
            return
        fresh = [i in self._summed or p.data()._fresh_grad for i, p in trained]
        flags = mx.nd.array([fresh, [i in stale for i, _ in trained]])
        name = f"{self._prefix}fresh"
        somewhere = allreduce(flags, name=name, op=Max, process_set=members).asnumpy()
        mixed = [p.name for (_, p), flags in zip(trained, somewhere.T, strict=True) if flags.all()]
        if mixed:
            raise ValueError(
                f"[mxnet] allreduce_grads() has averaged new gradients of {mixed[0]} with old ones "
                f"of ranks whose backward() did not reach it: call step(batch_size, "
                f"ignore_stale_grad=True) instead, or zero_grad() before backward()"
            )
        for (_, parameter), is_fresh in zip(trained, somewhere[0], strict=True):
            parameter.data()._fresh_grad = bool(is_fresh)


def _norm(gradient: Any) -> Any:
    """Return the norm of an array as it is now. Does not wait."""
    return gradient.as_nd_ndarray().astype("float32").norm()


def _weight_of(parameters: Sequence[Any], updaters: Sequence[Any], index: int) -> Weight:
    """Return the weight that the updates of a parameter begin with."""
    weight = parameters[index].list_data()[0]
    (updater,) = updaters
    master = master_weight(updater.optimizer, weight, updater.states.get(index))
    return Weight(weight) if master is None else Weight(master, followers=(weight,))

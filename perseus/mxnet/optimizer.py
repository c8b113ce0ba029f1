"""DistributedOptimizer: averages gradients over all ranks before they are applied.

Source of behaviour: Horovod 0.28.1, horovod.mxnet.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mxnet as mx

from perseus import basics
from perseus.gradients.arguments import checked_predivide_factor, not_an_optimizer, wrapped_twice
from perseus.gradients.bundles import bundles
from perseus.gradients.outcome import Outcome
from perseus.gradients.plan import Plan
from perseus.gradients.residuals import pack, unpack
from perseus.mxnet import ops, residuals
from perseus.mxnet.learning_rate import learning_rate
from perseus.mxnet.master_weights import master_weight
from perseus.mxnet.parameter_check import WeightsByKey
from perseus.mxnet.reducer import GradientReducer
from perseus.mxnet.rotation import Weight
from perseus.mxnet.weight_turns import TurningSource, WeightTurnsByKey
from perseus.process_sets import ProcessSet, checked, global_process_set


class DistributedOptimizer(TurningSource, mx.optimizer.Optimizer):  # type: ignore[misc]
    """An optimizer that wraps another one and passes it gradients averaged over all ranks.

    For Module.fit, updaters and custom loops; gluon has DistributedTrainer. All other attributes
    are those of the wrapped optimizer.

    optimizer: any mx.optimizer.Optimizer.
    gradient_predivide_factor: f: gradients are divided by f before and by size / f after the sum.
    num_groups: the number of operations that reduce the gradients of one update(); 0 = one for each
        gradient. Updaters pass MXNET_OPTIMIZER_AGGREGATION_SIZE of them at a time.
    process_set: the ranks that take part; the others apply their own gradients.

    This rank's residuals of lossy codecs are pickled with the optimizer, so gluon's
    Trainer.save_states and Updater.get_states(dump_optimizer=True) include them. Module's
    save_optimizer_states omits the optimizer: use save_residuals and load_residuals with it.

    With PERSEUS_DOWNSAMPLE_N_ELEMENTS it averages weights instead, and
    hvd.synchronize_parameters() makes them equal. It learns in the first step which weights there
    are. Weights are sent once those of the step before have all been updated.

    Reductions are named by the parameters' indices, so two optimizers must not work at the same
    time. PERSEUS_ALLREDUCE_NANCHECK_ACTION=skip is a ValueError: it applies to whole steps, of
    which update() sees one part at a time.
    """

    _turns: WeightTurnsByKey
    _OWN = frozenset(["_optimizer", "_reducer", "_num_groups", "_weights", "_turns", "_updated"])

    def __init__(
        self,
        optimizer: mx.optimizer.Optimizer,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        if isinstance(optimizer, DistributedOptimizer):
            raise wrapped_twice("mxnet")
        if not isinstance(optimizer, mx.optimizer.Optimizer):
            raise not_an_optimizer(
                optimizer,
                "mxnet",
                "an mx.optimizer.Optimizer",
                "mx.optimizer.create('sgd', learning_rate=0.01)",
            )
        checked_predivide_factor(gradient_predivide_factor, ops.Average, "mxnet")
        checked(process_set)
        self._optimizer = optimizer
        self._num_groups = num_groups
        self._weights = WeightsByKey(process_set, self._name_of)
        plan = Plan(process_set=process_set, predivide_factor=gradient_predivide_factor)
        self._reducer = GradientReducer(plan)
        self._updated: dict[Any, tuple[Any, Any]] = {}  # the last weight and state of each index
        weight_of = partial(_weight_of, optimizer, self._updated)
        self._turns = WeightTurnsByKey(plan, "optimizer", weight_of)

    def __reduce__(self) -> Any:
        # Updaters pickle it with their states. The core's sums of gradients are not included.
        plan = self._reducer.plan
        arguments = self._optimizer, plan.predivide_factor, self._num_groups, plan.process_set
        held = self.residuals()
        # With None, pickle does not call __setstate__.
        state = pack(held, basics.rank()) if held and basics.is_initialized() else None
        return DistributedOptimizer, arguments, state

    def __setstate__(self, state: bytes) -> None:
        """Continue with the residuals on the rank that saved them; others begin with none."""
        self._reducer.go_on_with(*unpack(state))

    def __getattr__(self, item: str) -> Any:
        if item in self._OWN:  # __init__ has not set it yet
            raise AttributeError(item)
        return getattr(self._optimizer, item)

    def __setattr__(self, item: str, value: Any) -> None:
        if item in self._OWN:
            super().__setattr__(item, value)
        else:
            setattr(self._optimizer, item, value)

    def create_state(self, index: Any, weight: Any) -> Any:
        """Call the wrapped optimizer."""
        return self._optimizer.create_state(index, weight)

    def create_state_multi_precision(self, index: Any, weight: Any) -> Any:
        """Call the wrapped optimizer."""
        return self._optimizer.create_state_multi_precision(index, weight)

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Reduce the gradients in place, then call the wrapped optimizer.

        While PERSEUS_ACCUMULATE_N_STEPS sums gradients, the wrapped optimizer is not called.
        """
        apply = partial(self._optimizer.update, index, weight, grad, state)
        self._step(index, weight, grad, None, apply)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Do the same as update() with the wrapped optimizer's update_multi_precision()."""
        apply = partial(self._optimizer.update_multi_precision, index, weight, grad, state)
        self._step(index, weight, grad, state, apply)

    def set_learning_rate(self, lr: float) -> None:
        """Call the wrapped optimizer."""
        self._optimizer.set_learning_rate(lr)

    def set_lr_mult(self, args_lr_mult: Any) -> None:
        """Call the wrapped optimizer."""
        self._optimizer.set_lr_mult(args_lr_mult)

    def set_wd_mult(self, args_wd_mult: Any) -> None:
        """Call the wrapped optimizer."""
        self._optimizer.set_wd_mult(args_wd_mult)

    def use_states(self, states: Mapping[Any, Any]) -> None:
        """Know these states of weights, by index, which an updater has loaded."""
        for index, (weight, state) in self._updated.items():
            self._updated[index] = weight, states.get(index, state)

    def save_residuals(self, fname: str) -> None:
        """Wait for gradients and write this rank's residuals. Each rank needs its own file."""
        residuals.write(Path(fname), b"", self.residuals())

    def load_residuals(self, fname: str) -> None:
        """Continue with the residuals that this rank wrote; sums over steps begin again.

        What PERSEUS_DOWNSAMPLE_N_ELEMENTS would still correct is dropped, as the weights are loaded
        beside them.
        """
        held = residuals.held_in(Path(fname).read_bytes())
        self._turns.drop()
        self._reducer.forget()
        self._reducer.residuals.replace(held)

    def _name_of(self, index: Any) -> str:
        """Return the name of a parameter in optimizers of gluon or Module."""
        parameter = self._optimizer.param_dict.get(index)
        return str(
            self._optimizer.idx2name.get(index, index) if parameter is None else parameter.name
        )

    def _step(
        self, index: Any, weight: Any, grad: Any, state: Any, apply: Callable[[], None]
    ) -> None:
        """Reduce the gradients, then apply them unless they are only summed.

        state: of an update that may keep the weight in another precision; else None.
        """
        if not self._reducer.takes_part():
            apply()
            return
        if basics.skips_nan_gradients():
            raise ValueError(
                "[mxnet] PERSEUS_ALLREDUCE_NANCHECK_ACTION=skip leaves out whole steps, of which "
                "DistributedOptimizer sees a part at a time: use DistributedTrainer"
            )
        together = isinstance(index, (tuple, list))
        indices, gradients, weights = (
            list(given) if together else [given] for given in (index, grad, weight)
        )
        for each, array in zip(indices, weights, strict=True):
            self._weights.update(each, array)
        found, names = bundled(indices, self._num_groups if together else 0)
        priorities = [-i if isinstance(i, int) else 0 for i in indices]
        rate = learning_rate(self._optimizer, indices)
        outcomes = self._reducer(gradients, names, priorities, found, learning_rate=rate)
        outcome = outcomes.together()
        turning = indices if self._turns.rotation() is not None else []
        if turning:
            states = state if together and state is not None else [state] * len(indices)
            self._updated.update(zip(indices, zip(weights, states, strict=True), strict=True))
        for each in turning:
            self._turns.before_update(each)
        if outcome == Outcome.REDUCED:
            apply()
        for each in turning:
            self._turns.after_update(each, outcome)


def unwrapped(optimizer: Any, taker: str, stacklevel: int = 2) -> Any:
    """Return the optimizer that a DistributedOptimizer wraps, with a warning; others as they are.

    taker: what reduces the gradients itself. stacklevel: see warnings.warn; of the caller.
    """
    if not isinstance(optimizer, DistributedOptimizer):
        return optimizer
    warnings.warn(
        f"{taker} does not take DistributedOptimizer as its optimizer. It has been unwrapped.",
        stacklevel=stacklevel + 1,
    )
    return optimizer._optimizer


def _weight_of(
    optimizer: mx.optimizer.Optimizer, updated: Mapping[Any, tuple[Any, Any]], index: Any
) -> Weight:
    weight, state = updated[index]
    master = master_weight(optimizer, weight, state)
    return Weight(weight) if master is None else Weight(master, followers=(weight,))


def bundled(
    indices: Sequence[Any], num_groups: int, prefix: str = ""
) -> tuple[Sequence[Sequence[int]] | None, list[str]]:
    """Return bundles and names, as GradientReducer takes them, for parameters with these indices.

    The bundles are None if num_groups is 0. The names are Horovod's.
    """
    names = [f"{prefix}{index}" for index in indices]
    if num_groups <= 0:
        return None, names
    found = bundles(indices, num_groups)
    for bundle in found:
        names[bundle[0]] = f"{prefix}{indices[bundle[0]]}:{indices[bundle[-1]]}"
    return found, names

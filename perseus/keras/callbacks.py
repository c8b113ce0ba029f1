"""Callbacks for `fit` on several ranks: equal start, averaged metrics, learning rates, checkpoints.

Belong to the thread that calls fit. Source of behaviour: Horovod 0.28.1, horovod.keras.callbacks.
"""
# ruff: noqa: PLR0917 - the signatures are Horovod's

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from perseus import basics
from perseus.arguments import checked_root
from perseus.elastic.variables_state import optimizer_variables
from perseus.gradients.parameter_check import ParameterCheck
from perseus.gradients.participation import sums_over_steps
from perseus.keras.backend import backend
from perseus.keras.library import KERAS_2, keras
from perseus.keras.metrics import means
from perseus.keras.nesting import with_inner
from perseus.keras.reducer import readable
from perseus.keras.training_thread import InTrainingThread
from perseus.keras.wrapping import distributed_in, is_distributed
from perseus.worlds import outlives_worlds

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


_UNWRAPPED = (
    "[keras] the model's optimizer is not a DistributedOptimizer: gradients are not averaged, and "
    "every rank trains a model of its own. Compile it with hvd.DistributedOptimizer(optimizer), "
    "and load saved models by hvd.load_model instead of keras.models.load_model"
)

_UNREDUCED = (
    "[keras] a batch ended without a reduction, although the model's optimizer is a "
    "DistributedOptimizer: every rank trains a model of its own. In Keras 2 it reduces in "
    "minimize() and compute_gradients(), not in apply_gradients(). Call "
    "self.optimizer.minimize(loss, variables, tape=tape) in train_step()"
)


class BroadcastGlobalVariablesCallback(InTrainingThread):
    """Gives every rank the root's weights and optimizer state, once, after the first batch.

    By then the optimizer has all of its variables, so all first steps but the root's are discarded.
    Counts by which gradient_accumulation_steps decides whether to reduce are equal from the start.
    Each rank keeps its random seeds: ranks drop out different units.

    Rank 0 warns if nothing is reduced in a batch and the model's optimizer is not a
    DistributedOptimizer, or is one of Keras 2, which does not reduce in apply_gradients(). If it is
    not a DistributedOptimizer, this callback does the comparisons of
    PERSEUS_PARAMETER_CHECK_N_STEPS.

    root_rank: a global rank. device: accepted for Horovod's sake. local_variables: not broadcast.
    """

    def __init__(
        self, root_rank: int, device: str = "", local_variables: Iterable[Any] | None = None
    ) -> None:
        super().__init__()
        self.backend = keras.backend
        self.root_rank = checked_root(root_rank, "keras")
        self.device = device
        self.broadcast_done = False
        self._local_variables = list(local_variables or ())
        self._check = ParameterCheck(name="callback")
        self._looked = False
        self._operations: int | None = None  # finished when the batch after the broadcast began
        outlives_worlds(self)

    def begin_world(self) -> None:
        """Broadcast again, as the callbacks of new ranks do."""
        self.broadcast_done = False

    def register_local_var(self, var: Any) -> None:
        """Do not broadcast a variable."""
        self._local_variables.append(var)

    def on_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Broadcast counts, the first time; compare parameters unless the optimizer does so."""
        if not self.broadcast_done:
            self._broadcast_counts()
        distributed = distributed_in(self.model.optimizer)
        if not distributed and self._check.due():
            self._check.compare(
                (readable(variable), _bytes(variable))
                for variable in self._shared(self.model.trainable_weights)
            )
        watches = self.broadcast_done and all(map(_may_be_bypassed, distributed))
        # While the core sums up gradients, most batches finish no operation.
        watches = watches and not sums_over_steps()
        self._operations = basics.stats()["operations"] if watches else None

    def on_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Broadcast, the first time."""
        super().on_batch_end(batch, logs)
        if self.broadcast_done:
            self._look_for_reductions()
            return
        variables = [*self.model.weights, *optimizer_variables(self.model.optimizer)]
        shared = self._shared(variables)
        backend.broadcast_variables(shared, self.root_rank, "BroadcastGlobalVariablesCallback")
        for optimizer in with_inner(self.model.optimizer):
            if getattr(optimizer, "_agg_helper", None) is not None:
                optimizer._agg_helper.forget()  # gradients of the weights before the broadcast
        self.broadcast_done = True

    def _broadcast_counts(self) -> None:
        """Let the first batch reduce on all ranks or on none, also where one loaded a model."""
        counts = [
            optimizer._iterations
            for optimizer in distributed_in(self.model.optimizer)
            if getattr(optimizer, "gradient_accumulation_steps", None)  # Keras 2 has none
        ]
        shared, prefix = self._shared(counts), "BroadcastGlobalVariablesCallback.counts"
        if shared:
            backend.broadcast_variables(shared, self.root_rank, prefix)

    def _shared(self, variables: Iterable[Any]) -> list[Any]:
        local = {id(variable) for variable in self._local_variables}
        return [variable for variable in variables if id(variable) not in local]

    def _look_for_reductions(self) -> None:
        """Warn, once, after a batch in which nothing was reduced by an optimizer or otherwise."""
        before, self._operations = self._operations, None
        if before is None or self._looked:
            return
        self._looked = True
        if basics.rank() == 0 and basics.size() > 1 and basics.stats()["operations"] == before:
            distributed = is_distributed(self.model.optimizer)
            warnings.warn(_UNREDUCED if distributed else _UNWRAPPED, stacklevel=2)


def _may_be_bypassed(optimizer: Any) -> bool:
    """Return whether a distributed optimizer owes a reduction to each batch, and may lack it."""
    return KERAS_2 and optimizer._agg_helper is None and optimizer._reducer.active()


class MetricAverageCallback(keras.callbacks.Callback):
    """Replaces an epoch's metrics by their mean over all ranks, for the callbacks that follow.

    Put it before ReduceLROnPlateau, TensorBoard and others that read metrics. A metric with several
    values is averaged element by element and becomes a float64 array. MismatchError on every rank
    unless all have metrics of the same names and shapes, which they compare by a small exchange.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.backend = keras.backend
        self.device = device

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Average the values in logs."""
        if logs:
            logs.update(means(logs))


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Sets the learning rate to initial_lr * multiplier(epoch).

    initial_lr: of one rank times the number of ranks, usually. multiplier: a function of the epoch,
    or a number m for m ** (epoch - start_epoch). start_epoch, end_epoch: acts in this range,
    without its end; None = no end. staircase: once per epoch; otherwise in every batch, with a
    fractional epoch.
    momentum_correction: scale momentum by new / old rate, which keeps its next step's length; in
        SGD, RMSprop and classes derived from them, whose momentum contains the rate.
    steps_per_epoch: batches per epoch, if Keras does not know. ValueError without initial_lr.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("Parameter `initial_lr` is required")
        self.backend = keras.backend
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.momentum_correction = momentum_correction
        self.initial_lr = initial_lr
        self.restore_momentum: Any = None  # for subclasses, see _restore_momentum_if_needed
        self.steps_per_epoch = steps_per_epoch
        self._detected_steps: int | None = None
        self.current_epoch: int | None = None
        self.staircase = staircase
        self.multiplier: Callable[[float], float]
        if callable(multiplier):
            self.multiplier = multiplier
        else:
            base = multiplier
            self.multiplier = lambda epoch: base ** (epoch - start_epoch)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Determine the steps per epoch, if they matter.

        Another fit may have other steps, as in a new world of an elastic job, where new ranks know
        only the present ones. Where Keras does not know them, those of the last fit count.
        """
        if not self.staircase and self.steps_per_epoch in (None, 0, self._detected_steps):
            self.steps_per_epoch = self._detected_steps = self._autodetect_steps_per_epoch()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Remember the epoch."""
        self.current_epoch = epoch

    def on_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Set the learning rate, if it is time to."""
        epoch = self.current_epoch or 0
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if not self.staircase:
            self._adjust_learning_rate(epoch + batch / (self.steps_per_epoch or 1))
        elif batch == 0:
            self._adjust_learning_rate(epoch)

    def on_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Restore the momentum, if a subclass has changed it for this batch."""
        self._restore_momentum_if_needed()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Report the learning rate as `lr`."""
        if logs is not None:
            logs["lr"] = self._rate()

    def _rate(self) -> float:
        return float(_value(self.model.optimizer.learning_rate))

    # Scripts override the following three, by these names of Horovod's.

    def _autodetect_steps_per_epoch(self) -> int:
        """Return the batches of an epoch as Keras knows them; ValueError if it never has."""
        found: int | None = self.params.get("steps") or self._detected_steps
        if not found:
            raise ValueError(
                f"Could not autodetect the number of steps per epoch. Please specify the "
                f"steps_per_epoch parameter to the {type(self).__name__}()"
            )
        return found

    def _restore_momentum_if_needed(self) -> None:
        """Set the optimizer's momentum to restore_momentum, if that is set, and unset it.

        This class never sets it: its correction scales what the momentum has accumulated.
        """
        if self.restore_momentum:
            self.model.optimizer.momentum = self.restore_momentum
            self.restore_momentum = None

    def _adjust_learning_rate(self, epoch: float) -> None:
        """Set the rate of an epoch, with a fraction unless staircase; correct the momentum."""
        before = self._rate()
        rate = self.initial_lr * self.multiplier(epoch)
        self.model.optimizer.learning_rate = rate
        optimizer = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        if not self.momentum_correction or before in (0.0, rate):
            return
        if isinstance(optimizer, _WITH_RATE) and _value(getattr(optimizer, "momentum", None)):
            # Keras has the coefficient as a constant in its graphs. Its factor is a
            # variable, and contains the old rate.
            for velocity in _velocities(optimizer, self.model.trainable_weights):
                _multiply(velocity, rate / before)


def _optimizers_with_rate() -> tuple[type, ...]:
    kinds = [keras.optimizers, *([keras.optimizers.legacy] if KERAS_2 else [])]
    return tuple(kind for each in kinds for kind in (each.SGD, each.RMSprop))


# Their momentum contains the learning rate; that of others, as Muon, consists of gradients alone.
_WITH_RATE = _optimizers_with_rate()


def _value(variable: Any) -> Any:
    """The value of a variable; Keras 2 may run without eager execution."""
    return keras.backend.get_value(variable) if KERAS_2 else variable


def _bytes(variable: Any) -> Any:
    """The bits of a variable's value."""
    value = _value(variable) if KERAS_2 else keras.ops.convert_to_numpy(variable)
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


def _multiply(variable: Any, factor: float) -> None:
    if KERAS_2:
        keras.backend.set_value(variable, _value(variable) * factor)
    else:
        variable.assign(variable * factor)


def _velocities(optimizer: Any, weights: Iterable[Any]) -> list[Any]:
    if hasattr(optimizer, "get_slot_names"):  # a legacy optimizer of Keras 2
        has_them = "momentum" in optimizer.get_slot_names()
        return [optimizer.get_slot(weight, "momentum") for weight in weights if has_them]
    name = "momentums" if hasattr(optimizer, "momentums") else "_momentums"
    # None: of a variable that its gradient overwrites.
    return [velocity for velocity in getattr(optimizer, name, ()) if velocity is not None]


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from initial_lr / size to initial_lr over the first epochs.

    The rate rises by the same amount in every batch (Goyal et al., "Accurate, Large Minibatch
    SGD", 2017).
    warmup_epochs: how many. verbose: 1 = rank 0 says when it is done. The rest: see
    LearningRateScheduleCallback.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            # After the last batch of an epoch the epoch is a whole number.
            epoch += 1.0 / (self.steps_per_epoch or 1)
            size = basics.size()
            return (epoch * (size - 1) / warmup_epochs + 1) / size

        super().__init__(
            initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Report the learning rate, and the end of the warm-up."""
        super().on_epoch_end(epoch, logs)
        if self.end_epoch == epoch + 1 and self.verbose > 0 and basics.rank() == 0:
            print(
                f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self._rate():g}."
            )


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """keras.callbacks.ModelCheckpoint that keeps the best model, in a file to be named later.

    Assign `filepath` before fit, on the rank that is to save: ValueError if it is missing.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        save_weights_only: bool = False,
    ) -> None:
        # Keras looks at the suffix, and takes no None.
        placeholder = "later.weights.h5" if save_weights_only else "later.keras"
        super().__init__(
            placeholder,
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath: Any = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Check that there is a file."""
        if self.filepath is None:
            raise ValueError("[keras] BestModelCheckpoint: assign its `filepath` before fit")
        self.filepath = str(self.filepath)
        super().on_train_begin(logs)

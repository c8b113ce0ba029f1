"""Elastic training with Keras: a state for models, and callbacks that keep it up to date in fit.

Belongs to the training thread. Source of behaviour: Horovod 0.28.1, horovod.keras.elastic.
"""

from __future__ import annotations

from typing import Any

from perseus import basics
from perseus.elastic.variables_state import ModelState
from perseus.keras.backend import backend as keras_backend
from perseus.keras.library import keras
from perseus.keras.training_thread import InTrainingThread

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]

run = keras_backend.run


def _broadcast(variables: Any) -> None:
    keras_backend.broadcast_variables(variables, 0, "TensorFlowKerasState")


class TensorFlowKerasState(ModelState):
    """A model, its optimizer and plain values: `state = KerasState(model, epoch=0, batch=0)`.

    model: a Keras model that is built, or ValueError. optimizer: None = the one of compile().
    backend: accepted for Horovod's sake. kwargs: attributes and their first values; picklable.
    """

    def __init__(
        self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any
    ) -> None:
        super().__init__(
            lambda obj: keras_backend.broadcast_object(obj, 0, type(obj).__name__),
            basics.rank,
            _broadcast,
            model,
            optimizer,
            backend,
            **kwargs,
        )


class KerasState(TensorFlowKerasState):
    """TensorFlowKerasState under the name that Keras scripts use."""

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        super().__init__(model, optimizer, keras_backend, **kwargs)


class CommitStateCallback(InTrainingThread):
    """Commits a state every batches_per_commit batches, and at the end of epochs.

    A commit copies the model; a failure loses the training after the last commit.
    """

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.backend = keras_backend
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Count from the start, as all ranks do."""
        super().on_train_begin(logs)
        self.batches_remaining = self.batches_per_commit

    def on_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Commit if it is time to."""
        super().on_batch_end(batch, logs)
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.commit()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Commit."""
        self.commit()

    def commit(self) -> None:
        """Commit, and count from the start."""
        self.batches_remaining = self.batches_per_commit
        self.state.commit()


class UpdateBatchStateCallback(InTrainingThread):
    """Keeps state.batch, the batch that was finished last; 0 at the end of an epoch.

    Comes before CommitStateCallback in fit's list. If training continues in the middle of an epoch,
    the progress bar shows the remaining batches; the script must pass fit no more than these.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.backend = keras_backend
        self.state = state
        self.steps_per_epoch: int | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Determine the steps per epoch again."""
        super().on_train_begin(logs)
        self.steps_per_epoch = None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Shorten the epoch by the finished batches."""
        if self.params.get("steps"):
            if self.steps_per_epoch is None:
                self.steps_per_epoch = self.params["steps"]
            self.params["steps"] = self.steps_per_epoch - self.state.batch

    def on_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Keep the batch."""
        super().on_batch_end(batch, logs)
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """The next epoch begins with batch 0."""
        self.state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Keeps state.epoch, the number of epochs that are finished, those before fit included."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.backend = keras_backend
        self.state = state
        self.initial_epoch = state.epoch

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Remember how many were finished before."""
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Count an epoch."""
        self.state.epoch = self.initial_epoch + epoch + 1

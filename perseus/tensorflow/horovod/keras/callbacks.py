"""Callbacks for `fit` under the names of horovod.tensorflow.keras.callbacks."""

from perseus.compat.common.extensions import is_version_greater_equal_than
from perseus.keras import callbacks as _callbacks
from perseus.keras.callbacks import (
    BroadcastGlobalVariablesCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
)

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "is_version_greater_equal_than",
]


class BestModelCheckpoint(_callbacks.BestModelCheckpoint):
    """perseus.keras.callbacks.BestModelCheckpoint with its arguments in another order."""

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
    ) -> None:
        super().__init__(monitor, verbose, mode, save_freq, save_weights_only)

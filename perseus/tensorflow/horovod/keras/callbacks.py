"""Callbacks for `fit` under the names of horovod.tensorflow.keras.callbacks."""

from perseus.extensions import is_version_greater_equal_than
from perseus.keras.callbacks import (
    BestModelCheckpoint,
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

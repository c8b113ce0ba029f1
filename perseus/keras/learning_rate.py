"""The learning rate by which codecs weigh what they have held back. Stateless."""

from __future__ import annotations

from typing import Any

from perseus.keras.library import KERAS_2, keras

_CHANGE_GRADIENTS = ("clipnorm", "clipvalue", "global_clipnorm", "gradient_transformers")


def learning_rate(optimizer: Any, kind: type) -> Any:
    """Return the rate of an optimizer's next step, a scalar tensor of Keras's framework.

    kind: the class whose steps are taken. The optimizer's own is derived from it.

    It is None, for a rate that is not known, if steps are not proportional to both the rate and the
    gradient: those of SGD are, unless it clips gradients, but others may not be, even if they are
    derived from it. A function that the optimizer calls for the rate is not called here as well,
    because it may count its calls.
    """
    if not _is_sgd(kind) or any(getattr(optimizer, name, None) for name in _CHANGE_GRADIENTS):
        return None
    if KERAS_2:
        return _of_keras_2(optimizer)
    if not isinstance(optimizer._learning_rate, (keras.Variable, _Schedule)):
        return None
    return keras.ops.convert_to_tensor(optimizer.learning_rate)


_Schedule = keras.optimizers.schedules.LearningRateSchedule


def _is_sgd(kind: type) -> bool:
    if KERAS_2:
        return kind in {keras.optimizers.SGD, keras.optimizers.legacy.SGD}
    # On PyTorch, Keras 3 itself derives a class from it.
    return issubclass(kind, keras.optimizers.SGD) and kind.__module__.startswith("keras.")


def _of_keras_2(optimizer: Any) -> Any:
    import tensorflow as tf

    if isinstance(optimizer, keras.optimizers.legacy.Optimizer):
        with tf.init_scope():  # it creates them where it applies gradients for the first time
            _ = optimizer.iterations
            optimizer._create_hypers()
        rate = optimizer._hyper["learning_rate"]
        known = isinstance(rate, _Schedule) or not callable(rate)
        return optimizer._decayed_lr(tf.float32) if known else None
    rate = optimizer._learning_rate
    # optimizer.learning_rate is that of the step before if there is a schedule.
    return tf.convert_to_tensor(rate(optimizer.iterations) if isinstance(rate, _Schedule) else rate)

"""Makes optimizers of another class with the options of given ones, by Keras' get_config().

Stateless. Belongs to the thread that wraps the optimizer.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from perseus.keras.library import KERAS_2, keras

_KERAS_MODULES = ("keras.", "tf_keras.")
# Since Keras 3.4, copy.copy() and copy.deepcopy() of an optimizer save and load it, as pickle does.
COPIES_ARE_LOADED = not KERAS_2 and hasattr(keras.optimizers.Optimizer, "_unpickle_model")


def distributed_class(mixin: type, wrapped: type, options: Any) -> Any:
    """Return a subclass of an optimizer's class with a mixin in front, to which it tells options.

    Saved models name the wrapped class, which plain Keras can then load without Perseus.
    """
    copied = {"__module__": wrapped.__module__, "__qualname__": wrapped.__qualname__}
    made = type(
        wrapped.__name__, (mixin, wrapped), {**copied, "_kind": wrapped, "_options": options}
    )
    name = keras.saving.get_registered_name(wrapped)
    # Keras finds its own classes by their modules, too.
    if name != wrapped.__name__ and not wrapped.__module__.startswith(_KERAS_MODULES):
        _save_as(made, name)
    return made


def _save_as(made: type, name: str) -> None:
    """Let Keras save a class under a registered name, which still loads the class that has it."""
    registered = keras.saving.get_custom_objects()
    loaded = registered.get(name)
    package, _, rest = name.partition(">")
    keras.saving.register_keras_serializable(package, rest)(made)
    if loaded is None:  # the script has cleared the table
        del registered[name]
    else:
        registered[name] = loaded


def copy_of(optimizer: Any, made_class: Any, not_in_config: Sequence[str]) -> Any:
    """Return an optimizer of made_class, a subclass of the given one's, with its options.

    A schedule of the learning rate, or another callable, is the same object in both.

    not_in_config: attributes that the config of some optimizers lacks.

    Raises ValueError if get_config() does not return what the constructor needs, and warns if it
    lacks an argument that has a default.
    """
    try:
        with _hidden_rate(optimizer) as rate:
            config = optimizer.get_config()
        _look_for_missing(type(optimizer), config)
        if rate is not None and "learning_rate" in config:
            config["learning_rate"] = rate
        made = made_class.from_config(config)
    except Exception as error:
        name = type(optimizer).__name__
        raise ValueError(
            f"[keras] DistributedOptimizer could not copy the {name} by its get_config(): {error}; "
            f"let {name}.get_config() return all arguments of the constructor, as plain values"
        ) from error
    if rate is not None and _rates_of(made)[0].get(_rates_of(made)[1]) is not rate:
        made.learning_rate = rate  # the constructor has another name for it
    for name in not_in_config:
        if hasattr(optimizer, name):
            setattr(made, name, getattr(optimizer, name))
    return made


def loaded_copy(optimizer: Any) -> Any:
    """Return the copy that Keras makes of an optimizer, of which none is distributed.

    It has the options and, as far as Keras copies it, the state.
    """
    load, saved = optimizer.__reduce__()
    return load(*saved)


def copy_around(optimizer: Any, inner: Any) -> Any:
    """Return a LossScaleOptimizer with the options of the given one, around another optimizer."""
    with _hidden_rate(optimizer.inner_optimizer):  # its config has the inner one's
        config = optimizer.get_config()
    return type(optimizer)(**{**config, "inner_optimizer": inner})


def copy_with_inner(optimizer: Any, made_class: Any) -> Any:
    """Return a MultiOptimizer of made_class with the inner optimizers of the given one.

    They are not copied: several keys may have the same one, and a function may choose it.
    """
    made = made_class(
        optimizer_map=optimizer._optimizer_map,
        loss_scale_factor=optimizer.loss_scale_factor,
        name=optimizer.name,
    )
    if hasattr(optimizer._optimizer_map, "values"):
        # In the same order, even if some were added to the map later. Functions may make new ones.
        made._inner_optimizers = list(optimizer.optimizers)
    return made


@contextmanager
def _hidden_rate(optimizer: Any) -> Iterator[Any]:
    """Replace a callable learning rate by a number, and yield it; yield None for other rates.

    Keras can serialize only some of them, of which it can deserialize only those it knows.
    """
    values, name = _rates_of(optimizer)
    rate = values.get(name)
    if not callable(rate):
        yield None
        return
    values[name] = 0.5
    try:
        yield rate
    finally:
        values[name] = rate


def _rates_of(optimizer: Any) -> tuple[dict[str, Any], str]:
    """Return where an optimizer keeps its learning rate, and under which key."""
    if KERAS_2 and isinstance(optimizer, keras.optimizers.legacy.Optimizer):
        return optimizer._hyper, "learning_rate"
    return vars(optimizer), "_learning_rate"


def _look_for_missing(kind: Any, config: dict[str, Any]) -> None:
    """Warn if the config of a script's own class lacks arguments of its constructor."""
    if kind.__module__.startswith(_KERAS_MODULES):
        return
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    _, *parameters = inspect.signature(kind.__init__).parameters.values()
    missing = [
        parameter.name
        for parameter in parameters
        if parameter.kind in named and parameter.name not in config
    ]
    if missing:
        warnings.warn(
            f"[keras] {kind.__name__}.get_config() lacks {', '.join(missing)}, so the "
            "DistributedOptimizer has the constructor's defaults: let get_config() return all "
            "arguments of the constructor",
            stacklevel=7,
        )

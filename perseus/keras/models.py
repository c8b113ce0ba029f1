"""load_model: loads a saved model to train it further on all ranks. Stateless."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from perseus.elastic.variables_state import optimizer_variables
from perseus.keras.backend import backend
from perseus.keras.library import KERAS_2, keras
from perseus.keras.wrapping import distribute, is_distributed, make_options
from perseus.process_sets import global_process_set


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = backend.Compression.settings,
    legacy_opts: bool = False,
) -> Any:
    """keras.models.load_model, with a DistributedOptimizer instead of the model's optimizer.

    The optimizer continues from its saved state. filepath: a .keras or .h5 file. custom_optimizers:
    classes of optimizers that the file may name. custom_objects: other things that it may name.
    compression: as for DistributedOptimizer. legacy_opts: accepted and not needed.

    Keras 3 on TensorFlow does not compile the model by XLA, whatever the file says; set
    model.jit_compile = True to have it do that.
    """
    named = {custom.__name__: custom for custom in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**named, **(custom_objects or {})})
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not is_distributed(optimizer):
        options = make_options(
            None, "", "", compression, False, 1.0, backend.Average, 1, False, 0, None,
            global_process_set, True,
        )  # fmt: skip
        optimizer_variables(optimizer, model.trainable_weights)  # Keras 2 restores what it makes
        model.optimizer = distribute(optimizer, options)
        if not KERAS_2 and keras.backend.backend() == "tensorflow":
            model.jit_compile = False  # Keras has chosen XLA for the plain optimizer, or the file
        optimizer_variables(model.optimizer, model.trainable_weights)
        inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        if hasattr(inner, "perseus_residuals") and str(filepath).endswith(".keras"):
            model.load_weights(filepath)  # again, since a plain optimizer has no residuals
    return model

"""load_model: a saved model, to be trained further on all ranks. Stateless."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import keras

from perseus.keras.backend import backend
from perseus.keras.optimizer import DistributedMixin, distribute, make_plan
from perseus.process_sets import global_process_set


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = backend.Compression.settings,
    legacy_opts: bool = False,
) -> Any:
    """keras.models.load_model, with a DistributedOptimizer in the place of the model's optimizer.

    The optimizer goes on where it was saved. filepath: a .keras or .h5 file. custom_optimizers:
    classes of optimizers that the file may name. custom_objects: other things that it may name.
    compression: as for DistributedOptimizer. legacy_opts: accepted; Keras 3 has no legacy ones.
    """
    named = {custom.__name__: custom for custom in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**named, **(custom_objects or {})})
    optimizer = getattr(model, "optimizer", None)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if inner is not None and not isinstance(inner, DistributedMixin):
        plan = make_plan(
            None, "", "", compression, False, 1.0, backend.Average, 1, False, 0, None,
            global_process_set, True,
        )  # fmt: skip
        model.optimizer = distribute(optimizer, plan)
        if str(filepath).endswith(".keras"):
            model.load_weights(filepath)  # once more, as a plain optimizer knows no residuals
    return model

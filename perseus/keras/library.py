"""Chooses and imports the Keras that `perseus.keras` serves, or says what to install."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from perseus.installed import missing, require


def _import_keras() -> Any:
    """Import what tf.keras is; keras if it does not run on TensorFlow."""
    legacy = os.environ.get("TF_USE_LEGACY_KERAS") in {"1", "true", "True"}
    name = "tf_keras" if legacy else "keras"
    require(name)
    try:
        return import_module(name)
    except ModuleNotFoundError as error:  # of its framework
        framework = str(error.name).partition(".")[0]
        if framework not in ("tensorflow", "torch"):
            raise
        other = "" if legacy else "; or choose the other one by KERAS_BACKEND=tensorflow or torch"
        raise missing(framework, f", which Keras runs on here{other}") from None


keras: Any = _import_keras()
KERAS_2 = keras.__version__.startswith("2.")

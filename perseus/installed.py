"""Frameworks that are not installed: one line that says what to install, for every adapter.

Looks without importing, so that asking costs nothing. Thread-safe.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

# Module -> what it is called, and how it is installed.
_FRAMEWORKS = {
    "yaml": ("PyYAML", "pip install pyyaml"),
    "torch": ("PyTorch", "pip install torch"),
    "tensorflow": ("TensorFlow", "pip install tensorflow-cpu (2.15 or newer)"),
    "mxnet": ("MXNet", 'pip install mxnet==1.9.1 "numpy<1.24"'),
    "keras": ("Keras", "pip install keras, and tensorflow-cpu or torch for it to run on"),
    "tf_keras": ("tf_keras", "pip install tf_keras, or unset TF_USE_LEGACY_KERAS for Keras 3"),
}


def require(module: str) -> None:
    """ModuleNotFoundError, with the command that installs it, where a framework is missing."""
    if sys.modules.get(module) is None and find_spec(module) is None:
        raise missing(module)


def missing(module: str, remedy: str = "") -> ModuleNotFoundError:
    """The error for a framework that is missing. remedy: what else would do."""
    name, command = _FRAMEWORKS[module]
    return ModuleNotFoundError(
        f"[{module}] {name} is not installed: {command}{remedy}", name=module
    )

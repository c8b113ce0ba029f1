"""What is not installed, or not whole: one line that says what to install, for every adapter.

Looks without importing, so that asking costs nothing. Thread-safe.
"""

from __future__ import annotations

import re
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path

# Module -> what it is called, and how it is installed.
_FRAMEWORKS = {
    "yaml": ("PyYAML", "pip install pyyaml"),
    "torch": ("PyTorch", "pip install torch (2.1 or newer)"),
    "tensorflow": ("TensorFlow", "pip install tensorflow-cpu (2.15 or newer)"),
    "mxnet": ("MXNet", 'pip install mxnet==1.9.1 "numpy<1.24", on Python 3.10 or 3.11'),
    "keras": ("Keras", "pip install keras, and tensorflow-cpu or torch for it to run on"),
    "tf_keras": ("tf_keras", "pip install tf_keras, or unset TF_USE_LEGACY_KERAS for Keras 3"),
}
# Module -> the oldest version that is served, and the first one that no longer is.
_SERVED = {
    "torch": ((2, 1), None),
    "tensorflow": ((2, 15), None),
    "mxnet": ((1, 9), (1, 10)),
}


class MissingCoreError(ImportError):
    """This package has no native core for this Python. The message has the remedy."""


def remedy() -> str:
    """Return what helps where a library of this package is missing."""
    package = Path(__file__).resolve().parent
    tree = package.parent
    is_built = any((package / f"_core{suffix}").exists() for suffix in EXTENSION_SUFFIXES)
    if (tree / "setup.py").exists() and not is_built:
        return (
            f"{tree} is the source tree, where nothing is built for this Python, and hides an "
            f"installed package: run elsewhere, or `pip install -e {tree}`"
        )
    return "it is not installed whole, or for another Python: pip install Perseus again"


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


def require_served(module: str, version: str) -> None:
    """ImportError, with what is needed, for a version of a framework that is not served."""
    if reason := unserved(module, version):
        raise ImportError(f"[{module}] {reason}", name=module)


def unserved(module: str, version: str) -> str:
    """Return why a version of a framework is not served; "" if it is, or has no numbers."""
    name, command = _FRAMEWORKS[module]
    oldest, beyond = _SERVED[module]
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:  # it is for whoever imports it to say
        return ""
    given = tuple(map(int, found.groups()))
    if beyond is not None and not oldest <= given < beyond:
        return (
            f"{name} {version} is not served, its engine is called in another way than that of "
            f"{'.'.join(map(str, oldest))}: {command}"
        )
    if given < oldest:
        needed = ".".join(map(str, oldest))
        return f"{name} {version} is too old: Perseus needs {needed} or newer"
    return ""

"""The native ops: loads libperseus_tensorflow.so into TensorFlow and attaches it to each world.

`native` has one function for every op; see perseus.tensorflow.xla. Loading the library does not
initialise TensorFlow's runtime, so scripts can still configure devices and threads. Before its
first asynchronous op runs, the library tests whether this version of TensorFlow passes completion
callbacks as expected. Thread-safe after import.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from perseus import basics
from perseus.installed import remedy, require_served
from perseus.memory import keep_freed_memory
from perseus.tensorflow import xla

_OWNED_COMPLETIONS = (2, 22)  # see frameworks/tensorflow/completion.h
_LIBRARY = Path(__file__).resolve().parent.parent / "libperseus_tensorflow.so"

OPS_WITHOUT_GRADIENT = (
    "PerseusJoin",
    "PerseusSize",
    "PerseusRank",
    "PerseusLocalSize",
    "PerseusLocalRank",
    "PerseusProcessSetIncluded",
)
OPS = (
    "PerseusAllreduce",
    "PerseusAllgather",
    "PerseusBroadcast",
    "PerseusAlltoall",
    "PerseusReducescatter",
    *OPS_WITHOUT_GRADIENT,
)


def _import_tensorflow() -> tuple[Any, tuple[int, int]]:
    """Return TensorFlow and its version. Raises ImportError if it is too old."""
    import tensorflow

    require_served("tensorflow", tensorflow.__version__)
    major, minor = (int(part) for part in tensorflow.__version__.split(".")[:2])
    return tensorflow, (major, minor)


def _load() -> tuple[Any, ctypes.CDLL]:
    """Return the module of the ops' Python functions, and the library for ctypes.

    Raises ImportError if the library is missing or TensorFlow cannot load it.
    """
    tensorflow, version = _import_tensorflow()
    from tensorflow.python.autograph.core import config as autograph
    from tensorflow.python.framework import auto_control_deps as order

    if not _LIBRARY.exists():
        raise ImportError(f"[tensorflow] {_LIBRARY} is missing: {remedy()}")
    # The ops are stateful, so that TensorFlow neither merges equal ones nor folds constants. By
    # default it would also run stateful ops one after the other, but ranks match them by name, so
    # they may run in any order.
    order.MUST_RUN_ORDER_INSENSITIVE_STATEFUL_OPS |= frozenset(OPS)
    # In a tf.function, AutoGraph would rewrite all of this package that the script calls, which
    # takes seconds and warns of syntax that it does not know. Nothing here depends on the values of
    # tensors.
    autograph.CONVERSION_RULES += (autograph.DoNotConvert("perseus"),)
    try:
        functions = tensorflow.load_op_library(str(_LIBRARY))
    except (tensorflow.errors.OpError, RuntimeError) as error:
        raise ImportError(
            f"[tensorflow] TensorFlow {tensorflow.__version__} cannot load {_LIBRARY}: {error}"
        ) from None
    library = ctypes.CDLL(str(_LIBRARY))
    library.perseus_tensorflow_attach.argtypes = [ctypes.c_void_p]
    library.perseus_tensorflow_attach.restype = None
    library.perseus_tensorflow_detach.restype = None
    library.perseus_tensorflow_set_convention(int(version >= _OWNED_COMPLETIONS))
    return functions, library


class _Attachment:
    """The library's reference to one world's context."""

    def close(self) -> None:
        _library.perseus_tensorflow_detach()


def _attach() -> None:
    keep_freed_memory()
    _library.perseus_tensorflow_attach(basics.lend_context(_Attachment()))


_functions, _library = _load()
_compiled = xla.load(_import_tensorflow()[0])
native = xla.guarded(_functions, built=_compiled is not None)
basics.at_init(_attach)

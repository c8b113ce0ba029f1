"""Ops in functions that XLA compiles: served by a library built on request, else refused.

The library (frameworks/tensorflow/xla) needs TensorFlow's own C++ headers, so it is compiled where
it is used (see build_xla) and kept for each version of TensorFlow and of its sources. Without it an
op raises an error with the remedy when it is traced. TensorFlow itself would only report, when the
function runs, that no such kernel is registered; it still does so if a function was traced before
a function with jit_compile=True called it. Thread-safe.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from perseus import basics

_PACKAGE = Path(__file__).resolve().parent.parent
# Installed, or of a working tree; setup.py installs the same files.
_SOURCES = _PACKAGE / "sources" if (_PACKAGE / "sources").is_dir() else _PACKAGE.parent
_ADAPTERS = _SOURCES / "frameworks"
FOLDERS = [_ADAPTERS / "tensorflow" / "xla", _ADAPTERS / "tensorflow", _SOURCES / "common/include"]

# The ops in the library. The results of all others have shapes that only a run knows.
_COMPILED = frozenset(
    f"perseus_{op}"
    for op in (
        "allreduce", "allgather", "broadcast", "reducescatter",
        "size", "rank", "local_size", "local_rank", "process_set_included",
    )
)  # fmt: skip


def _is_typed(tensorflow: Any) -> bool:
    """Whether XLA has its typed interface, which lets a program wait for several calls at once."""
    return Path(tensorflow.sysconfig.get_include(), "xla", "ffi", "api", "ffi.h").exists()


def sources(tensorflow: Any) -> list[Path]:
    """The library's sources for a TensorFlow; our own headers are beside them or in FOLDERS."""
    own = ["kernels", "plan", "compiled_call", "library"]
    own.append("targets_ffi" if _is_typed(tensorflow) else "targets_status")
    return [
        *(FOLDERS[0] / f"{name}.cc" for name in own),
        *(FOLDERS[1] / f"{name}.cc" for name in ("question", "settings")),
        _ADAPTERS / "world" / "world.cc",
    ]


def place(tensorflow: Any) -> Path:
    """Where this user's library for a TensorFlow is kept, whether it exists or not."""
    files = {*sources(tensorflow), *(FOLDERS[2] / "perseus").glob("*.h")}
    for folder in (*FOLDERS[:2], _ADAPTERS / "world"):
        files.update(folder.glob("*.h"))
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.read_bytes())
    for flag in tensorflow.sysconfig.get_compile_flags():
        if not flag.startswith("-I"):
            digest.update(flag.encode())
    digest.update(repr((platform.machine(), platform.libc_ver())).encode())  # hosts may share it
    version = f"tensorflow-{tensorflow.__version__}-{digest.hexdigest()[:16]}"
    return _cache() / version / "libperseus_xla.so"


def _cache() -> Path:
    given = os.environ.get("XDG_CACHE_HOME", "")
    return Path(given if os.path.isabs(given) else Path.home() / ".cache") / "perseus" / "xla"


def load(tensorflow: Any) -> ctypes.CDLL | None:
    """Load the library, which registers its kernels; None if it has not been built, or cannot load.

    Warns in the latter case: most jobs do without it.
    """
    try:
        cache = _cache()
    except RuntimeError:  # no home, so nothing has been built there
        return None
    try:
        if not cache.is_dir() or not (path := place(tensorflow)).exists():
            return None
        library = ctypes.CDLL(str(path))
    except OSError as error:
        warnings.warn(
            f"[xla] the library does not load, so ops cannot be compiled by XLA: {error}; remove "
            f"it, and build it again with `perseusrun --build-xla`",
            stacklevel=2,
        )
        return None
    library.perseus_xla_attach.argtypes = [ctypes.c_void_p]
    library.perseus_xla_attach.restype = None
    library.perseus_xla_detach.restype = None
    basics.at_init(lambda: library.perseus_xla_attach(basics.lend_context(_Attachment(library))))
    return library


class _Attachment:
    """The library's use of one world's context."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def close(self) -> None:
        self._library.perseus_xla_detach()


def within() -> bool:
    """Whether TensorFlow is tracing a function with jit_compile=True."""
    from tensorflow.python.eager import context
    from tensorflow.python.framework import ops
    from tensorflow.python.ops import control_flow_util

    if context.executing_eagerly():
        return False
    return bool(control_flow_util.GraphOrParentsInXlaContext(ops.get_default_graph()))


def _warn_of_perf_check() -> None:
    """Warn where a program waits for one collective before it starts the next."""
    import tensorflow

    searches = basics.is_initialized() and basics.setting("PERSEUS_PERF_CHECK_N_STEPS") > 0
    if searches and not _is_typed(tensorflow):
        warnings.warn(
            "[tensorflow] PERSEUS_PERF_CHECK_N_STEPS: in a program of this version's XLA, waiting "
            "for other ranks looks like computing, so slow ranks may not be found: search with "
            "jit_compile=False",
            stacklevel=3,
        )


def _guarded(name: str, function: Callable[..., Any], built: bool) -> Any:
    @functools.wraps(function)
    def make(*args: Any, **kwargs: Any) -> Any:
        compiled = within()
        if compiled and not (built and name in _COMPILED):
            lacks = (
                "for which Perseus' XLA library must be built, once on every host, with "
                "`perseusrun --build-xla`; or"
                if name in _COMPILED
                else "which it cannot:"
            )
            raise NotImplementedError(
                f"[tensorflow] {name} is called in a function that XLA compiles, {lacks} pass "
                "jit_compile=False, to tf.function or to Keras' Model.compile"
            )
        if compiled:
            _warn_of_perf_check()
        return function(*args, **kwargs)

    return make


def guarded(functions: Any, built: bool) -> SimpleNamespace:
    """The generated functions of our ops, which raise NotImplementedError where XLA compiles.

    built: the library exists, so only ops that it lacks are refused.
    """
    return SimpleNamespace(
        **{
            name: _guarded(name, function, built)
            for name, function in vars(functions).items()
            if name.startswith("perseus_") and callable(function)
        }
    )

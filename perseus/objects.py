"""Python objects as bytes, for broadcast_object and allgather_object of every framework.

Bytes are read from authenticated ranks only. Pure functions, thread-safe.
"""

from __future__ import annotations

import pickle
from typing import Any


def dumps(obj: Any) -> bytes:
    """Pickle `obj`, functions and classes of __main__ included (cloudpickle)."""
    import cloudpickle

    data: bytes = cloudpickle.dumps(obj)
    return data


def loads(data: bytes | bytearray | memoryview) -> Any:
    """The object again, as a copy."""
    return pickle.loads(data)


def default_name(obj: Any) -> str:
    """The tensor name used when none is given, so that ranks must pass objects of one type."""
    return type(obj).__name__

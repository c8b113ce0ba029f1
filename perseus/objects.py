"""Python objects as bytes. Pure functions, thread-safe."""

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

"""Averages the metrics of an epoch over all ranks, after a look at whether they are the same ones.

Belongs to the thread that calls fit.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from perseus import control
from perseus.errors import MismatchError
from perseus.gradients.parameter_check import by_rank
from perseus.keras.backend import backend
from perseus.keras.library import KERAS_2, keras

_NAME = "MetricAverageCallback"


def means(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mean of each metric over all ranks, as a float or a float64 array. A collective.

    logs: numbers, or tensors of any shape; at least one. Raises MismatchError on all ranks unless
    names and shapes are equal.
    """
    values = {name: _array(logs[name]) for name in sorted(logs)}
    _compare({name: list(value.shape) for name, value in values.items()})
    mean = backend.average(np.concatenate([value.reshape(-1) for value in values.values()]), _NAME)
    ends = np.cumsum([value.size for value in values.values()])
    parts = zip(values.items(), np.split(mean, ends[:-1]), strict=True)
    return {
        name: part.reshape(value.shape) if value.ndim else float(part[0])
        for (name, value), part in parts
    }


def _array(value: Any) -> np.ndarray[Any, Any]:
    if not KERAS_2 and keras.ops.is_tensor(value):
        value = keras.ops.convert_to_numpy(value)
    return np.asarray(value, dtype=np.float64)


def _compare(shapes: dict[str, list[int]]) -> None:
    """Compare hashes; only if they differ, the names and shapes themselves.

    Nothing is compared while a rank waits in join(), which takes part in averages only.
    """
    from perseus import _core

    encoded = json.dumps(shapes).encode()
    summary = struct.pack("<Q", _core.hash_bytes(encoded))
    gathered = control.gather_if_different(summary, lambda: encoded, f"{_NAME}.names", 0)
    if gathered is None:
        return
    difference = _difference([json.loads(part) for part in gathered])
    raise MismatchError(
        f"[keras] MetricAverageCallback: metrics differ between ranks: {difference}. "
        "Compile the same metrics on all ranks, and pass validation_data on all or none"
    )


def _difference(gathered: list[dict[str, list[int]]]) -> str:
    """Say which ranks have which of the metrics that are not the same on all."""
    found = [
        {f"{name} of shape {tuple(shape)}" if shape else name for name, shape in shapes.items()}
        for shapes in gathered
    ]
    same = set.intersection(*found)
    lists = [", ".join(sorted(names - same)) or "none of these" for names in found]
    return by_rank(lists, list(range(len(lists))), "{} on {}")

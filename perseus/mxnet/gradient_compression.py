"""Turns MXNet's compression dictionaries into compressors of Perseus. Stateless, thread-safe."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

from perseus import basics
from perseus.compression import Compressor
from perseus.mxnet.compression import Compression


def _two_bits(threshold: float | None = None) -> type[Compressor]:
    """Return int8 for MXNet's own kind, to which it is closest; rank 0 warns about it."""
    if basics.is_initialized() and basics.rank() == 0:
        unused = "" if threshold is None else f", so that threshold={threshold} has no effect"
        warnings.warn(
            f"[kvstore] gradient compression '2bit' is not available: gradients travel between "
            f"hosts as int8, with 8 bits and a scale for each block of values{unused}; write "
            f"{{'type': 'int8'}} to choose it, or another type",
            stacklevel=4,
        )
    return Compression.int8


# By the entry `type`; all other entries of the dictionary are arguments.
_KINDS: dict[str, Callable[..., type[Compressor]]] = {
    "2bit": _two_bits,
    "fp16": lambda: Compression.fp16,
    "bf16": lambda: Compression.bf16,
    "int8": lambda: Compression.int8,
    "int4": lambda: Compression.int4,
    "int2": lambda: Compression.int2,
    "topk": Compression.topk,
    "rotate": Compression.rotate,
    "powersgd": Compression.powersgd,
    "auto": lambda: Compression.auto,
    "none": lambda: Compression.none,
    "lossless": lambda: Compression.lossless,
    "settings": lambda: Compression.settings,
}


def compressor_of(parameters: Mapping[str, Any]) -> type[Compressor]:
    """Return the compressor for a dictionary as in KVStore.set_gradient_compression().

    'type' is one of fp16, bf16, int8, int4, int2, topk, rotate, powersgd, auto, none, lossless,
    settings and MXNet's 2bit. topk takes 'ratio', powersgd takes 'rank', rotate takes 'n' and
    averages weights instead. 2bit becomes int8, which also adds its error to the next gradient;
    rank 0 warns that the threshold has no effect. Raises ValueError for anything else.
    """
    if not isinstance(parameters, Mapping):
        raise ValueError(
            f"[kvstore] gradient compression {parameters!r}: expected a dictionary, such as "
            f"{{'type': 'int8'}}"
        )
    arguments = dict(parameters)
    kind = arguments.pop("type", None)
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(
            f"[kvstore] gradient compression {kind!r}: 'type' is one of {', '.join(_KINDS)}"
        )
    make = _KINDS[kind]
    unknown = [str(name) for name in arguments if name not in signature(make).parameters]
    if unknown:
        raise ValueError(
            f"[kvstore] gradient compression {kind!r} does not take {', '.join(unknown)}"
        )
    return make(**arguments)

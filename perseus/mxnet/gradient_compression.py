"""MXNet's dictionaries about compression, as compressors of Perseus. Stateless, thread-safe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from perseus.compression import Compressor
from perseus.mxnet.compression import Compression


def _two_bits(threshold: float = 0.5) -> type[Compressor]:
    """MXNet's own kind, of which the closest here is taken: its blocks find their own scale."""
    return Compression.int8


# By `type`; what else the dictionary has are arguments.
_KINDS: dict[str, Callable[..., type[Compressor]]] = {
    "2bit": _two_bits,
    "fp16": lambda: Compression.fp16,
    "bf16": lambda: Compression.bf16,
    "int8": lambda: Compression.int8,
    "topk": Compression.topk,
    "rotate": Compression.rotate,
    "auto": lambda: Compression.auto,
    "none": lambda: Compression.none,
    "settings": lambda: Compression.settings,
}


def compressor_of(parameters: Mapping[str, Any]) -> type[Compressor]:
    """What {'type': …} stands for: fp16, bf16, int8, topk, rotate, auto, none or settings.

    'ratio' goes with topk, 'n' with rotate. MXNet's 2bit is served by int8, which also keeps what
    it leaves out for the next gradient; its threshold is not needed. ValueError for other things.
    """
    arguments = dict(parameters)
    kind = arguments.pop("type", None)
    if kind not in _KINDS:
        raise ValueError(
            f"[kvstore] gradient compression {kind!r}: 'type' is one of {', '.join(_KINDS)}"
        )
    try:
        return _KINDS[kind](**arguments)
    except TypeError:
        raise ValueError(
            f"[kvstore] gradient compression {kind!r} does not take {', '.join(arguments)}"
        ) from None

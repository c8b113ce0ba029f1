"""Checks arguments in the same way for every framework; an error says what to write instead.

Stateless, thread-safe. `where` is the component in front of a message.
"""

from __future__ import annotations

from operator import index
from typing import Any

from perseus.compression import Compressor, compressor

# enum perseus_reduce_op, with Horovod's names.
OPS = ("Average", "Sum", "Adasum", "Min", "Max", "Product")
_MEANT = {"mean": "Average", "avg": "Average", "add": "Sum", "prod": "Product"}


def checked_op(op: Any, where: str) -> int:
    """A reduction's number; ValueError for anything else."""
    try:
        number = index(op)
    except TypeError:
        number = -1
    if 0 <= number < len(OPS) and not isinstance(op, bool):
        return number
    word = op.lower() if isinstance(op, str) else ""
    meant = _MEANT.get(word, word.capitalize())
    remedy = f"; write op=hvd.{meant}" if meant in OPS else ""
    raise ValueError(
        f"[{where}] op={op!r}: expected {', '.join(f'hvd.{name}' for name in OPS)}{remedy}"
    )


def checked_root(root_rank: Any, where: str) -> int:
    """A rank's number, which the core checks against the world; TypeError for other types."""
    try:
        return index(root_rank)
    except TypeError:
        raise TypeError(
            f"[{where}] root_rank={root_rank!r}: expected the number of a rank, such as root_rank=0"
        ) from None


_COMPRESSIONS = ("none", "lossless", "fp16", "bf16", "int8", "int4", "int2", "auto", "settings")
_COMPRESSIONS_TO_CALL = {"top_k": "topk(0.01)", "rotate": "rotate(4)", "powersgd": "powersgd(4)"}


def checked_compression(compression: Any, where: str) -> type[Compressor]:
    """A compressor; ValueError for anything else, also its name or a function that makes one."""
    if all(hasattr(compression, name) for name in ("compress", "decompress")):
        return compressor(compression)
    if isinstance(compression, str):
        remedy = f"write compression=hvd.Compression.{compression.lower()}"
        if compression.lower() not in _COMPRESSIONS:
            remedy = "write, for example, compression=hvd.Compression.fp16"
    elif compression is None:
        remedy = "leave it out, or write compression=hvd.Compression.none for full precision"
    elif callable(compression) and compression.__name__ in _COMPRESSIONS_TO_CALL:
        example = _COMPRESSIONS_TO_CALL[compression.__name__]
        remedy = f"call it: compression=hvd.Compression.{example}"
    else:
        remedy = "derive your own from hvd.Compression.none or perseus.compression.Compressor"
    raise ValueError(
        f"[{where}] compression={compression!r}: expected a class of hvd.Compression; {remedy}"
    )

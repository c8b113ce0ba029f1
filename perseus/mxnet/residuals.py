"""Files with an optimizer's states: MXNet's own, followed by the residuals of lossy codecs.

MXNet reads only its part, so it can load these files as well. Stateless.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from perseus import basics
from perseus.gradients.residuals import Held, own, pack, unpack

_LENGTH = struct.Struct("<Q")
_END = b"perseus.residuals"  # of the file; the number of bytes that precede it is in front


def write(path: Path, states: bytes, held: Mapping[str, Held]) -> None:
    """Replace a file atomically: other ranks may be writing or reading the same one.

    held: this rank's residuals, see gradients.residuals. Without any, the file is MXNet's own.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(states + _tail(held))
        part.replace(path)
    finally:
        with suppress(FileNotFoundError):
            part.unlink()


def held_in(content: bytes) -> dict[str, Held]:
    """Return this rank's residuals in a file with this content; {} if another rank wrote it."""
    if not content.endswith(_END):
        return {}
    end = len(content) - len(_END) - _LENGTH.size
    (length,) = _LENGTH.unpack_from(content, end)
    return own(*unpack(content[end - length : end]))


def _tail(held: Mapping[str, Held]) -> bytes:
    if not held:
        return b""
    data = pack(held, basics.rank())
    return data + _LENGTH.pack(len(data)) + _END

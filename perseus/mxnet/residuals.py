"""Files with an optimizer's states: MXNet's own, followed by the residuals of lossy codecs.

MXNet reads only its part, so it can load these files as well. Stateless.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from perseus import basics
from perseus.gradients.residuals import Held, own, pack_at_end, unpack_at_end


def write(path: Path, states: bytes, held: Mapping[str, Held]) -> None:
    """Replace a file atomically: other ranks may be writing or reading the same one.

    held: this rank's residuals, see gradients.residuals. Without any, the file is MXNet's own.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(states + pack_at_end(held, basics.rank() if held else 0))
        part.replace(path)
    finally:
        with suppress(FileNotFoundError):
            part.unlink()


def held_in(content: bytes) -> dict[str, Held]:
    """Return this rank's residuals in a file with this content; {} if another rank wrote it.

    Raises ValueError if they are damaged.
    """
    found = unpack_at_end(content)
    return {} if found is None else own(*found)

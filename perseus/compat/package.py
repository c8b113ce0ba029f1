"""What `import horovod` gives: the version whose interface Perseus has. Stateless."""

from __future__ import annotations

from typing import Any

__version__ = "0.28.1"


def __getattr__(name: str) -> Any:
    if name == "run":
        raise AttributeError(
            "horovod.run: Perseus starts no ranks from Python yet; use perseusrun --horovod"
        )
    raise AttributeError(f"module 'horovod' has no attribute {name!r}")

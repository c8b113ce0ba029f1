"""perseusrun: starts the ranks of a job on this and other hosts.

This package can be called like its function: `import perseus; perseus.run(func, num_proc=2)`.
Importing it loads no launcher, because ranks import it too, for perseus.run.bootstrap.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perseus.run.function import run as run

__all__ = ["run"]


def __getattr__(name: str) -> Any:
    if name in {"run", "__signature__"}:
        from inspect import signature

        from perseus.run.function import run

        return run if name == "run" else signature(run)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Callable(ModuleType):
    # The import system puts the package where a function named like it would be.
    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        from perseus.run.function import run

        return run(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable

"""perseusrun: starts the ranks of a job on this host and on other hosts.

The package itself is callable, as its function `run`: `import perseus; perseus.run(func,
num_proc=2)`. Importing it does not load the launcher, because ranks import it as well, for
perseus.run.bootstrap.
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
    # Importing a submodule binds perseus.run to this package, so the package has to be callable.
    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        from perseus.run.function import run

        return run(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable

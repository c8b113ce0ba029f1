"""perseusrun: starts the ranks of a job on this and other hosts.

This package can be called like its function: `import perseus; perseus.run(func, num_proc=2)`.
"""

from __future__ import annotations

import sys
from types import ModuleType

from perseus.run.function import run

__all__ = ["run"]


class _Callable(ModuleType):
    # The import system puts the package where a function named like it would be.
    __call__ = staticmethod(run)


sys.modules[__name__].__class__ = _Callable

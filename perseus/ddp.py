"""Tells a script for torch.distributed that `import perseus` does nothing for it yet.

Rank 0 says so once, after torch.distributed.init_process_group, unless the process uses Perseus in
another way. This module waits for the script to import torch. Belongs to the main thread.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

_DISTRIBUTED = "torch.distributed"
_NOTICE = (
    "[perseus] `import perseus` does not change torch.distributed yet: DistributedDataParallel "
    "goes on with PyTorch's own backend, and no faster. To train on Perseus, `import "
    'perseus.torch.distributed` and init_process_group("perseus") (docs/ddp.md), or use `import '
    "perseus.torch.horovod as hvd` (docs/migration.md)"
)


def watch() -> None:
    """Show the message after the script's first process group."""
    module = sys.modules.get(_DISTRIBUTED)
    if module is not None:
        _follow(module)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds one module, as the import system would, and goes."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """The module's own spec, whose loader is followed by _follow; None for other modules."""
        if fullname != _DISTRIBUTED:
            return None
        from importlib.util import find_spec

        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _follow(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _follow(module: ModuleType) -> None:
    """Replace init_process_group until it is called; torch may be built without it."""
    from functools import wraps

    original = getattr(module, "init_process_group", None)
    if original is None:
        return

    @wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        setattr(module, "init_process_group", original)  # noqa: B010 - mypy knows no such attribute
        result = original(*args, **kwargs)
        # Every adapter, and a KVStore, loads this.
        if "perseus.basics" not in sys.modules and getattr(module, "get_rank")() == 0:  # noqa: B009
            import warnings

            warnings.warn(_NOTICE, stacklevel=2)
        return result

    setattr(module, "init_process_group", init_process_group)  # noqa: B010

"""The import hook under which `import horovod.…` finds Perseus.

Only install() changes anything, and nothing but a script's or a user's own wish calls it: an
installed Horovod is never hidden behind anybody's back. The import system's locks make it
thread-safe.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

from perseus.compat.names import MODULES

_ROOT = "horovod"


def install() -> None:
    """Make `horovod` mean Perseus in this process, even if a Horovod is installed.

    Does nothing the second time. ImportError when another Horovod is imported already.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    other = sys.modules.get(_ROOT)
    if other is not None:
        raise ImportError(
            f"[compat] horovod is already imported, from {getattr(other, '__file__', '?')}; "
            f"import perseus.compat.horovod before it"
        )
    sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The alias of a module in the table; ImportError for others of Horovod's."""
        if fullname.partition(".")[0] != _ROOT:
            return None
        if fullname not in MODULES:
            raise ModuleNotFoundError(
                f"No module named {fullname!r}: Perseus has no counterpart of it "
                f"(docs/migration.md lists what there is)",
                name=fullname,
            )
        real = MODULES[fullname]
        if real is not None and not _exists(real):
            raise ModuleNotFoundError(
                f"No module named {fullname!r}: it is {real}, which Perseus does not have yet",
                name=fullname,
            )
        is_package = any(name.startswith(f"{fullname}.") for name in MODULES)
        return ModuleSpec(fullname, _Alias(real), is_package=is_package)


class _Alias(Loader):
    """Puts Perseus' own module into sys.modules under Horovod's name.

    The same module, not a copy: there is one state, one set of classes, and whatever a script or
    test replaces in it is replaced for Perseus too.
    """

    def __init__(self, real: str | None) -> None:
        self._real = real

    def exec_module(self, module: ModuleType) -> None:
        """Swap the empty module of the import system for the real one."""
        if self._real is None:
            return
        real = import_module(self._real)
        spec = module.__spec__
        assert spec is not None
        if spec.submodule_search_locations is not None and not hasattr(real, "__path__"):
            real.__path__ = []  # else the import system does not look for modules in it
        sys.modules[spec.name] = real


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError as error:  # of a package that it would be in
        # A framework that is missing: importing the module says how to install it.
        return not str(error.name).startswith("perseus")

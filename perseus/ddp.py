"""Lets scripts for torch.distributed run on Perseus: `import perseus` above them is all they need.

Process groups that ask for gloo, nccl or no backend get the backend "perseus", and a script that
mpirun, srun or perseusrun has started is given the variables of torch's launcher. Scripts that use
another interface of Perseus, or import this backend by name, keep what they ask for. This module
waits for the script to import torch. Belongs to the main thread.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import wraps
from importlib import import_module
from inspect import signature
from types import ModuleType
from typing import Any, ClassVar

from perseus import ddp_libraries, ddp_numbers

_DISTRIBUTED = "torch.distributed"
# Where every process group is made, whichever name the script has imported. Not public in torch.
_MAKER = "_new_process_group_helper"
_HANDLERS = "_rendezvous_handlers"
_OURS = "perseus.torch.distributed"
_OLDEST = (2, 13)


class _Script:
    """What is known of the script of this process."""

    is_for_ddp: bool | None = None  # None: not known before its first process group
    has_group = False
    is_for_horovod = False
    asked_for: ClassVar[dict[str, str]] = {}  # backends by those that have taken their places


def watch() -> None:
    """Redirect the process groups that are made from now on."""
    for name, follow in _FOLLOWED.items():
        module = sys.modules.get(name)
        if module is None:
            _Finder.awaited[name] = follow
        else:
            follow(module)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def redirect_always() -> None:
    """Redirect even though the script imports other parts of Perseus, too."""
    _Script.is_for_ddp = True


def expect_horovod() -> None:
    """Let a script that imports Horovod look for its rank as it would there."""
    _Script.is_for_horovod = True
    if _Script.is_for_ddp is None:
        ddp_numbers.hide()


def keep_out() -> None:
    """Let a script be whose first use of Perseus is another interface; all of them call this."""
    if _Script.is_for_ddp is None:
        _Script.is_for_ddp = False
        ddp_numbers.hide()


def _redirects() -> bool:
    if _Script.is_for_ddp is None:
        _Script.is_for_ddp = True
    return _Script.is_for_ddp


class _Finder:
    """Finds the modules that are awaited, each once, as the import system would."""

    awaited: ClassVar[dict[str, Callable[[ModuleType], None]]] = {}

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """The module's own spec, whose loader is followed; None for one that is not awaited."""
        follow = self.awaited.pop(fullname, None)
        if follow is None:
            return None
        from importlib.util import find_spec

        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            follow(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _follow(distributed: ModuleType) -> None:
    """Wrap what torch calls for a new process group; torch may be built without it."""
    c10d = sys.modules.get(f"{_DISTRIBUTED}.distributed_c10d")
    if c10d is None:
        return
    maker = getattr(c10d, _MAKER, None)
    handlers = getattr(sys.modules.get(f"{_DISTRIBUTED}.rendezvous"), _HANDLERS, {})
    if maker is None or "env" not in handlers:
        _say("this version of torch cannot be redirected: use init_process_group('perseus')")
        return
    if hasattr(maker, "__wrapped__"):
        return
    setattr(c10d, _MAKER, _redirecting(maker))
    follow_rendezvous()
    if _Script.is_for_ddp is not False and not _Script.is_for_horovod and _loads_backend():
        ddp_numbers.show()
    if getattr(distributed, "is_initialized")():  # noqa: B009 - mypy knows no such attribute
        _say("the process group was there before `import perseus`, and stays as it is")


def _loads_backend() -> bool:
    """Whether this torch has what the backend, and what prepares its ranks, import."""
    return hasattr(sys.modules.get("torch._C._distributed_c10d"), "ErrorType")


def follow_rendezvous() -> None:
    """Give scripts the variables of torch's launcher when they make their first process group."""
    handlers = getattr(sys.modules.get(f"{_DISTRIBUTED}.rendezvous"), _HANDLERS, {})
    handler = handlers.get("env")
    if handler is not None and not hasattr(handler, "__wrapped__"):
        handlers["env"] = _with_environment(handler)


def _redirecting(maker: Callable[..., Any]) -> Callable[..., Any]:
    parameters = signature(maker)

    @wraps(maker)
    def make(*args: Any, **kwargs: Any) -> Any:
        given = parameters.bind(*args, **kwargs)
        if _redirects():
            backend, said = _backend_for(str(given.arguments["backend"]))
            if said and not _Script.has_group and given.arguments["group_rank"] == 0:
                _say(said)
            _Script.has_group = True
            _Script.asked_for.setdefault(backend, str(given.arguments["backend"]))
            given.arguments["backend"] = backend
        return maker(*given.args, **given.kwargs)

    return make


def _backend_for(asked: str) -> tuple[str, str]:
    """Return the backend that a process group gets, and what there is to say about it.

    Looks at the version first: old versions of torch lack what the backend itself needs.
    """
    version: str = getattr(sys.modules["torch"], "__version__")  # noqa: B009 - no such attribute
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST and "perseus" not in asked:
        shown = "PyTorch's own backend" if asked == "undefined" else f'"{asked}"'
        needed = ".".join(map(str, _OLDEST))
        return asked, f"{shown} stays, because torch {version} is older than {needed}"
    chosen: tuple[str, str] = import_module(f"{_OURS}.redirect").backend_for(asked)
    return chosen


def _with_environment(handler: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    @wraps(handler)
    def rendezvous(url: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
        redirects = _redirects() and _loads_backend()
        # A script that gives its rank knows its world, which may not be the launcher's.
        if ddp_numbers.are_given(url) or (not redirects and _OURS not in sys.modules):
            return handler(url, *args, **kwargs)
        launched = import_module(f"{_OURS}.launched")
        in_elastic_job = launched.is_in_elastic_job()
        lacks = launched.is_free_to_fill if in_elastic_job else launched.lacks_what_a_launcher_knows
        if redirects or lacks():
            launched.fill_environment()
        if in_elastic_job and launched.is_filled_for_world():
            handed: Iterator[Any] = launched.rendezvous(*args, **kwargs)
            return handed
        return handler(url, *args, **kwargs)

    return rendezvous


def _fill_environment() -> bool:
    """Set torch's variables if that is for us to do. Return whether they are Perseus'."""
    if not (_redirects() and _loads_backend()):
        return False
    filled: bool = import_module(f"{_OURS}.launched").fill_for_who_looks_early()
    return filled


def _asked_for(backend: str) -> str:
    return _Script.asked_for.get(backend, backend)


_FOLLOWED: dict[str, Callable[[ModuleType], None]] = {
    _DISTRIBUTED: _follow,
    **ddp_libraries.followed(_fill_environment, _asked_for),
}


def _say(text: str) -> None:
    print(f"[perseus] torch.distributed: {text} (docs/ddp.md)", file=sys.stderr, flush=True)

"""Runs a Python program as `python` itself would, in this process: script, -m module or -c code.

Processes that the program makes with multiprocessing's spawn or forkserver begin by importing the
program's main module again; they do so by way of perseus.compat.horovod, so that `import horovod`
finds Perseus there too, or of perseus.compat.ddp. What the program is reaches them with the name of
the module that they are to import (_EntryName). One thread.
"""

from __future__ import annotations

import io
import os
import runpy
import sys
from collections.abc import Sequence
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import Any

from perseus.compat.names import MODULES

_USAGE = "usage: python -m {entry} (SCRIPT | -m MODULE | -c CODE) [ARGUMENTS ...]"


class _EntryName(str):
    """The name of the entry module, with what the program's main module is.

    multiprocessing pickles the name of the main module for worker processes; importlib hands the
    object on as the name of the module that they import.
    """

    __slots__ = ("main",)

    main: str  # "script:PATH", "module:NAME" or ""

    def __new__(cls, entry: str, main: str) -> _EntryName:
        """The name `entry`."""
        name = super().__new__(cls, entry)
        name.main = main
        return name

    def __reduce__(self) -> tuple[type[_EntryName], tuple[str, str]]:
        """For pickle: what makes an equal one."""
        return _EntryName, (str(self), self.main)


class _MainSpec(ModuleSpec):
    """Has worker processes import the entry module, which then loads the real main module."""

    def __init__(self, name: _EntryName, package: str) -> None:
        super().__init__(name, None)
        self._package = package

    @property
    def parent(self) -> str:
        """The package that relative imports of the main module start from."""
        return self._package


def run(arguments: Sequence[str], entry: str) -> None:
    """Run what would follow `python` on a command line; SystemExit with usage where none can be.

    entry: the name of the module that calls this when it is run by `python -m`.
    """
    if not arguments:
        raise _usage_error(
            entry,
            "no program; a program that starts its own ranks does not start them so: use torchrun "
            "or another launcher",
        )
    kind, *rest = arguments
    if kind in ("-h", "--help"):
        print(_USAGE.format(entry=entry))
    elif kind in ("-c", "-m") and rest:
        (_run_code if kind == "-c" else _run_module)(entry, rest[0], rest[1:])
    elif kind.startswith("-"):
        raise _usage_error(entry, f"no such option, or incomplete: {kind}")
    else:
        _run_script(entry, kind, rest)


def _usage_error(entry: str, what: str) -> SystemExit:
    return SystemExit(f"{entry}: error: {what}\n{_USAGE.format(entry=entry)}")


def main_namespace(entry: str) -> dict[str, Any]:
    """In a worker process: what the program's main module defines, loaded as `__mp_main__`.

    entry: the name under which the entry module was imported.
    Without `__spec__`: the entry module's own has the worker's workers begin like itself.
    """
    kind, _, name = getattr(entry, "main", "").partition(":")
    names: dict[str, Any] = {}
    if kind == "script":
        names = runpy.run_path(name, run_name="__mp_main__")
    elif kind == "module" and not name.endswith(".__main__"):  # as multiprocessing has it
        names = runpy.run_module(name, run_name="__mp_main__", alter_sys=True)
    names.pop("__spec__", None)
    return names


def _run_script(entry: str, path: str, arguments: list[str]) -> None:
    try:
        with io.open_code(os.path.abspath(path)) as file:
            source = file.read()
    except OSError as error:
        raise SystemExit(f"{entry}: error: {path}: {error.strerror}") from None
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    sys.argv = [path, *arguments]
    file_name = os.path.abspath(path)
    main = _main_module(entry, f"script:{file_name}", "", file_name)
    main.__loader__ = SourceFileLoader("__main__", file_name)
    _execute(compile(source, file_name, "exec", dont_inherit=True), main)


def _run_module(entry: str, name: str, arguments: list[str]) -> None:
    name = MODULES.get(name) or name
    spec = find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = find_spec(f"{name}.__main__")
    code = (
        spec.loader.get_code(spec.name) if spec and isinstance(spec.loader, InspectLoader) else None
    )
    if spec is None or code is None:
        raise SystemExit(f"{entry}: error: no module named {name} that can be run")
    sys.argv = [spec.origin or name, *arguments]
    main = _main_module(entry, f"module:{spec.name}", spec.parent or "", spec.origin or "")
    main.__package__ = spec.parent
    main.__loader__ = spec.loader
    _execute(code, main)


def _run_code(entry: str, text: str, arguments: list[str]) -> None:
    _set_first_path("")
    sys.argv = ["-c", *arguments]
    main = _main_module(entry, "", "")
    _execute(compile(text, "<string>", "exec", dont_inherit=True), main)


def _set_first_path(directory: str) -> None:
    """`python -m` has put the current directory there, unless told to put nothing."""
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):
        sys.path[0] = directory


def _main_module(
    entry: str, program: str, package: str, file_name: str | None = None
) -> ModuleType:
    main = ModuleType("__main__")
    main.__spec__ = _MainSpec(_EntryName(entry, program), package)
    if file_name is not None:
        main.__file__ = file_name
    return main


def _execute(code: CodeType, main: ModuleType) -> None:
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    exec(code, main.__dict__)

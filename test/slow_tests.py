"""Tells from the code of a test whether it takes long: whether it starts processes of its own.

Loading a framework in a fresh interpreter, or starting an MPI or virtual hosts, costs seconds each
time. The checks on two ranks cost one launch for all of them, and perseusrun with commands that
load nothing costs a fraction of a second. Reads code only; no state.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

# Whether this is the second of two runs, with another PyTorch, that share tests.
OTHER_HALF = "PERSEUS_TEST_OTHER_HALF" in os.environ
_TESTS = str(Path(__file__).parent)
_STARTERS = {"subprocess", "perseus.bench.virtual_hosts"}
_QUICK_STARTERS = {"perseusrun_command"}


def is_slow(item: pytest.Function) -> bool:
    if "expect_check" in item.fixturenames:
        return bool(item.callspec.params["ranks"] != 2)
    fixtures = item._fixtureinfo.name2fixturedefs
    used = [fixtures[name][-1].func for name in item.fixturenames if name in fixtures]
    seen: set[int] = set()
    return any(_starts(thing, seen) for thing in (item.function, *used))


def _starts(thing: Any, seen: set[int]) -> bool:
    """Whether a function, or what it uses of the tests' own code, starts processes."""
    if id(thing) in seen:
        return False
    seen.add(id(thing))
    module = thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", None)
    if module in _STARTERS:
        return True
    if module in _QUICK_STARTERS or not _is_ours(thing):
        return False
    if isinstance(thing, type):
        return any(_starts(method, seen) for method in vars(thing).values())
    return any(_starts(used, seen) for used in _used(thing))


def _is_ours(thing: Any) -> bool:
    if not isinstance(thing, type | FunctionType):
        return False
    try:
        return inspect.getfile(thing).startswith(_TESTS)
    except (OSError, TypeError):
        return False


def _used(function: FunctionType) -> Iterator[Any]:
    """What the names in a function's code stand for, also behind `module.`."""
    names = set(_names(function.__code__))
    found = [function.__globals__[name] for name in names if name in function.__globals__]
    yield from found
    for module in found:
        if isinstance(module, ModuleType):
            yield from (vars(module)[name] for name in names if name in vars(module))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)

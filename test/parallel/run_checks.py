"""Runs on every rank: check_* functions of modules, in order; results go to DIR/MODULE-RANK.json.

    perseusrun -np 2 python run_checks.py DIR collective_checks form_checks

Every module gets an init and a shutdown of its own, and the environment it changed is restored. A
failed check ends the rank, since the others' collectives would wait for it: perseusrun then ends
the rest, and the checks that follow count as not run.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
# The examples' models are trained by checks too.
TEST = HERE.parent
sys.path[:0] = [
    str(HERE / "checks"),
    str(TEST / "with_tensorflow" / "checks"),
    str(TEST / "with_mxnet" / "checks"),
    str(TEST.parent / "examples"),
]


def checks_of(module: ModuleType) -> dict[str, Callable[[], None]]:
    """The module's checks by name, in the order they are written."""
    found = inspect.getmembers(module, inspect.isfunction)
    own = [item for item in found if item[0].startswith("check_")]
    return dict(sorted(own, key=lambda item: item[1].__code__.co_firstlineno))


def main(directory: str, *modules: str) -> int:
    from perseus import basics, control
    from perseus.errors import HorovodInternalError

    for module_name in modules:
        environment = dict(os.environ)
        module = importlib.import_module(module_name)
        basics.init()
        path = Path(directory) / f"{module_name}-{basics.rank()}.json"
        results: dict[str, str] = {}
        for name, check in checks_of(module).items():
            try:
                check()
                results[name] = ""
            except BaseException:
                results[name] = traceback.format_exc()
            path.write_text(json.dumps(results), encoding="utf-8")
            if results[name]:
                print(results[name], file=sys.stderr, flush=True)
                return 1
        # A check may be about this rank alone: nobody ends the world while another is still at it.
        if basics.is_initialized():
            with contextlib.suppress(HorovodInternalError):  # of a world that a check has broken
                control.gather_lines("", "end of checks")
        basics.shutdown()
        os.environ.clear()
        os.environ.update(environment)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Runs pytest on one rank: the checks named in DIRECTORY/checks, together with the other ranks.

    perseusrun -np 2 python test/ranks/on_rank.py DIRECTORY

Every module gets a world of its own, and the environment that it changed is restored. Where a
check fails on a rank, that rank leaves the world, which ends what the others wait for; then all of
them meet in a new world for the checks that follow. Ranks that do not get there in time end the
launch (lockstep.py).
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

TEST = Path(__file__).resolve().parents[1]
FOLDERS = ("ranks", "parallel", "with_tensorflow", "with_mxnet")
CHECKS = [TEST / folder / "checks" for folder in FOLDERS]
# The examples' models are trained by checks too.
PATHS = [*map(str, CHECKS), str(TEST), str(TEST.parent / "examples")]


class OnRank:
    """The plugin that gives each module a world and keeps this rank in step with the others."""

    def __init__(self, directory: Path, wanted: dict[str, list[str]]) -> None:
        from ranks.lockstep import Step

        self._wanted = wanted
        self._step = Step(directory, int(os.environ["PERSEUS_RANK"]))
        self._environment: dict[str, str] = {}

    def pytest_configure(self) -> None:
        """What checks share shows values where it asserts, as they do."""
        for folder in CHECKS:
            pytest.register_assert_rewrite(*(file.stem for file in folder.glob("*.py")))

    def pytest_collection_modifyitems(self, items: list[pytest.Function]) -> None:
        items[:] = [item for item in items if item.name in self._wanted[item.path.stem]]

    @pytest.fixture(scope="module", autouse=True)
    def _world(self, request: pytest.FixtureRequest) -> Iterator[None]:
        """The module's world, with the variables in its SETTINGS if it has any."""
        from worlds import leave_world

        from perseus import basics, control
        from perseus.errors import HorovodInternalError

        before = dict(os.environ)
        os.environ.update(getattr(request.module, "SETTINGS", {}))
        self._environment = dict(os.environ)
        basics.init()
        self._show_stacks_later()
        yield
        # A check may be about this rank alone: nobody ends the world while another is still at it.
        if basics.is_initialized():
            with contextlib.suppress(HorovodInternalError):  # of a world that a check has broken
                control.gather_lines("", "end of checks")
        leave_world()
        _set_environment(before)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Function, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.when == "call":
            self._end(f"{item.path.stem}::{item.name}", report)
        elif report.failed:  # to join or to leave a world
            self._stop(report.longreprtext)
        return report

    def _end(self, check: str, report: pytest.TestReport) -> None:
        """Report the check, and meet the others in a new world if it failed on a rank."""
        from perseus import basics

        error = report.longreprtext if report.failed else ""
        skipped = report.longreprtext if report.skipped else ""
        self._step.report(check, basics._world.epoch, error, skipped)
        if error:
            basics.shutdown()  # only now: what this causes elsewhere is reported later
        answer = self._everyone()
        if answer["failed"]:
            basics.shutdown()
            _set_environment(self._environment)
            # Ranks may have made different numbers of worlds by then.
            basics._world.epoch = answer["epoch"]
            basics.init()
        self._show_stacks_later()

    def _show_stacks_later(self) -> None:
        """A check that keeps others waiting shows where it is, before it is given up."""
        from ranks.lockstep import PATIENCE

        faulthandler.dump_traceback_later(0.8 * PATIENCE)

    def _everyone(self) -> dict[str, int]:
        answer = self._step.everyone()
        if "abandoned" in answer:
            self._stop(answer["abandoned"])
        return answer

    def _stop(self, why: str) -> None:
        """End this rank, and with it the launch, without waiting for anything."""
        print(why, file=sys.stderr, flush=True)
        os._exit(1)


def _set_environment(environment: dict[str, str]) -> None:
    """Restore these variables, but for the one that pytest sets and removes itself."""
    name = "PYTEST_CURRENT_TEST"
    current = os.environ.get(name)
    os.environ.clear()
    os.environ.update(environment)
    if current is not None:
        os.environ[name] = current


def main(name: str) -> int:
    directory = Path(name)
    wanted = json.loads((directory / "checks").read_text(encoding="utf-8"))
    found = {file.stem: str(file) for folder in CHECKS for file in folder.glob("*_checks.py")}
    sys.path[:0] = PATHS
    os.environ.pop("PYTEST_ADDOPTS", None)
    settings = ["-c", str(Path(__file__).with_name("checks.ini")), "--rootdir", str(TEST)]
    return pytest.main([*settings, *map(found.get, wanted)], [OnRank(directory, wanted)])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Fixtures of the tests that start ranks, whatever the framework; a conftest.py imports them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ranks.launch import Launch, run_ranks


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Whatever test comes first waits for a whole launch, which has a time limit of its own."""
    for item in items:
        if "expect_check" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(3600))


@pytest.fixture(name="run_ranks")
def _run_ranks() -> Callable[..., tuple[int, str]]:
    """run_ranks(ranks, command) -> (status, output)."""
    return run_ranks


@pytest.fixture(scope="session")
def expect_check(request: pytest.FixtureRequest) -> Callable[[str, str, int], None]:
    """expect_check(module, check, ranks): it passes on every rank.

    What is asked for first starts all checks that this session selects on so many ranks, in one
    launch: most of a launch is importing the framework. Where that ends early, another one runs
    the modules it did not get to.
    """
    wanted: dict[int, dict[str, list[str]]] = {}
    for item in request.session.items:
        selected = item.callspec.params if hasattr(item, "callspec") else {}
        if {"module", "check", "ranks"} <= selected.keys() and "expect_check" in item.fixturenames:
            modules = wanted.setdefault(selected["ranks"], {})
            modules.setdefault(selected["module"], []).append(selected["check"])
    done: dict[tuple[str, int], Launch] = {}

    def expect(module: str, check: str, ranks: int) -> None:
        while (module, ranks) not in done:
            rest = {name: of for name, of in wanted[ranks].items() if (name, ranks) not in done}
            launch = Launch(rest, ranks)
            done.update({(name, ranks): launch for name in launch.modules})
        done[module, ranks].expect(module, check)

    return expect

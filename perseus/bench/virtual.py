"""Finds the tool that makes several hosts of one, in the source checkout. One thread."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

_TOOL = Path(__file__).resolve().parents[2] / "test" / "hosts" / "virtual_hosts.py"


class HostsUnavailableError(Exception):
    """Virtual hosts cannot be made; one line that says why."""


def load() -> Any:
    """The module test/hosts/virtual_hosts.py; HostsUnavailableError where it is of no use."""
    if not _TOOL.is_file():
        raise HostsUnavailableError(
            "--hosts needs a source checkout: virtual hosts are made by test/hosts/virtual_hosts.py"
        )
    name = "virtual_hosts"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, _TOOL)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # before it runs: its dataclasses look for their module
        spec.loader.exec_module(module)
    tool: Any = sys.modules[name]
    if reason := tool.unavailable():
        raise HostsUnavailableError(reason)
    return tool

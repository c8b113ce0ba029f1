"""A module behind one whose launch has ended early."""

from __future__ import annotations

from perseus import basics, control


def check_another_launch_runs_it() -> None:
    assert len(control.gather_lines("", "here")) == basics.size()

"""Runs an example in the process of a check, and looks at what it learned."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from types import ModuleType

import numpy as np

from perseus import basics, control


def run(example: ModuleType, *arguments: str) -> tuple[list, str]:
    """What its main() returns and prints when the command line has these arguments."""
    usual = sys.argv
    sys.argv = [example.__name__, *arguments]
    try:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            result = example.main()
    finally:
        sys.argv = usual
    return result, output.getvalue()


def assert_accuracy(printed: str, least: float) -> None:
    found = re.findall(r"test accuracy: (\d\.\d+)", printed)
    assert len(found) == (1 if basics.rank() == 0 else 0), printed
    assert all(float(accuracy) >= least for accuracy in found), printed


def expect_accuracy(example: ModuleType, least: float, *arguments: str) -> None:
    """Rank 0, and only that, says one; and the weights that main() returns have equal bits."""
    weights, printed = run(example, *arguments)
    basics.init()  # the example has ended its world
    assert_accuracy(printed, least)
    assert weights
    for index, array in enumerate(weights):
        everybody = control.gather_bytes(np.asarray(array).tobytes(), f"weights.{index}", 0)
        assert len(set(everybody)) == 1, f"{example.__name__}: {index}"

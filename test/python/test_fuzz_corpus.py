"""The inputs that the fuzzers of Python's parsers have found, and a short search from there."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from parsers import TARGETS

FUZZ = Path(__file__).parents[1] / "fuzz"
CORPUS = FUZZ / "corpus"
RUNS = 3000


@pytest.mark.parametrize("target", TARGETS)
def test_inputs_that_were_found(target: str) -> None:
    inputs = list((CORPUS / target).iterdir())
    assert inputs
    for each in inputs:
        TARGETS[target](each.read_bytes())


@pytest.mark.skipif(find_spec("atheris") is None, reason="atheris has no wheel for this platform")
@pytest.mark.parametrize("target", TARGETS)
def test_inputs_near_them(target: str, tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(FUZZ / "fuzz_parsers.py"),
        f"--target={target}",
        f"-runs={RUNS}",
        "-seed=1",
    ]
    command += [f"-artifact_prefix={tmp_path}/", str(CORPUS / target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"Done {RUNS} runs" in done.stderr

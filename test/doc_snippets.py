"""The Python snippets of the documentation, run as they are on 2 ranks. Thread-safe."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from ranks.launch import run_ranks

ROOT = Path(__file__).resolve().parents[1]
# README.md's scripts train for three epochs and show the loss of each, as Keras does, too.
_LOSS = re.compile(r"\bloss:? (\d+\.\d+)")
# Parameters of `outputs`: most of a launch is importing the framework, and one serves them all.
WAYS = ["together", pytest.param("alone", marks=pytest.mark.full)]
_MOST_SECONDS = 400.0  # less than pytest gives a test with its fixtures
_IN_TURN = """
import pathlib, runpy, sys
from perseus import basics
for number in range({}):
    runpy.run_path(str(pathlib.Path(__file__).with_name(f"{{number}}.py")), run_name="__main__")
    basics.shutdown()  # so that the next one misses an init() that it lacks
    for stream in (sys.stdout, sys.stderr):
        print("end of script", number, file=stream, flush=True)
"""


def snippets(page: str, module: str) -> list[str]:
    """The snippets of a page that import a module, in order; there is at least one."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text("utf-8"), re.M | re.S)
    found = [block for block in blocks if re.search(rf"^(import|from) {module}\b", block, re.M)]
    assert found, f"{page}: no snippet imports {module}"
    return found


def outputs(way: str, scripts: Mapping[str, str], folder: Path) -> dict[str, str]:
    """What each script prints by its name, in ranks of its own or after the others before it."""
    names = list(scripts)
    found: dict[str, str] = {}
    for group in [names] if way == "together" else [[name] for name in names]:
        found.update(zip(group, _in_turn([scripts[name] for name in group], folder), strict=True))
    return found


def _in_turn(scripts: Sequence[str], folder: Path) -> list[str]:
    for number, script in enumerate(scripts):
        (folder / f"{number}.py").write_text(script, encoding="utf-8")
    launched = folder / "0.py"
    if len(scripts) > 1:
        launched = folder / "in_turn.py"
        launched.write_text(_IN_TURN.format(len(scripts)), encoding="utf-8")
    status, output = run_ranks(
        2, [sys.executable, str(launched)], timeout=min(120.0 * len(scripts), _MOST_SECONDS)
    )
    assert status == 0, output
    if len(scripts) == 1:
        return [output]
    parts = [""] * (len(scripts) + 1)
    ended: dict[str, int] = {}
    for line in output.splitlines(keepends=True):
        stream = line.partition(":")[0]  # [RANK]<stdout>
        parts[ended.setdefault(stream, 0)] += line
        ended[stream] += "end of script" in line
    assert parts.pop() == "", output
    return parts


def assert_trained(output: str) -> None:
    """What a script of README.md has printed: one loss per epoch, by rank 0, that falls by half."""
    losses = [float(loss) for loss in _LOSS.findall(output)]
    assert len(losses) == 3, output
    assert losses[2] < losses[0] / 2, output

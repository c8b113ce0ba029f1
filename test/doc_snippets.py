"""The Python snippets of the documentation, as programs. Pure, thread-safe."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# README.md's scripts train for three epochs and show the loss of each, as Keras does, too.
_LOSS = re.compile(r"\bloss:? (\d+\.\d+)")


def snippets(page: str, module: str) -> list[str]:
    """The snippets of a page that import a module, in order; there is at least one."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text("utf-8"), re.M | re.S)
    found = [block for block in blocks if re.search(rf"^(import|from) {module}\b", block, re.M)]
    assert found, f"{page}: no snippet imports {module}"
    return found


def assert_trained(output: str) -> None:
    """What a script of README.md has printed: one loss per epoch, by rank 0, that falls by half."""
    losses = [float(loss) for loss in _LOSS.findall(output)]
    assert len(losses) == 3, output
    assert losses[2] < losses[0] / 2, output

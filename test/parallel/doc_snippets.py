"""The Python snippets of the documentation, as programs. Pure, thread-safe."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def snippets(page: str, module: str) -> list[str]:
    """The snippets of docs/<page> that import a module, in order; there is at least one."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text("utf-8"), re.M | re.S)
    found = [block for block in blocks if re.search(rf"^(import|from) {module}\b", block, re.M)]
    assert found, f"docs/{page}: no snippet imports {module}"
    return found

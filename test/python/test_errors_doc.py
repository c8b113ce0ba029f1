"""docs/errors.md quotes messages that exist: what it says in code marks is in the sources."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Literals that the compiler joins, and what is put between two of them at run time.
JOINT = re.compile(r'"\s*(?:\\\s*)?[fr]?"')


def messages_of_the_sources() -> str:
    patterns = {"common": "*.[ch]*", "frameworks": "*.[ch]*", "perseus": "*.py"}
    files = [
        path for folder, pattern in patterns.items() for path in (ROOT / folder).rglob(pattern)
    ]
    return "\n".join(JOINT.sub("", path.read_text(encoding="utf-8")) for path in sorted(files))


def quoted_rows() -> list[tuple[str, list[str]]]:
    """(row, fixed parts of its message) for each row of a table of messages."""
    text = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    rows = []
    for section in re.split(r"^## Messages", text, flags=re.MULTILINE)[1:]:
        for line in section.splitlines():
            if line.startswith("| `"):
                message = line.split(" | ", maxsplit=1)[0]
                quotes = re.findall(r"`([^`]*)`", message)
                parts = [part.strip() for quote in quotes for part in quote.split("…")]
                rows.append((message, [part for part in parts if len(part) > 3]))
    return rows


def test_there_are_rows_to_look_at() -> None:
    assert len(quoted_rows()) > 20
    assert all(parts for _, parts in quoted_rows())


@pytest.mark.parametrize(("row", "parts"), quoted_rows(), ids=lambda value: str(value)[:50])
def test_a_documented_message_exists(row: str, parts: list[str]) -> None:
    sources = messages_of_the_sources()
    for part in parts:
        assert part in sources, f"{row}: nothing says {part!r}"

"""Writes what start_bench printed as a table between the markers of a page.

start_bench > start.jsonl
python benchmarks/start_table.py start.jsonl benchmarks/README.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- start:begin -->", "<!-- start:end -->"
WAYS = {
    "threads": "threads of one process, in memory",
    "processes": "processes without Python, shared memory",
    "processes tcp": "processes without Python, TCP",
}


def main(source: str, page: str) -> int:
    """Read JSON lines, rewrite the page; 2 if it lacks the markers."""
    records = [json.loads(line) for line in Path(source).read_text(encoding="utf-8").splitlines()]
    text = Path(page).read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        print(f"{page} lacks the markers {BEGIN} and {END}", file=sys.stderr)
        return 2
    Path(page).write_text(f"{before}{BEGIN}\n{table(records)}\n{END}{after}", encoding="utf-8")
    return 0


def table(records: list[dict[str, Any]]) -> str:
    """A row for each way of running ranks."""
    rows = [
        "| ranks | as | seconds to initialise | fastest | slowest | n |",
        "|---|---|---|---|---|---|",
    ]
    for record in records:
        times = (record["median_s"], record["min_s"], record["max_s"])
        shown = " | ".join(f"{seconds:.3f}" for seconds in times)
        rows.append(f"| {record['ranks']} | {WAYS[record['way']]} | {shown} | {record['n']} |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

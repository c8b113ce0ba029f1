"""Draws what negotiation_bench printed, and prints it as a Markdown table.

negotiation_bench > negotiation.jsonl
python benchmarks/plot_negotiation.py negotiation.jsonl docs/negotiation.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

COLOURS = {
    "perseus": "#d1495b",
    "perseus with data": "#e0a030",
    "perseus offline": "#4f8f5b",
    "coordinator": "#33658a",
    "schedule": "#5f6b6d",
}


def main(source: str, picture: str) -> int:
    """Read JSON lines, write the picture, print the table."""
    lines = Path(source).read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    print(table(records))
    draw(records, picture)
    return 0


def table(records: list[dict[str, Any]]) -> str:
    """A row for each number of ranks. Times are what a step takes longer than its backward pass."""
    found = {(record["contender"], record["ranks"]): record for record in records}
    rows = [
        "| ranks | rounds a step | messages of a rank and round | longer by | with data "
        "| offline: messages a step | longer by "
        "| coordinator: rounds | messages of rank 0 and round | longer by | schedule alone |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for ranks in sorted({record["ranks"] for record in records}):
        ours, other = found["perseus", ranks], found["coordinator", ranks]
        data = found.get(("perseus with data", ranks))
        offline = found.get(("perseus offline", ranks))
        rows.append(
            f"| {ranks} | {ours['rounds']:.1f} | {ours['messages'] / max(ours['rounds'], 1):.0f} | "
            f"{_over(ours)} | {_over(data) if data else ''} | "
            f"{offline['messages'] if offline else ''} | {_over(offline) if offline else ''} | "
            f"{other['rounds']:.1f} | "
            f"{other['messages'] / max(other['rounds'], 1):.0f} | {_over(other)} | "
            f"{_over(found['schedule', ranks])} |"
        )
    return "\n".join(rows)


def _over(record: dict[str, Any]) -> str:
    return f"{(record['median_s'] - record['backward_s']) * 1e3:.1f} ms"


def draw(records: list[dict[str, Any]], picture: str) -> None:
    """Left: time over the backward pass; right: messages of the busiest rank in a step."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (times, messages) = pyplot.subplots(1, 2, figsize=(10.4, 3.8))
    for name, colour in COLOURS.items():
        points = sorted((r["ranks"], r) for r in records if r["contender"] == name)
        ranks = [rank for rank, _ in points]
        style = {"color": colour, "marker": "o", "markersize": 3.5, "label": name}
        times.loglog(ranks, [(r["median_s"] - r["backward_s"]) * 1e3 for _, r in points], **style)
        if name in ("perseus", "coordinator"):
            messages.loglog(ranks, [r["messages"] for _, r in points], **style)
    times.set_ylabel("step beyond its backward pass (ms)")
    messages.set_ylabel("messages of the busiest rank in a step")
    sizes = sorted({record["ranks"] for record in records})
    for axes in (times, messages):
        axes.set_xlabel("ranks (threads of one process)")
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.grid(True, which="major", alpha=0.3)
        axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(picture, dpi=130)
    pyplot.close(figure)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))

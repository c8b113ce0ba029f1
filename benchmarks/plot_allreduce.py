"""Draws what allreduce_bench printed beside the arithmetic, and prints it as a Markdown table.

allreduce_bench tcp 4,8 > allreduce.jsonl
python benchmarks/plot_allreduce.py allreduce.jsonl docs/allreduce.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

COLOURS = {
    "pairwise": "#d1495b",
    "halving_doubling": "#33658a",
    "recursive_doubling": "#3a7d44",
    "ring": "#e0a030",
}
Times = dict[tuple[int, int, str], dict[str, float]]  # records by ranks, bytes, algorithm


def main(source: str, picture: str) -> int:
    """Read JSON lines, write the picture, print the table."""
    lines = Path(source).read_text(encoding="utf-8").splitlines()
    measured: Times = {}
    arithmetic: Times = {}
    for record in map(json.loads, lines):
        times = arithmetic if record["transport"] == "arithmetic" else measured
        times[record["ranks"], record["bytes"], record["algorithm"]] = record
    print(table(measured))
    draw(measured, arithmetic, picture)
    return 0


def table(measured: Times) -> str:
    """Median times of pairwise and ratios to it, a row for each number of ranks and size."""
    names = [name for name in COLOURS if name != "pairwise"]
    rows = [
        f"| ranks | bytes | pairwise | {' | '.join(names)} |",
        "|---|---|---|" + "---|" * len(names),
    ]
    for ranks, size in sorted({key[:2] for key in measured}):
        seconds = measured[ranks, size, "pairwise"]["median_s"]
        ratios = [f"{measured[ranks, size, name]['vs_pairwise']:.2f}" for name in names]
        rows.append(f"| {ranks} | {size} | {seconds * 1e3:.2f} ms | {' | '.join(ratios)} |")
    return "\n".join(rows)


def draw(measured: Times, arithmetic: Times, picture: str) -> None:
    """Above: measured. Below: what the cost model says, of more ranks, too."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    rows = [("measured", measured, "o"), ("arithmetic", arithmetic, "")]
    columns = max(len({key[0] for key in times}) for _, times, _ in rows)
    figure, axes = pyplot.subplots(2, columns, figsize=(3.9 * columns, 6.6), squeeze=False)
    for row, (title, times, marker) in zip(axes, rows, strict=True):
        numbers = sorted({key[0] for key in times})
        for panel in row[len(numbers) :]:
            panel.axis("off")
        for panel, ranks in zip(row, numbers, strict=False):
            for name, colour in COLOURS.items():
                points = sorted(
                    (key[1], record["vs_pairwise"])
                    for key, record in times.items()
                    if key[::2] == (ranks, name)
                )
                sizes, ratios = zip(*points, strict=True)
                style = {"color": colour, "marker": marker, "markersize": 3, "label": name}
                panel.loglog(sizes, ratios, **style)
            panel.set_title(f"{title}, {ranks} ranks", fontsize=10)
            panel.set_xlabel("bytes")
            panel.set_ylabel("time / pairwise")
            panel.set_ylim(0.05, 20)
            panel.set_yticks([0.1, 0.3, 1, 3, 10], ["0.1", "0.3", "1", "3", "10"])
            panel.grid(True, which="major", alpha=0.3)
    axes[0][0].legend(fontsize=8, loc="lower left")
    figure.tight_layout()
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))

"""Plots measurements as time over size, or as bars if there is one size only."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from perseus.bench.plan import PERSEUS
from perseus.bench.record import Record
from perseus.bench.sizes import seconds_unit, show_bytes, show_seconds

_COLOURS = ("#d1495b", "#33658a", "#86a873", "#8d6a9f", "#e0a030", "#5f6b6d")
_PANEL_INCHES = (5.2, 3.8)
_COLUMNS = 3
_MOST_TICKS = 7  # on the axis of sizes
_LEAST_RANGE = 10.0  # ratio of largest to smallest time that gives the axis several ticks
_WIDE_RANGE = 300.0  # the same ratio, above which ticks at powers of ten suffice


def unavailable(path: Path) -> str | None:
    """Return the reason why no plot can be drawn into this file; None if it can."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        return "--plot needs matplotlib: pip install perseus-training[plots]"
    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        return f"--plot {path}: expected a name that ends with .png or .{', .'.join(sorted(kinds))}"
    return None


def draw(records: Sequence[Record], path: Path) -> None:
    """Save the figure of the records. Raises ValueError if there are none."""
    figure(records).savefig(path, dpi=130)


def figure(records: Sequence[Record]) -> Any:
    """Return a matplotlib Figure with one panel for each title, see _title().

    Contenders are lines on logarithmic axes, or bars. Raises ValueError without records.
    """
    from matplotlib.figure import Figure

    panels: dict[str, list[Record]] = {}
    for record in records:
        panels.setdefault(_title(record), []).append(record)
    if not panels:
        raise ValueError("--plot: nothing was measured")
    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    width, height = _PANEL_INCHES
    drawn = Figure(figsize=(width * columns, height * rows))
    grid = drawn.subplots(rows, columns, squeeze=False)
    colours = _colours(records)
    for axes, (title, group) in zip(grid.flat, panels.items(), strict=False):
        several = len({record.bytes for record in group}) > 1
        (_lines if several else _bars)(axes, group, colours)
        axes.set_title(title, fontsize=10)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    drawn.tight_layout()
    return drawn


def _title(record: Record) -> str:
    """Return what was measured, apart from the contender and the size, and where."""
    settings = record.settings
    what = " ".join(filter(None, (record.case, settings.get("model"))))
    what += f", {settings['bucket']} buckets" if "bucket" in settings else ""
    where = f"{record.ranks} ranks"
    if record.hosts > 1:
        where += f" on {record.hosts} hosts"
        where += f", {record.rate_gbit:g} Gbit/s" if record.rate_gbit else ""
    return f"{what}\n{where}"


def _colours(records: Sequence[Record]) -> dict[str, str]:
    names = dict.fromkeys([PERSEUS, *(record.contender for record in records)])
    return {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}


def _lines(axes: Any, group: list[Record], colours: dict[str, str]) -> None:
    """Draw the median time over size; the legend has the bus bandwidth at the largest size."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    for name in dict.fromkeys(record.contender for record in group):
        points = sorted((r.bytes, r.median_s, r.busbw_GBps) for r in group if r.contender == name)
        label = f"{name} ({_show_rate(points[-1][2])})" if points[-1][2] else name
        axes.loglog(
            [point[0] for point in points],
            [point[1] for point in points],
            marker="o",
            markersize=3.5,
            color=colours[name],
            label=label,
        )
    sizes = spread_ticks({record.bytes for record in group})
    axes.set_xticks(sizes, [show_bytes(size) for size in sizes], fontsize=8)
    low, high = axes.get_ylim()
    wider = max(1.0, _LEAST_RANGE * low / high) ** 0.5
    axes.set_ylim(low / wider, high * wider)
    parts = (1,) if high / low > _WIDE_RANGE else (1, 2, 5)
    axes.yaxis.set_major_locator(LogLocator(subs=parts))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: show_seconds(seconds)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.set_xlabel("size")
    axes.set_ylabel("median time")
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(title="bus bandwidth at the largest size", fontsize=8, title_fontsize=8)


def _bars(axes: Any, group: list[Record], colours: dict[str, str]) -> None:
    """Draw the median time of each contender as a bar with its value."""
    latest = {record.contender: record for record in group}
    names = list(latest)[::-1]
    unit, unit_name = seconds_unit(max(record.median_s for record in latest.values()))
    times = [latest[name].median_s / unit for name in names]
    axes.barh(names, times, color=[colours[name] for name in names])
    axes.set_xlim(0, max(times) * 1.25)
    for name, time in zip(names, times, strict=True):
        axes.text(time, name, f" {show_seconds(time * unit)}", va="center", fontsize=8)
    axes.set_xlabel(f"median time ({unit_name}), {show_bytes(group[0].bytes)}")


def spread_ticks(sizes: Collection[int]) -> list[int]:
    """Return sizes, including the largest, whose labels do not touch on a logarithmic axis."""
    least = (max(sizes) / min(sizes)) ** (1 / (_MOST_TICKS - 0.5))
    ticks: list[int] = []
    for size in sorted(sizes, reverse=True):
        if not ticks or ticks[-1] / size > least:
            ticks.append(size)
    return ticks[::-1]


def _show_rate(gigabytes: float) -> str:
    return f"{gigabytes:.2g} GB/s" if gigabytes >= 0.1 else f"{gigabytes * 1e3:.2g} MB/s"

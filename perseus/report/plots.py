"""Draws the report's plots as PNG bytes with matplotlib, which no other module imports."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from perseus.report.analysis import Step, Tensor, Waiting, bandwidth
from perseus.report.trace import Trace

_HIDDEN, _EXPOSED, _WAITING = "#86a873", "#d1495b", "#e9c46a"
_RANKS = (
    "#33658a", "#d1495b", "#86a873", "#8d6a9f", "#e0a030", "#5f6b6d", "#2a9d8f", "#b56576",
)  # fmt: skip
_BINS = 100
_MOST_STEPS = 240  # bars; in longer jobs each bar is the mean of several steps
_MOST_LINES = len(_RANKS)
_DPI = 110


def unavailable() -> str | None:
    """Return the reason why plots cannot be drawn; None if they can."""
    try:
        import matplotlib  # noqa: F401 - only to see whether it is installed
    except ImportError:
        return "the plots need matplotlib: pip install perseus-training[plots]"
    return None


def _figure(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Any, list[Any]]:
    """Return a figure and its axes, row by row. width, height: in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI)
    return buffer.getvalue()


def _legend_above(axes: Any, columns: int) -> None:
    place = {"loc": "lower center", "bbox_to_anchor": (0.5, 1)}
    axes.legend(fontsize=8, frameon=False, ncols=columns, **place)


def overlap(found: Sequence[Step], rank: int) -> bytes:
    """Draw stacked bars for the steps of one rank: hidden, exposed and waiting time."""
    figure, (axes,) = _figure(10, 3.6)
    together = -(-len(found) // _MOST_STEPS)
    groups = [found[i : i + together] for i in range(0, len(found), together)]
    bottom = [0.0] * len(groups)
    x = [index * together for index in range(len(groups))]
    for label, colour, values in (
        ("on the wire during backward", _HIDDEN, [[s.hidden for s in g] for g in groups]),
        ("on the wire after backward", _EXPOSED, [[s.exposed for s in g] for g in groups]),
        ("after backward, waiting", _WAITING, [[s.waiting for s in g] for g in groups]),
    ):
        heights = [1e3 * sum(group) / len(group) for group in values]
        axes.bar(x, heights, together, bottom, label=label, color=colour, align="edge")
        bottom = [low + high for low, high in zip(bottom, heights, strict=True)]
    # The axis ends at the 98th percentile, so that a few very long steps do not flatten the others.
    usual = sorted(bottom)[int(0.98 * (len(bottom) - 1))]
    axes.set_ylim(0, 1.15 * usual or 1)
    axes.set_xlim(0, len(found))
    unit = "" if together == 1 else f", means of {together}"
    axes.set_xlabel(f"step of rank {rank}{unit}")
    axes.set_ylabel("ms")
    _legend_above(axes, 3)
    return _png(figure)


def bandwidth_over_time(traces: Sequence[Trace]) -> bytes:
    """Draw the bus bandwidth over time: one panel for each rank, or the mean if there are many.

    Ranks move the same buckets at the same time, so in a single panel lines would hide each other.
    """
    begin = min(trace.span[0] for trace in traces)
    end = max(trace.span[1] for trace in traces)
    times = [(end - begin) * (index + 0.5) / _BINS for index in range(_BINS)]
    lines = [bandwidth(trace.buckets, begin, end, _BINS) for trace in traces]
    names = [f"rank {trace.rank}" for trace in traces]
    if len(traces) > _MOST_LINES:
        lines = [[sum(values) / len(values) for values in zip(*lines, strict=True)]]
        names = [f"mean of {len(traces)} ranks"]
    most = max(map(max, lines))
    scale, unit = (1e9, "GB/s") if most >= 1e9 else (1e6, "MB/s")
    figure, panels = _figure(10, 1.6 + 1.2 * len(lines), rows=len(lines))
    for axes, line, name, colour in zip(panels, lines, names, _RANKS, strict=False):
        values = [value / scale for value in line]
        axes.fill_between(times, values, step="mid", color=colour, linewidth=0)
        axes.set_title(name, fontsize=8, loc="left")
        axes.set_xlim(0, end - begin)
        axes.set_ylim(0, 1.05 * most / scale or 1)
        axes.locator_params(axis="y", nbins=4)
        axes.tick_params(labelbottom=axes is panels[-1])
    panels[-1].set_xlabel("seconds since the first submission")
    figure.supylabel(f"bus bandwidth ({unit})", fontsize=10)
    return _png(figure)


def slowest_tensors(tensors: Sequence[Tensor], ranks: int) -> bytes:
    """Draw the time of each tensor's operations by phase, as means over the ranks."""
    figure, (axes,) = _figure(10, 1.2 + 0.32 * len(tensors))
    names = [_short(tensor.name) for tensor in tensors]
    places = range(len(tensors))[::-1]
    left = [0.0] * len(tensors)
    for label, colour, values in (
        ("waiting until all ranks had submitted it", _WAITING, [t.negotiating for t in tensors]),
        ("queued behind other buckets", "#a8b5bd", [t.queued for t in tensors]),
        ("on the wire, with its bucket", "#33658a", [t.moving for t in tensors]),
    ):
        widths = [value / ranks for value in values]
        axes.barh(places, widths, 0.7, left, color=colour, label=label)
        left = [low + high for low, high in zip(left, widths, strict=True)]
    axes.set_yticks(places, names, fontsize=8)
    axes.set_xlabel("seconds in all operations, mean of the ranks")
    _legend_above(axes, 3)
    return _png(figure)


def waiting_per_rank(found: Waiting) -> bytes:
    """Draw how long each rank waited for each other rank, and how often it was last itself."""
    height = 1.5 + 0.3 * len(found.ranks)
    figure, (left_axes, right_axes) = _figure(10, max(2.4, height), columns=2)
    places = range(len(found.ranks))[::-1]
    names = [f"rank {rank}" for rank in found.ranks]
    left = [0.0] * len(found.ranks)
    colours = {rank: _RANKS[i % len(_RANKS)] for i, rank in enumerate(found.ranks)}
    for other in found.ranks:
        widths = [found.waited[rank].get(other, 0.0) for rank in found.ranks]
        label = f"for rank {other}" if len(found.ranks) <= _MOST_LINES else None
        left_axes.barh(places, widths, 0.7, left, color=colours[other], label=label)
        left = [low + high for low, high in zip(left, widths, strict=True)]
    left_axes.set_xlabel("seconds with a tensor waiting")
    left_axes.locator_params(axis="x", nbins=5)
    if len(found.ranks) <= _MOST_LINES:
        _legend_above(left_axes, 4)
    share = [100 * found.last[rank] / max(1, found.operations) for rank in found.ranks]
    right_axes.barh(places, share, 0.7, color=[colours[rank] for rank in found.ranks])
    right_axes.set_xlabel("% of all operations to which it came last")
    right_axes.set_xlim(0, 100)
    for axes in (left_axes, right_axes):
        axes.set_yticks(places, names, fontsize=8)
    return _png(figure)


def _short(name: str, most: int = 56) -> str:
    """Return a name, or its ends, as matplotlib shows it: without mathematics between dollars."""
    shown = "".join(letter if letter.isprintable() else "�" for letter in name)
    if len(shown) > most:
        shown = f"{shown[: most // 2 - 1]}…{shown[-most // 2 :]}"
    return shown.replace("$", r"\$")

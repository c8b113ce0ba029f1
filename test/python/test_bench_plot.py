"""What perseus-bench draws has ticks and units that suit the data."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("matplotlib")

from perseus.bench import plot
from perseus.bench.record import Record

KIB, MIB = 1 << 10, 1 << 20


def axes_of(times: dict[int, float], peer: str = "perseus") -> Any:
    """The drawn panel of an allreduce whose median times by size in bytes are these."""
    records = [
        Record("allreduce", peer, "allreduce", 2, 1, size, seconds, seconds, 5, True)
        for size, seconds in times.items()
    ]
    figure = plot.figure(records)
    figure.canvas.draw()
    return figure.axes[0]


def shown(axis: Any) -> list[str]:
    """The labels of the ticks that lie within the axis."""
    low, high = sorted(axis.get_view_interval())
    pairs = zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=True)
    minor = [label.get_text() for label in axis.get_minorticklabels() if label.get_text()]
    return [label.get_text() for place, label in pairs if low <= place <= high] + minor


@pytest.mark.parametrize(
    ("times", "sizes", "seconds"),
    [
        (
            {4: 8.2e-05, 64 * KIB: 8.4e-05},
            ["4 B", "64 KiB"],
            ["50 µs", "100 µs", "200 µs"],
        ),
        (
            {4: 541e-6, 64 * KIB: 1.3e-3},
            ["4 B", "64 KiB"],
            ["500 µs", "1 ms", "2 ms"],
        ),
        (
            {4 * KIB * 4**k: 1e-5 * 4**k for k in range(8)},
            ["16 KiB", "256 KiB", "4 MiB", "64 MiB"],
            ["10 µs", "100 µs", "1 ms", "10 ms", "100 ms"],
        ),
        (
            {MIB: 0.9, 2 * MIB: 2.0, 4 * MIB: 4.1},
            ["1 MiB", "2 MiB", "4 MiB"],
            ["1 s", "2 s", "5 s"],
        ),
    ],
)
def test_lines_have_ticks_that_people_read(
    times: dict[int, float], sizes: list[str], seconds: list[str]
) -> None:
    axes = axes_of(times)
    assert shown(axes.xaxis) == sizes
    assert shown(axes.yaxis) == seconds
    low, high = axes.get_ylim()
    assert low <= min(times.values()) and max(times.values()) <= high


@pytest.mark.parametrize(
    ("seconds", "unit"), [(8.2e-05, "µs"), (0.0041, "ms"), (3.0, "s"), (5e-8, "ns")]
)
def test_bars_have_the_unit_of_the_longest(seconds: float, unit: str) -> None:
    axes = axes_of({4: seconds})
    assert axes.get_xlabel() == f"median time ({unit}), 4 B"
    assert axes.get_xlim()[1] < 1000 * 1.25
    assert [text.get_text() for text in axes.texts] == [
        f" {seconds / {'s': 1, 'ms': 1e-3, 'µs': 1e-6, 'ns': 1e-9}[unit]:.3g} {unit}"
    ]


@pytest.mark.parametrize(
    ("sizes", "ticks"),
    [
        ([4], [4]),
        ([4, 8], [4, 8]),
        ([4, 4096, 4097, 4098], [4, 4098]),
        ([2**k for k in range(7)], [2**k for k in range(7)]),
        ([2**k for k in range(13)], [4**k for k in range(7)]),
    ],
)
def test_labels_of_sizes_do_not_touch(sizes: list[int], ticks: list[int]) -> None:
    assert plot.spread_ticks(sizes) == ticks


def test_cases_and_buckets_have_panels_of_their_own() -> None:
    def measured(case: str, **settings: str) -> Record:
        settings = {"model": "resnet50", **settings}
        return Record(case, "gloo", "allreduce", 2, 1, MIB, 1.0, 1.0, 5, True, settings=settings)

    records = [
        measured("gradients"),
        measured("ddp", bucket="1 MiB"),
        measured("ddp", bucket="25 MiB"),
    ]
    assert [axes.get_title() for axes in plot.figure(records).axes] == [
        "gradients resnet50\n2 ranks",
        "ddp resnet50, 1 MiB buckets\n2 ranks",
        "ddp resnet50, 25 MiB buckets\n2 ranks",
    ]


def test_bandwidths_have_their_unit() -> None:
    texts = [axes_of({4: 1e-3, 64 * KIB: t}).get_legend().texts[0].get_text() for t in (1e-3, 1e-5)]
    assert texts == ["perseus (66 MB/s)", "perseus (6.6 GB/s)"]

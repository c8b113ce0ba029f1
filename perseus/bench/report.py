"""Formats measurements as lines for the terminal and as tables for READMEs.

Pure functions, except machine(), memory() and the functions that read or write a page. Thread-safe.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from perseus.bench.bars import BARS, Verdict
from perseus.bench.plan import PERSEUS
from perseus.bench.record import Record
from perseus.bench.sizes import show_bytes, show_seconds

_BEGIN, _END = "<!-- bench:begin -->", "<!-- bench:end -->"
_WIDTHS = (13, 19, 5, 5, 9, 8, 8, 3, 7, 7, 8, 8, 8)
_COLUMNS = (
    "case", "contender", "ranks", "hosts", "size", "median", "min", "n", "algGB/s", "busGB/s",
    "wire", "/perseus", "result",
)  # fmt: skip


def heading() -> str:
    """Return the heading of the lines that show_line() returns."""
    return _aligned(_COLUMNS)


def show_line(record: Record) -> str:
    """Format one measurement as a line.

    Column `wire` is the bytes that the busiest host sent; `/perseus` is the contender's time
    divided by Perseus' time.
    """
    ratio = "" if record.vs_perseus is None else f"{record.vs_perseus:.3g}"
    case = record.settings.get("model", record.case)
    if bucket := record.settings.get("bucket"):
        case += f" {bucket.removesuffix('iB').replace(' ', '')}"
    verdict = "right" if record.verified else f"INVALID: {record.note}"
    if record.images_per_s is not None:
        verdict += f", {record.images_per_s:.3g} img/s"
    return _aligned(
        (
            case, record.contender, str(record.ranks), str(record.hosts), show_bytes(record.bytes),
            show_seconds(record.median_s), show_seconds(record.min_s), str(record.n),
            f"{record.algbw_GBps:.3g}", f"{record.busbw_GBps:.3g}" if record.busbw_GBps else "-",
            "-" if record.wire_bytes is None else show_bytes(record.wire_bytes), ratio, verdict,
        )
    )  # fmt: skip


def _aligned(cells: Sequence[str]) -> str:
    left = 2
    return " ".join(
        cell.ljust(width) if i < left else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(cells, _WIDTHS, strict=True))
    )


def verdicts(records: Sequence[Record]) -> list[Verdict]:
    """Return the verdict for every bar."""
    return [bar.judge(records) for bar in BARS]


def results(records: Sequence[Record], reasons: Sequence[str], load_before: float) -> str:
    """Return the text for README.md: every case with its peer.

    reasons: why cases were not measured. load_before: the load average before the run.
    """
    lines = [
        *_introduction(load_before),
        "| case | Perseus | compared with | result | command |",
        "|---|---|---|---|---|",
    ]
    for bar in BARS:
        row = bar.judge(records)
        lines.append(
            f"| {row.what} | {row.ours} | {row.other} | {row.result} | `{bar.command()}` |"
        )
    lines += ["", *_model_table(records)]
    lines += [f"Not measured: {reason}." for reason in dict.fromkeys(reasons)]
    return "\n".join(lines).rstrip()


def bars(records: Sequence[Record], load_before: float) -> str:
    """Return the text for benchmarks/README.md: every bar, and whether it is met."""
    lines = [
        *_introduction(load_before),
        "| case | Perseus | compared with | result | of the fastest repetitions | bar | |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in verdicts(records):
        mark = {True: "met", False: "**missed**", None: ""}[row.met]
        lines.append(
            f"| {row.what} | {row.ours} | {row.other} | {row.result} | {row.fastest} | {row.bar} | "
            f"{mark} |"
        )
    return "\n".join(lines)


def _introduction(load_before: float) -> list[str]:
    return [
        f"Measured by `make bench` on {date.today():%Y-%m-%d}: {machine(load_before)}.",
        "",
        "All cases sum float32 values; times and ratios are medians. The contenders of a row take "
        "turns in the same processes, a ratio compares repetitions of the same round, and every "
        "result is verified. The row of DDP's exchange shows whole backward passes; its ratio "
        "compares only the times beyond those of the contender `no-exchange`. Where the load shows "
        "that the machine had other work, the times say little; cases that need all ranks at the "
        "same moment suffer most.",
        "",
    ]


def _model_table(records: Sequence[Record]) -> list[str]:
    models = [r for r in records if r.case == "gradients" and "model" in r.settings]
    ours = [record for record in models if record.contender == PERSEUS]
    if not ours:
        return []
    lines = [
        "All gradients of a model, last layer first: a rank starts all of them, then waits for all "
        "(`perseus-bench gradients --model NAME`).",
        "",
        "| model | tensors | bytes | where | Perseus | torch gloo | |",
        "|---|---|---|---|---|---|---|",
    ]
    for record in ours:
        place = (record.settings["model"], record.ranks, record.hosts)
        for other in models:
            if other.peer == "torch-gloo" and place == (
                other.settings["model"],
                other.ranks,
                other.hosts,
            ):
                where = f"{record.ranks} ranks, shared memory"
                if record.hosts > 1:
                    rate = "" if record.rate_gbit is None else f", {record.rate_gbit:g} Gbit/s"
                    where = f"{record.hosts} hosts{rate}"
                lines.append(
                    f"| {place[0]} | {record.tensors} | {show_bytes(record.bytes)} | {where} | "
                    f"{show_seconds(record.median_s)} | {show_seconds(other.median_s)} | "
                    f"{other.vs_perseus or 0:.2f} × as fast |"
                )
    return [*lines, ""]


def summary(records: Sequence[Record]) -> str:
    """Return the verdict for every bar as lines for the terminal."""
    lines = []
    for row in verdicts(records):
        mark = {True: "met", False: "MISSED", None: ""}[row.met]
        against = f"{row.other:36}" if row.other else " " * 36
        lines.append(
            f"{row.what:47} {row.ours:>8}  {against} {row.result:20} {row.bar:22} {mark:6} "
            f"{row.fastest and f'(fastest: {row.fastest})'}"
        )
    return "\n".join(lines)


def machine(load_before: float) -> str:
    """Describe this machine: processor, cores, memory, kernel, Python, torch and load."""
    cores = len(os.sched_getaffinity(0))
    try:
        torch = f"torch {version('torch')}"
    except PackageNotFoundError:
        torch = "no torch"
    return (
        f"{_processor()}, {cores} cores, {show_bytes(memory())}, Linux {platform.release()}, "
        f"Python {platform.python_version()}, {torch}, load before the run {load_before:.1f}"
    )


def memory() -> int:
    """Return how many bytes of memory this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _processor() -> str:
    try:
        found = re.search(
            r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE
        )
    except OSError:
        found = None
    return found[1].strip() if found else platform.machine()


def check_page(flag: str, path: Path) -> tuple[str, str]:
    """Return the text of a page before and after its markers.

    Raises ValueError, which names the flag, if the file or its markers are missing.
    """
    if not path.is_file():
        raise ValueError(f"{flag} {path}: no such file")
    before, begin, rest = path.read_text(encoding="utf-8").partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not (begin and end):
        raise ValueError(f"{flag} {path}: expected the lines {_BEGIN} and {_END}")
    return before, after


def write_page(flag: str, path: Path, text: str) -> None:
    """Replace the text between the markers of a page.

    Raises ValueError and changes nothing if they are missing.
    """
    before, after = check_page(flag, path)
    path.write_text(f"{before}{_BEGIN}\n{text}\n{_END}{after}", encoding="utf-8")

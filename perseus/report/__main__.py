"""The command line of perseus-report, which reads timelines and writes one HTML page."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from perseus import command_line
from perseus.command_line import Parser, log, show
from perseus.report import plots
from perseus.report.page import make_page, warnings
from perseus.report.trace import read_all

_USAGE_ERROR = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page; return the exit status: 0, or 2 after printing one line with the error.

    If the page is written, but standard output cannot be, see command_line.run().
    """
    return command_line.run("perseus-report", lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    try:
        given = _parser().parse_args(arguments)
        if reason := plots.unavailable():
            raise ValueError(reason)
        traces = read_all(given.traces)
        _check_is_no_trace(given.output, given.traces)
        given.output.write_text(make_page(traces), encoding="utf-8")
    except (ValueError, OSError) as error:
        log(f"perseus-report: error: {error}")
        return _USAGE_ERROR
    for warning in warnings(traces):
        log(f"perseus-report: {warning}")
    show(f"wrote {given.output}")
    return 0


def _check_is_no_trace(output: Path, traces: Sequence[Path]) -> None:
    """Refuse to write over a recording: a shell takes the first file of `-o trace*.json` for -o."""
    if output.is_file():
        with output.open("rb") as file:
            is_trace = file.read(1) == b"["
        if is_trace or any(output.samefile(trace) for trace in traces):
            raise ValueError(f"-o {output} is a trace, which the page would replace: name another")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="perseus-report",
        description="Makes one HTML page from the timelines of a job's ranks (HOROVOD_TIMELINE, "
        "PERSEUS_TIMELINE_ALL_RANKS=1): overlap of backward and communication, bandwidth, slowest "
        "tensors, who waited for whom.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("traces", nargs="+", type=Path, metavar="trace.json", help="of as many ranks as there are")
    add(
        "-o",
        "--output",
        type=Path,
        default=Path("perseus-report.html"),
        metavar="FILE",
        help="the page (perseus-report.html)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""What perseus-bench prints and writes into files: --json, --plot, --readme, --bars.

Single-threaded.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from perseus import command_line
from perseus.bench import plot, report
from perseus.bench.record import Record
from perseus.command_line import OutputError, log


class Outputs:
    """Standard output and the files that a command line names.

    Raises ValueError before the measurement if a file cannot be written. Where writing fails later,
    one line on standard error says so, and the others are written.

    complete: whether nothing has been lost.
    """

    def __init__(self, given: argparse.Namespace) -> None:
        self._json: Path | None = given.json
        self._plot: Path | None = given.plot
        self._readme: Path | None = given.readme
        self._bars: Path | None = given.bars
        self._lines: TextIO | None = None
        self.complete = True
        self._check(bool(given.cases))

    def open(self) -> None:
        """Begin the file of --json anew. Raises ValueError if it cannot be opened."""
        if self._json is None:
            return
        try:
            self._lines = self._json.open("w", encoding="utf-8")
        except OSError as error:
            raise ValueError(f"--json {self._json}: {error.strerror}") from None

    def add(self, line: str) -> None:
        """Write a record as JSON at once, so that nothing that ends the run can lose it."""
        if self._lines is None:
            return
        try:
            self._lines.write(f"{line}\n")
            self._lines.flush()
        except OSError as error:
            self._lost(f"--json {self._json}: {error.strerror}")
            with suppress(OSError):  # it writes what it still holds
                self._lines.close()
            self._lines = None

    def show(self, text: str) -> None:
        """Print a line. Raises OutputError if nobody reads standard output any more."""
        try:
            command_line.show(text)
        except OutputError as error:
            if error.is_closed:
                raise
            self._lost(str(error))

    def conclude(
        self, records: Sequence[Record], problems: Sequence[str], load_before: float
    ) -> None:
        """Write what needs all records. problems, load_before: see report.results()."""
        if self._plot and records:
            with self._saying(f"--plot {self._plot}"):
                plot.draw(records, self._plot)
        if self._readme:
            with self._saying(f"--readme {self._readme}"):
                text = report.results(records, problems, load_before)
                report.write_page("--readme", self._readme, text)
        if self._bars:
            with self._saying(f"--bars {self._bars}"):
                report.write_page("--bars", self._bars, report.bars(records, load_before))

    @contextmanager
    def _saying(self, what: str) -> Iterator[None]:
        """Say in one line that an output is lost if it cannot be written within the context."""
        try:
            yield
        except OSError as error:
            self._lost(f"{what}: {error.strerror}")
        except ValueError as error:  # of a page, which it names, as in the beginning
            self._lost(str(error))

    def _lost(self, what: str) -> None:
        self.complete = False
        log(f"perseus-bench: error: {what}")

    def _check(self, of_cases: bool) -> None:
        pages = (("--readme", self._readme), ("--bars", self._bars))
        for flag, path in pages:
            if path and of_cases:
                raise ValueError(
                    f"{flag} {path}: it replaces the results of the whole suite: name no case, or "
                    f"write those of a case with --json"
                )
        for flag, path in (("--json", self._json), ("--plot", self._plot), *pages):
            if path is None:
                continue
            if path.is_dir() or not path.parent.is_dir():
                raise ValueError(f"{flag} {path}: expected a file in a directory that exists")
            if not os.access(path if path.exists() else path.parent, os.W_OK):
                raise ValueError(f"{flag} {path}: it cannot be written")
        if self._plot and (reason := plot.unavailable(self._plot)):
            raise ValueError(reason)
        for flag, path in pages:
            if path:
                report.check_page(flag, path)

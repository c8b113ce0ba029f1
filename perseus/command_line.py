"""What Perseus' commands share: a parser whose errors are one line, and output that may be lost.

For the main thread of a command.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn, TextIO

_FAILED = 1


class OutputError(Exception):
    """Standard output cannot be written.

    is_closed: nobody reads it any more.
    """

    def __init__(self, error: OSError) -> None:
        super().__init__(f"standard output: {error.strerror}")
        self.is_closed = isinstance(error, BrokenPipeError)


class Parser(argparse.ArgumentParser):
    """Raises errors as ValueError, for a message of one line."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; {self.prog} -h lists all options")

    def print_help(self, file: Any = None) -> None:
        show(self.format_help().rstrip("\n"))


def run(name: str, command: Callable[[], int]) -> int:
    """Run a command; return its exit status.

    If standard output cannot be written, the command ends with 1, after one line with the error. If
    nobody reads it any more, the command ends without a word with 128 + SIGPIPE, as a job of
    perseusrun does.
    """
    try:
        return command()
    except OutputError as error:
        if error.is_closed:
            return 128 + signal.SIGPIPE
        log(f"{name}: error: {error}")
        return _FAILED


def show(text: str) -> None:
    """Print a line on standard output at once.

    Raises OutputError if it cannot be written; what is printed later is lost without an error.
    """
    try:
        _print(sys.stdout, text)
    except OSError as error:
        raise OutputError(error) from None


def log(text: str) -> None:
    """Print a line on standard error at once; it is lost if it cannot be written."""
    with suppress(OSError):
        _print(sys.stderr, text)


def _print(stream: TextIO | None, text: str) -> None:
    if stream is None:  # it was closed when the process began
        return
    try:
        print(text, file=stream, flush=True)
    except OSError:
        # The stream still holds the text, and the interpreter would fail to write it in the end.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        raise

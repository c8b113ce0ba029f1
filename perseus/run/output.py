"""What ranks print, line by line with the rank in front, on the console and in files.

Works on bytes throughout, so no character is ever cut in two. One thread.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from typing import BinaryIO

STDOUT, STDERR = 1, 2
_NAMES = {STDOUT: b"stdout", STDERR: b"stderr"}
_STREAMS = {STDOUT: "output", STDERR: "error"}
_LONGEST_LINE = 1 << 20  # a longer one is passed on in pieces rather than held
_STEP = 4096  # what a pipe that select() calls writable surely takes
_PATIENCE = 0.2  # seconds a terminal's user waits for the rest of a line
_RETURN_PATIENCE = 0.02  # seconds in which \r may become \r\n
_CLEAR_LINE = b"\r\x1b[K"


class Console:
    """This process's stdout and stderr, and what happens where output cannot be written.

    On a terminal, an unfinished line is erased before the next one. Only one can be there at a
    time: that of the lowest rank.
    """

    def __init__(self, stop: Callable[[], bool], wake: int) -> None:
        """stop is asked while a write blocks, and true drops what is left.

        wake becomes readable when it is worth asking.
        """
        self._stop = stop
        self._wake = wake
        self._terminals = {fd: os.isatty(fd) for fd in (STDOUT, STDERR)}
        self._unfinished = False  # the cursor stands on a line that is still to be completed
        self._bar: tuple[int, int] | None = None  # rank and stream of the line that stays there
        self._torn: set[int] = set()  # descriptors that took the beginning of a line only
        self._warned = False
        self.broken = False  # nobody reads any more; everything is dropped from now on

    def is_terminal(self, fd: int) -> bool:
        return self._terminals[fd]

    def show(self, fd: int, line: bytes, finished: bool = True, rank: int = -1) -> None:
        if self._terminals[fd]:
            finished = finished and not line.endswith(b"\r")
            if finished:
                self.release(fd, rank)
            elif self._bar is not None and self._bar < (rank, fd):
                return  # two would overwrite each other
            else:
                self._bar = (rank, fd)
                line = _fitted(line, fd)
            if self._unfinished:
                line = _CLEAR_LINE + line
            self._unfinished = not finished
        self._write(fd, line)

    def release(self, fd: int, rank: int) -> None:
        """Others may have the unfinished line of this rank's stream."""
        if self._bar == (rank, fd):
            self._bar = None

    def save(self, file: BinaryIO, line: bytes) -> None:
        """Append a line to a file, which is unbuffered."""
        self._put(file.fileno(), file.name, line, lambda: True)

    def close_file(self, file: BinaryIO) -> None:
        try:
            file.close()
        except OSError as error:
            self._warn(file.name, error)

    def close(self) -> None:
        """Leave the cursor at the start of a line."""
        if self._unfinished:
            self._unfinished = False
            self._write(STDOUT if self._terminals[STDOUT] else STDERR, b"\r\n")

    def _write(self, fd: int, data: bytes) -> None:
        try:
            self._put(fd, f"standard {_STREAMS.get(fd)}", data, lambda: self._is_writable(fd))
        except BrokenPipeError:
            self.broken = True

    def _is_writable(self, fd: int) -> bool:
        """Waits for it; false where the data is to be dropped."""
        while not self.broken:
            readable, writable, _ = select.select([self._wake], [fd], [])
            if writable:
                return True
            if readable and self._stop():
                return False
        return False

    def _put(self, fd: int, name: str, data: bytes, is_writable: Callable[[], bool]) -> None:
        """Write as much as possible: a full disk does not end the job."""
        data = b"\n" + data if fd in self._torn else data
        view = memoryview(data)
        try:
            while view and is_writable():
                try:
                    view = view[os.write(fd, view[:_STEP]) :]
                except BlockingIOError:  # somebody else's setting of a shared descriptor
                    continue
        except BrokenPipeError:
            raise
        except OSError as error:
            if len(view) < len(data):
                self._torn.add(fd)
            self._warn(name, error)
        else:
            self._torn.discard(fd)

    def _warn(self, name: str, error: OSError) -> None:
        """Once, where it can still be read."""
        if not self._warned:
            self._warned = True
            text = (
                f"perseusrun: warning: cannot write {name}: {error.strerror}; the job goes on, and "
                f"output that cannot be written is lost\n"
            )
            self.show(STDOUT if name.endswith("error") else STDERR, text.encode())


class Stream:
    """One rank's stdout or stderr: cuts it after \\n and \\r and passes on whole lines."""

    def __init__(
        self,
        console: Console,
        rank: int,
        fd: int,
        timestamps: bool,
        file: BinaryIO | None,
        *,
        look: Callable[[bytes], None] | None = None,
    ) -> None:
        """look: sees every whole line."""
        self._console = console
        self._rank = rank
        self._fd = fd
        self._prefix = b"[%d]<%s>:" % (rank, _NAMES[fd])
        self._timestamps = timestamps
        self._file = file
        self._look = look
        self._rest = b""
        self._due: float | None = None  # when to show an unfinished line on a terminal

    def feed(self, data: bytes) -> None:
        data = self._rest + data
        start = 0
        while (end := _line_end(data, start)) > 0:
            self._emit(data[start:end])
            start = end
        self._rest = data[start:]
        while len(self._rest) >= _LONGEST_LINE:
            cut = _whole_characters(self._rest[:_LONGEST_LINE])
            self._emit(self._rest[:cut] + b"\n")
            self._rest = self._rest[cut:]
        if self._rest.endswith(b"\r"):
            self._due = time.monotonic() + _RETURN_PATIENCE
        elif self._rest and self._console.is_terminal(self._fd):
            self._due = time.monotonic() + _PATIENCE
        else:
            self._due = None

    def due(self) -> float | None:
        """When to call show_rest; None = no need."""
        return self._due

    def show_rest(self) -> None:
        """Nothing came for a while: a progress bar at rest, or a prompt."""
        self._due = None
        if self._rest.endswith(b"\r"):
            line, self._rest = self._rest, b""
            self._emit(line)
        else:
            text = self._rest[: _whole_characters(self._rest)]
            self._console.show(self._fd, self._head() + text, finished=False, rank=self._rank)

    def flush(self) -> None:
        """The rank is gone: what it left is a line, finished or not."""
        if self._rest:
            self._emit(self._rest if self._rest.endswith(b"\r") else self._rest + b"\n")
            self._rest = b""
        self._due = None
        self._console.release(self._fd, self._rank)

    def close(self) -> None:
        self.flush()
        if self._file is not None:
            self._console.close_file(self._file)

    def _emit(self, line: bytes) -> None:
        if line == b"\r":  # many a progress bar begins with one: nothing to see
            return
        if self._look is not None:
            self._look(line)
        line = self._head() + line
        if self._file is not None:
            self._console.save(self._file, line)
        self._console.show(self._fd, line, rank=self._rank)

    def _head(self) -> bytes:
        return time.asctime().encode() + self._prefix if self._timestamps else self._prefix


def _line_end(data: bytes, start: int) -> int:
    """The index after the first line end at or after `start`.

    -1 if there is none, or a \\r that may become \\r\\n.
    """
    newline = data.find(b"\n", start)
    carriage = data.find(b"\r", start, newline if newline >= 0 else len(data))
    if carriage < 0:
        return newline + 1 if newline >= 0 else -1
    if carriage + 1 == len(data):
        return -1
    return carriage + 2 if data[carriage + 1 : carriage + 2] == b"\n" else carriage + 1


def _fitted(line: bytes, fd: int) -> bytes:
    """As much of an unfinished line as can be erased: it must not reach a second row."""
    try:
        columns = os.get_terminal_size(fd).columns
    except OSError:
        return line
    text = line.decode(errors="replace").rstrip("\r")
    if columns <= 1 or len(text) < columns or "\x1b" in text:
        return line
    return text[: columns - 1].encode() + (b"\r" if line.endswith(b"\r") else b"")


def _whole_characters(data: bytes) -> int:
    """How many bytes of `data` do not end in the middle of a UTF-8 character."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte >= 0xC0:  # a first byte: are all that it announces there?
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) if back >= length else len(data) - back
        if byte < 0x80:
            break
    return len(data)

"""Prints the ranks' output on the console and into files, line by line, prefixed with the rank.

Works on bytes and never splits a UTF-8 character. Single-threaded.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from math import ceil, inf
from typing import BinaryIO

STDOUT, STDERR = 1, 2
_NAMES = {STDOUT: b"stdout", STDERR: b"stderr"}
_STREAMS = {STDOUT: "output", STDERR: "error"}
_LONGEST_LINE = 1 << 20  # longer ones are printed in pieces, so that memory stays bounded
_STEP = 4096  # bytes that a pipe accepts without blocking when select() reports it as writable
_PATIENCE = 0.2  # seconds after which a terminal shows an unfinished line
_RETURN_PATIENCE = 0.02  # seconds in which \n may follow \r
_LOOK_SECONDS = 0.2  # after which a write that blocks asks again whether to stop
_LAST_SECONDS = 2.0  # that the reader has in all, once the job ends
_CLEAR_LINE = b"\r\x1b[K"


class Console:
    """Writes to this process's stdout and stderr, and handles output that cannot be written.

    On a terminal, an unfinished line is shown and is erased before the next line. Only one can be
    shown at a time: that of the lowest rank.
    """

    def __init__(self, stop: Callable[[], bool], wake: int) -> None:
        """Initialise with a way to interrupt writes that block.

        stop: is called while a write blocks; once it returns true, what the reader does not take
            within two seconds is dropped.
        wake: a descriptor that becomes readable when stop() is to be called.
        """
        self._stop = stop
        self._wake = wake
        self._terminals = {fd: os.isatty(fd) for fd in (STDOUT, STDERR)}
        self._unfinished = False  # whether the cursor is on an unfinished line
        self._bar: tuple[int, int] | None = None  # rank and stream that own the unfinished line
        self._torn: set[int] = set()  # descriptors to which only a part of a line was written
        self._warned = False
        self._drop_at = 0.0  # when to give up on the reader
        self.broken = False  # whether the reader has gone; all further output is dropped

    def is_terminal(self, fd: int) -> bool:
        """Return whether STDOUT or STDERR is a terminal."""
        return self._terminals[fd]

    def show(self, fd: int, line: bytes, finished: bool = True, rank: int = -1) -> None:
        """Write a line to STDOUT or STDERR. rank: the rank that printed it; -1 = this process."""
        if self._terminals[fd]:
            finished = finished and not line.endswith(b"\r")
            if finished:
                self.release(fd, rank)
            elif self._bar is not None and self._bar < (rank, fd):
                return  # two unfinished lines would overwrite each other
            else:
                self._bar = (rank, fd)
                line = _fitted(line, fd)
            if self._unfinished:
                line = _CLEAR_LINE + line
            self._unfinished = not finished
        self._write(fd, line)

    def release(self, fd: int, rank: int) -> None:
        """Let another stream own the unfinished line, if this rank's stream owned it."""
        if self._bar == (rank, fd):
            self._bar = None

    def save(self, file: BinaryIO, line: bytes) -> None:
        """Append a line to an unbuffered file; warn once if that fails."""
        self._put(file.fileno(), file.name, line, lambda: True)

    def close_file(self, file: BinaryIO) -> None:
        """Close a file; warn once if that fails."""
        try:
            file.close()
        except OSError as error:
            self.warn(file.name, error)

    def close(self) -> None:
        """Put the cursor at the start of a line."""
        if self._unfinished:
            self._unfinished = False
            self._write(STDOUT if self._terminals[STDOUT] else STDERR, b"\r\n")

    def _write(self, fd: int, data: bytes) -> None:
        try:
            self._put(fd, f"standard {_STREAMS.get(fd)}", data, lambda: self._is_writable(fd))
        except BrokenPipeError:
            self.broken = True

    def _is_writable(self, fd: int) -> bool:
        """Wait until a descriptor is writable; return false if the data is to be dropped."""
        wake, patience = [self._wake], inf
        while not self.broken:
            if self._stop():
                self._drop_at = self._drop_at or time.monotonic() + _LAST_SECONDS
                wake, patience = [], max(0.0, self._drop_at - time.monotonic())
            poll = select.poll()  # select() takes no descriptors above 1023
            poll.register(fd, select.POLLOUT)
            for each in wake:
                poll.register(each, select.POLLIN)
            found = dict(poll.poll(None if patience == inf else ceil(1000 * patience)))
            if fd in found:
                return True
            if patience == 0.0:
                return False
            if found:  # of which the main loop is to learn, too
                wake, patience = [], _LOOK_SECONDS
        return False

    def _put(self, fd: int, name: str, data: bytes, is_writable: Callable[[], bool]) -> None:
        """Write as much as possible. A full disk must not end the job, so it is only a warning."""
        data = b"\n" + data if fd in self._torn else data
        view = memoryview(data)
        try:
            while view and is_writable():
                try:
                    view = view[os.write(fd, view[:_STEP]) :]
                except BlockingIOError:  # another process made the shared descriptor non-blocking
                    continue
        except BrokenPipeError:
            raise
        except OSError as error:
            if len(view) < len(data):
                self._torn.add(fd)
            self.warn(name, error)
        else:
            self._torn.discard(fd)

    def warn(self, name: str, error: OSError) -> None:
        """Warn once, on the stream that is not affected."""
        if not self._warned:
            self._warned = True
            text = (
                f"perseusrun: warning: cannot write {name}: {error.strerror}; the job goes on, and "
                f"output that cannot be written is lost\n"
            )
            data = text.encode("utf-8", "surrogateescape")
            self.show(STDOUT if name.endswith("error") else STDERR, data)


class Stream:
    """One rank's stdout or stderr: splits it after \\n and \\r, and prints whole lines."""

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
        """Initialise a stream of one rank.

        fd: STDOUT or STDERR. timestamps: put the time before every line. file: unbuffered; gets
        every line as well. look: is called with every whole line.
        """
        self._console = console
        self._fd = fd
        self.rename(rank)
        self._timestamps = timestamps
        self._file = file
        self._look = look
        self._rest = b""
        self._due: float | None = None  # when to show an unfinished line on a terminal

    def rename(self, rank: int) -> None:
        """Put another rank before the lines from now on."""
        self._rank = rank
        self._prefix = b"[%d]<%s>:" % (rank, _NAMES[self._fd])

    def feed(self, data: bytes) -> None:
        """Add output of the rank; print the lines that it completes."""
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
        """Return the time.monotonic() at which to call show_rest(); None = not at all."""
        return self._due

    def show_rest(self) -> None:
        """Show the unfinished line: it may be a prompt, or a progress bar that has stopped."""
        self._due = None
        if self._rest.endswith(b"\r"):
            line, self._rest = self._rest, b""
            self._emit(line)
        else:
            text = self._rest[: _whole_characters(self._rest)]
            self._console.show(self._fd, self._head() + text, finished=False, rank=self._rank)

    def flush(self) -> None:
        """Print the unfinished line as a whole one, because the rank has ended."""
        if self._rest:
            self._emit(self._rest if self._rest.endswith(b"\r") else self._rest + b"\n")
            self._rest = b""
        self._due = None
        self._console.release(self._fd, self._rank)

    def close(self) -> None:
        """Print the unfinished line and close the file."""
        self.flush()
        if self._file is not None:
            self._console.close_file(self._file)

    def _emit(self, line: bytes) -> None:
        if line == b"\r":  # progress bars begin with one; the line would be empty
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
    """Return the index behind the first line end at or after `start`.

    Returns -1 if there is none, or if the data ends with \\r, which may become \\r\\n.
    """
    newline = data.find(b"\n", start)
    carriage = data.find(b"\r", start, newline if newline >= 0 else len(data))
    if carriage < 0:
        return newline + 1 if newline >= 0 else -1
    if carriage + 1 == len(data):
        return -1
    return carriage + 2 if data[carriage + 1 : carriage + 2] == b"\n" else carriage + 1


def _fitted(line: bytes, fd: int) -> bytes:
    """Cut an unfinished line to the terminal's width, because only one row can be erased."""
    try:
        columns = os.get_terminal_size(fd).columns
    except OSError:
        return line
    text = line.decode(errors="replace").rstrip("\r")
    if columns <= 1 or len(text) < columns or "\x1b" in text:
        return line
    return text[: columns - 1].encode() + (b"\r" if line.endswith(b"\r") else b"")


def _whole_characters(data: bytes) -> int:
    """Return how many bytes of `data` are whole UTF-8 characters."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte >= 0xC0:  # the first byte of a character, which gives its length
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) if back >= length else len(data) - back
        if byte < 0x80:
            break
    return len(data)

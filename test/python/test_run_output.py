"""What ranks print is passed on line by line, whole characters only, promptly."""

from __future__ import annotations

import os
import pty
import select
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from perseus.run.output import STDERR, STDOUT, Console, Stream


class Recorder(Console):
    """A console that remembers instead of writing."""

    def __init__(self) -> None:
        super().__init__(lambda: False, 0)
        self._terminals = {STDOUT: False, STDERR: False}
        self.shown: list[tuple[int, bytes]] = []

    def _write(self, fd: int, data: bytes) -> None:
        self.shown.append((fd, data))


@pytest.fixture
def console() -> Recorder:
    return Recorder()


def stream(console: Console, rank: int = 3, fd: int = STDOUT) -> Stream:
    return Stream(console, rank, fd, timestamps=False, file=None)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
def test_lines_are_the_same_however_they_arrive(console: Recorder, size: int) -> None:
    text = "one\r\ntwo\rthrée €\n\n😀 four\rlast".encode()
    out = stream(console)
    for start in range(0, len(text), size):
        out.feed(text[start : start + size])
    out.close()
    expected = ["one\r\n", "two\r", "thrée €\n", "\n", "😀 four\r", "last\n"]
    assert [data.decode() for _, data in console.shown] == [f"[3]<stdout>:{x}" for x in expected]


def test_streams_of_ranks_do_not_mix_within_a_line(console: Recorder) -> None:
    first, second = stream(console, 0), stream(console, 1, STDERR)
    first.feed(b"be")
    second.feed(b"warning\n")
    first.feed(b"gin\n")
    assert console.shown == [
        (STDERR, b"[1]<stderr>:warning\n"),
        (STDOUT, b"[0]<stdout>:begin\n"),
    ]


def test_progress_bar_at_rest_is_shown_without_waiting_for_its_next_update(
    console: Recorder,
) -> None:
    out = stream(console)
    out.feed(b" 40%\r")
    assert console.shown == []  # \n might follow
    due = out.due()
    assert due is not None and due - time.monotonic() < 0.1
    out.show_rest()
    assert console.shown == [(STDOUT, b"[3]<stdout>: 40%\r")]
    assert out.due() is None


def test_carriage_return_alone_shows_nothing(console: Recorder) -> None:
    out = stream(console)
    out.feed(b"\r 1%\r 2%\n")
    assert [data for _, data in console.shown] == [b"[3]<stdout>: 1%\r", b"[3]<stdout>: 2%\n"]


def test_line_without_end_is_cut_between_characters(console: Recorder) -> None:
    out = stream(console)
    text = ("€" * 400_000).encode()  # 3 bytes each: no multiple of the limit
    out.feed(text)
    out.close()
    lines = [data.removeprefix(b"[3]<stdout>:").rstrip(b"\n") for _, data in console.shown]
    assert len(lines) > 1
    assert b"".join(lines) == text
    assert all(line.decode() for line in lines)


def test_file_gets_the_same_lines_and_time_comes_first(console: Recorder, tmp_path: Path) -> None:
    with (tmp_path / "stdout").open("wb") as file:
        out = Stream(console, 1, STDOUT, timestamps=True, file=file)
        out.feed(b"hello\n")
        out.close()
    content = (tmp_path / "stdout").read_bytes()
    assert content == console.shown[0][1]
    moment, _, rest = content.partition(b"[1]<stdout>:")
    assert rest == b"hello\n"
    time.strptime(moment.decode())  # as time.asctime() writes it


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Console, int]]:
    """A console on a terminal, and the end from which it can be read."""
    reader, writer = pty.openpty()
    quiet, _wake = os.pipe()
    console = Console(lambda: False, quiet)
    console._terminals = {STDOUT: True, STDERR: True}
    real = Console._write
    monkeypatch.setattr(console, "_write", lambda _, data: real(console, writer, data))
    yield console, reader
    for fd in (reader, writer, quiet, _wake):
        os.close(fd)


def read_all(fd: int) -> bytes:
    data = b""
    while select.select([fd], [], [], 0.1)[0]:
        data += os.read(fd, 4096)
    return data


def test_on_a_terminal_an_unfinished_line_gives_way_to_others(
    terminal: tuple[Console, int],
) -> None:
    console, reader = terminal
    bar, other = stream(console, 0), stream(console, 1)
    bar.feed(b"50%")
    bar.show_rest()
    assert read_all(reader) == b"[0]<stdout>:50%"
    other.feed(b"note\n")
    assert read_all(reader) == b"\r\x1b[K[1]<stdout>:note\r\n"
    bar.feed(b" done\n")
    assert read_all(reader) == b"[0]<stdout>:50% done\r\n"


def test_output_that_nobody_takes_is_given_up_when_the_job_is_interrupted() -> None:
    reader, writer = os.pipe()
    wake, waker = os.pipe()
    console = Console(lambda: True, wake)
    os.write(waker, b"x")
    started = time.monotonic()
    console._write(writer, b"x" * (1 << 20))  # far more than a pipe holds
    assert time.monotonic() - started < 30
    for fd in (reader, writer, wake, waker):
        os.close(fd)


def test_reader_that_goes_away_is_noticed() -> None:
    reader, writer = os.pipe()
    wake, waker = os.pipe()
    console = Console(lambda: False, wake)
    os.close(reader)
    console._write(writer, b"text\n")
    assert console.broken
    for fd in (writer, wake, waker):
        os.close(fd)

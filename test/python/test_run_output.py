"""What ranks print is passed on line by line, whole characters only, promptly."""

from __future__ import annotations

import errno
import fcntl
import os
import pty
import resource
import select
import threading
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


def test_on_a_terminal_the_lowest_ranks_progress_bar_stays(
    terminal: tuple[Console, int],
) -> None:
    console, reader = terminal
    bars = [stream(console, rank, STDERR) for rank in range(3)]
    bars[1].feed(b"1 of 9\r2")
    bars[1].show_rest()
    bars[0].feed(b"1 of 5\r2 of 5\r3")
    bars[1].feed(b" of 9\r3 of 9\r4")
    bars[2].feed(b"no bar\n")
    bars[0].feed(b" of 5\r4")
    bars[0].feed(b" of 5\n")
    bars[1].feed(b" of 9\r5")
    bars[0].feed(b"again\r.")
    bars[0].close()
    bars[1].feed(b" of 9\r6")
    bars[1].close()
    console.close()
    clear = "\r\x1b[K"
    shown = ["1 1 of 9\r", "1 2", "0 1 of 5\r", "0 2 of 5\r", "2 no bar\r\n", "0 3 of 5\r",
             "0 4 of 5\r\n", "1 4 of 9\r", "0 again\r", "0 .\r\n", "1 5 of 9\r", "1 6\r\n",
             ]  # fmt: skip
    assert read_all(reader).decode() == "".join(
        (clear if i > 0 and not shown[i - 1].endswith("\n") else "")
        + f"[{line[0]}]<stderr>:{line[2:]}"
        for i, line in enumerate(shown)
    )


def test_progress_bar_fits_into_one_row(console: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    console._terminals = {STDOUT: True, STDERR: True}
    monkeypatch.setattr(os, "get_terminal_size", lambda fd: os.terminal_size((20, 5)))
    out = stream(console)
    out.feed("ééééééééééééé\r".encode() + b"1234567\r" + b"\x1b[32m123456789\r")
    out.feed(b"x" * 30 + b"\n")
    assert [data.decode().removeprefix("\r\x1b[K") for _, data in console.shown] == [
        "[3]<stdout>:ééééééé\r",
        "[3]<stdout>:1234567\r",
        "[3]<stdout>:\x1b[32m123456789\r",
        "[3]<stdout>:" + "x" * 30 + "\n",
    ]


def test_file_on_a_full_disk_goes_on_with_the_next_line_that_fits(
    console: Recorder, tmp_path: Path
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    path = tmp_path / "stdout"
    with path.open("wb", buffering=0) as file:
        out = Stream(console, 0, STDOUT, timestamps=False, file=file)
        out.feed(b"first\n")
        resource.setrlimit(resource.RLIMIT_FSIZE, (25, limits[1]))
        try:
            out.feed(b"second\nthird\n")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        out.feed(b"fourth\nfifth\n")
        out.close()
    assert path.read_text() == (
        "[0]<stdout>:first\n[0]<std\n[0]<stdout>:fourth\n[0]<stdout>:fifth\n"
    )
    shown = [data.decode() for fd, data in console.shown if fd == STDOUT]
    expected = ["first", "second", "third", "fourth", "fifth"]
    assert shown == [f"[0]<stdout>:{line}\n" for line in expected]
    assert [data.decode() for fd, data in console.shown if fd == STDERR] == [
        f"perseusrun: warning: cannot write {path}: File too large; the job goes on, and output "
        "that cannot be written is lost\n"
    ]


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


def test_reader_that_stops_when_the_end_is_known_already_is_given_up() -> None:
    reader, writer = os.pipe()
    wake, waker = os.pipe()  # without a byte: the main loop has read it
    console = Console(lambda: True, wake)
    started = time.monotonic()
    console._write(writer, b"x" * (1 << 20))
    console._write(writer, b"y" * (1 << 20))
    assert time.monotonic() - started < 30
    for fd in (reader, writer, wake, waker):
        os.close(fd)


def test_news_for_the_main_loop_do_not_make_a_blocked_write_spin() -> None:
    reader, writer = os.pipe()
    wake, waker = os.pipe()
    os.write(waker, b"x")
    asked = []
    console = Console(lambda: bool(asked.append(time.monotonic())), wake)
    threading.Timer(1.0, lambda: os.read(reader, 1 << 20)).start()
    os.write(writer, b"x" * (1 << 16))  # full
    console._write(writer, b"text\n")
    assert len(asked) < 100
    assert os.read(wake, 1) == b"x"  # is still there
    assert os.read(reader, 100) == b"text\n"
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


def test_descriptors_may_have_large_numbers(tmp_path: Path) -> None:
    """select() takes none above 1023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1500), hard))
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    wake = fcntl.fcntl(reader, fcntl.F_DUPFD_CLOEXEC, 1400)
    file = os.open(tmp_path / "file", os.O_CREAT | os.O_WRONLY)
    try:
        console = Console(lambda: False, wake)
        console._put(file, "the file", b"text", lambda: console._is_writable(file))
        assert (tmp_path / "file").read_bytes() == b"text"
    finally:
        for descriptor in (reader, writer, wake, file):
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_full_disk_is_a_warning_whatever_the_name_of_the_file(console: Recorder) -> None:
    console.warn(os.fsdecode(b"/data/M\xfcller"), OSError(errno.ENOSPC, "No space left"))
    ((fd, text),) = console.shown
    assert fd == STDERR and b"cannot write /data/M\xfcller: No space left; the job goes on" in text

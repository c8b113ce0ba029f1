"""The look for leftovers finds what is left: a process, a socket, a segment, a file."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import leftovers
import pytest
from mpi_launchers import SEGMENTS, no_segments_left

HOLDER = """
import os, signal, socket, sys
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind("\\0" + sys.argv[1])
listener.listen()
segment = os.memfd_create("perseus")
child = os.fork()
if child == 0:
    signal.pause()
print(child, flush=True)
signal.pause()
"""


@contextlib.contextmanager
def holder(mark: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A marked process that holds a socket and a segment, and its child, which holds them too."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, mark],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {leftovers.MARK: mark},
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        yield process, child
    finally:
        process.kill()
        leftovers.kill(child)
        process.communicate(timeout=60)


def test_what_a_killed_process_leaves_to_its_child_is_found():
    mark = uuid.uuid4().hex
    files = leftovers.shared_memory_files()
    with holder(mark) as (process, child):
        assert sorted(leftovers.processes(mark)) == sorted([process.pid, child])
        held = leftovers.holdings([process.pid])
        assert len(held) == 2
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        with pytest.raises(AssertionError) as error:
            leftovers.expect_nothing_left(mark, held, files, timeout=0.2)
        for fact in (f"process {child}: ", f"process {child} has ", "/proc/net/unix: ", mark):
            assert fact in str(error.value)
    leftovers.expect_nothing_left(mark, held, files)


def test_a_file_in_shared_memory_is_found():
    files = leftovers.shared_memory_files()
    path = Path("/dev/shm", f"perseus-test-{uuid.uuid4().hex}")
    path.touch()
    try:
        with pytest.raises(AssertionError, match=path.name):
            leftovers.expect_nothing_left("none", set(), files, timeout=0.1)
    finally:
        path.unlink()
    leftovers.expect_nothing_left("none", set(), files)


@pytest.mark.parametrize("name", SEGMENTS)
def test_segments_of_mpi_that_nobody_uses_are_removed(name):
    number = uuid.uuid4().hex
    earlier, left, used = (Path("/dev/shm", f"{name}.{number}.{i}") for i in range(3))
    try:
        earlier.touch()
        with no_segments_left():
            left.touch()
            used.write_bytes(bytes(mmap.PAGESIZE))
            with used.open("r+b") as file:
                mapping = mmap.mmap(file.fileno(), 0)
        assert [path.exists() for path in (earlier, left, used)] == [True, False, True]
        mapping.close()
    finally:
        for path in (earlier, left, used):
            path.unlink(missing_ok=True)

"""What processes of a test hold, and whether any of it outlives them.

A test's processes are known by a variable in their environment, what they hold by its inode: other
jobs of this machine do not matter. Read only.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from mpi_launchers import SEGMENTS

MARK = "FAULTS_TEST"
Inode = tuple[int, int]  # device, number
_MEMFD = re.compile(r"^\S+ \S+ \S+ (\w+):(\w+) (\d+) +/memfd:perseus", re.MULTILINE)
_SOCKET_COLUMN = {"unix": 6, "tcp": 9, "tcp6": 9}


def processes(mark: str) -> list[int]:
    """Living processes that carry the mark."""
    needle = f"{MARK}={mark}".encode()
    found = []
    for pid in _pids():
        try:
            if needle in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
        except OSError:
            continue
    return found


def holdings(pids: Iterable[int]) -> set[Inode]:
    """The sockets and shared segments that these processes have open or mapped."""
    held: set[Inode] = set()
    for pid in pids:
        for link, inode in _descriptors(pid):
            if link.startswith(("socket:", "/memfd:perseus")):
                held.add(inode)
        held |= _mapped(pid)
    return held


def still_there(held: set[Inode]) -> list[str]:
    """Which of them some process of this machine, or the kernel's tables, still know."""
    found = []
    for pid in _pids():
        for link, inode in _descriptors(pid):
            if inode in held:
                found.append(f"process {pid} has {link}")
        found += [f"process {pid} maps a segment" for inode in _mapped(pid) if inode in held]
    numbers = {str(number) for _, number in held}
    for table, column in _SOCKET_COLUMN.items():
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            if line.split()[column] in numbers:
                found.append(f"/proc/net/{table}: {line.strip()}")
    return found


def shared_memory_files() -> set[str]:
    """But for those that MPI libraries leave there, whose jobs other tests may be running."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(SEGMENTS)}


def expect_nothing_left(mark: str, held: set[Inode], files: set[str], timeout: float = 60) -> None:
    """Fail unless processes, sockets, segments and files go within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        left = [f"process {pid}: {_command(pid)}" for pid in processes(mark)]
        left += still_there(held)
        new = shared_memory_files() - files
        left += [f"/dev/shm/{name}" for name in new if not _has_a_user(name)]
        if not left:
            return
        assert time.monotonic() < deadline, "left behind: " + "; ".join(left)
        time.sleep(0.05)


def sleeps(pid: int) -> bool:
    """Whether the main thread of a process waits for something."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"
    except OSError:
        return False


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def kill(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)


def _pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _descriptors(pid: int) -> list[tuple[str, Inode]]:
    found = []
    try:
        for entry in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{entry}"
            try:
                link, status = os.readlink(path), os.stat(path)
            except OSError:
                continue
            if link.startswith(("socket:", "/memfd:")):
                found.append((link, (status.st_dev, status.st_ino)))
    except OSError:
        pass
    return found


def _has_a_user(name: str) -> bool:
    """Whether a living process maps this file of /dev/shm: another job's, or one that is found by
    its mark."""
    for pid in _pids():
        with contextlib.suppress(OSError):
            if f" /dev/shm/{name}\n" in Path(f"/proc/{pid}/maps").read_text(errors="replace"):
                return True
    return False


def _mapped(pid: int) -> set[Inode]:
    try:
        text = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return set()
    return {
        (os.makedev(int(major, 16), int(minor, 16)), int(number))
        for major, minor, number in _MEMFD.findall(text)
    }


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return "(gone)"

"""Holds the Linux namespaces of one virtual host, and runs commands inside them.

A single-threaded script for virtual_hosts.py. The host lives as long as the script's standard input
is open. When its owner ends for any reason, the host's first process is killed; the kernel then
ends all other processes in the namespace, and removes network and mounts after the last one.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import signal
import subprocess
import sys
from types import FrameType

# <sched.h>, <sys/mount.h>, <sys/prctl.h>
_NEW_MOUNTS, _NEW_HOSTNAME, _NEW_IPC = 0x00020000, 0x04000000, 0x08000000
_NEW_PIDS, _NEW_NETWORK = 0x20000000, 0x40000000
_BIND, _RECURSIVE, _PRIVATE = 0x1000, 0x4000, 0x40000
_SET_DEATH_SIGNAL = 1
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)

_libc = ctypes.CDLL(None, use_errno=True)


def hold(hostname: str, hosts_file: str, remove: str | None) -> int:
    """Create the namespaces, print the pid of the process that holds them, and wait.

    hosts_file: is mounted on /etc/hosts. remove: a directory to delete at the end.

    Returns the exit status.
    """
    _check(
        _libc.unshare(_NEW_MOUNTS | _NEW_HOSTNAME | _NEW_IPC | _NEW_PIDS | _NEW_NETWORK), "unshare"
    )
    ready, notify = os.pipe()
    first = os.fork()
    if first == 0:
        _be_first_process(hostname, hosts_file, notify)
    os.close(notify)
    signal.signal(signal.SIGCHLD, _leave)
    try:
        if os.read(ready, 1) != b"r":
            return 1
        print(first, flush=True)
        while os.read(0, 4096):
            pass
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
        if remove is not None:
            shutil.rmtree(remove, ignore_errors=True)
    return 0


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(1)


def _be_first_process(hostname: str, hosts_file: str, notify: int) -> None:
    """Set up the host from inside, then reap orphaned processes forever."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    try:
        _die_with_parent()
        _mount("none", "/", None, _RECURSIVE | _PRIVATE)
        _mount("proc", "/proc", "proc")
        _mount("tmpfs", "/dev/shm", "tmpfs")
        _mount(hosts_file, "/etc/hosts", None, _BIND)
        if not os.path.isdir("/run/sshd"):  # sshd insists on it; the real /run stays as it is
            _mount("tmpfs", "/run", "tmpfs")
            os.mkdir("/run/sshd", 0o755)
        name = hostname.encode()
        _check(_libc.sethostname(name, len(name)), "sethostname")
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        os.write(notify, b"r")
        os.close(notify)
        while True:
            signal.sigwait({signal.SIGCHLD})
            while _reap():
                pass
    except BaseException as error:
        print(f"{hostname}: {error}", file=sys.stderr, flush=True)
    os._exit(1)


def _reap() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


def enter(pid: int, command: list[str]) -> int:
    """Run a command in the namespaces of `pid`.

    Returns the command's exit status, or 128 + n if signal n ended it.
    """
    directory = os.getcwd()
    spaces = [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in _KINDS]
    for space in spaces:
        _check(_libc.setns(space, 0), "setns")
        os.close(space)
    # Blocked signals are taken one by one below. A handler would miss one that comes between the
    # interpreter's last look for signals and the system call that waits.
    awaited = {*_FORWARDED, signal.SIGCHLD}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would never come
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)
        _lead_group(0)
        _die_with_parent()
        try:
            os.chdir(directory)
            os.execvp(command[0], command)
        except OSError as error:
            print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)
    _lead_group(child)  # whichever of the two comes first
    while True:
        received = signal.sigwait(awaited)
        if received != signal.SIGCHLD:
            _forward(child, received)
            continue
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return 128 - code if code < 0 else code


_KINDS = ("net", "uts", "ipc", "pid", "mnt")  # mnt last: /proc is another one from then on


def _lead_group(pid: int) -> None:
    """Give the command its own group: a signal to the caller's comes to it once, by _forward."""
    try:
        os.setpgid(pid, pid)
    except (PermissionError, ProcessLookupError):
        pass  # it did so itself, and runs the command or ended


def _forward(child: int, number: int) -> None:
    try:
        os.killpg(child, number)
    except ProcessLookupError:
        pass


def _die_with_parent() -> None:
    _check(_libc.prctl(_SET_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0), "prctl")


def _mount(source: str, target: str, kind: str | None, flags: int = 0) -> None:
    type_name = None if kind is None else kind.encode()
    _check(_libc.mount(source.encode(), target.encode(), type_name, flags, None), f"mount {target}")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    modes = parser.add_subparsers(dest="mode", required=True)
    keeper = modes.add_parser("hold")
    keeper.add_argument("hostname")
    keeper.add_argument("hosts_file")
    keeper.add_argument("--remove")
    inside = modes.add_parser("enter")
    inside.add_argument("pid", type=int)
    inside.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    if given.mode == "hold":
        return hold(given.hostname, given.hosts_file, given.remove)
    return enter(given.pid, given.command)


if __name__ == "__main__":
    sys.exit(main())

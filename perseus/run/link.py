"""The launcher's end of one host: its agent, a local child or over ssh.

One thread, except for send_heartbeat().
"""

from __future__ import annotations

import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any

from perseus.run import agent
from perseus.run.bootstrap.addresses import is_own_address
from perseus.run.hosts import Slot

_KILL_SECONDS = 2.0
SILENCE_SECONDS = 30.0


class HostLink:
    """The agent of one host: a local child, or one at the other end of ssh."""

    def __init__(self, name: str, slots: list[Slot], local: bool, command: list[str]) -> None:
        self.name = name
        self.slots = slots
        self.local = local
        self.hello: dict[str, Any] | None = None
        self.running = {slot.rank for slot in slots}
        self.gone = False  # nothing more will be reported
        self.alive_at = float("inf")  # time of its last sign of life, once it has a job
        self._sending = threading.Lock()
        self.last_words = ""  # of ssh or of the agent itself
        self._received = b""
        self._marked = False
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the launcher alone to act on
        )
        if not local:
            source = Path(agent.__file__).read_bytes()
            self.send(b"%d\n" % len(source) + source)

    def send(self, data: bytes) -> None:
        pipe = _present(self.process.stdin)
        with self._sending:
            try:
                pipe.write(data)
                pipe.flush()
            except OSError:
                pass  # its end is noticed where its reports are read

    def send_heartbeat(self) -> None:
        """A sign of life, unless one is under way already; never blocks, from any thread."""
        if self._sending.acquire(blocking=False):
            try:
                pipe = _present(self.process.stdin)
                room = select.poll()
                room.register(pipe, select.POLLOUT)
                if room.poll(0):
                    os.write(pipe.fileno(), b"\n")
            except (OSError, ValueError):  # it has ended, or its pipes are closed
                pass
            finally:
                self._sending.release()

    def suspend(self) -> bool:
        """Have the agent expect no sign of life until resume(), which must follow if this is true.

        Also from within a signal handler: gives up where the interrupted code is sending.
        """
        if not self._sending.acquire(timeout=_KILL_SECONDS / 4):
            return False
        try:
            os.write(_present(self.process.stdin).fileno(), b"WAIT\n")
        except (OSError, ValueError):
            pass
        return True

    def resume(self) -> None:
        self._sending.release()
        self.send_heartbeat()

    def frames(self, data: bytes) -> list[tuple[bytes, int, bytes]]:
        """The whole frames that `data` completes: (kind, rank, content)."""
        self._received += data
        if not self._marked:
            _, mark, rest = self._received.partition(agent.MARK)
            if not mark:
                return []
            self._marked, self._received = True, rest
        frames = []
        start = 0
        while len(self._received) - start >= agent.FRAME.size:
            kind, rank, size = agent.FRAME.unpack_from(self._received, start)
            end = start + agent.FRAME.size + size
            if end > len(self._received):
                break
            frames.append((kind, rank, self._received[start + agent.FRAME.size : end]))
            start = end
        self._received = self._received[start:]
        return frames

    def kill_ranks(self) -> None:
        """At once, whatever else is going on; also from within a signal handler."""
        try:
            os.write(_present(self.process.stdin).fileno(), b"\nKILL\n")
            self.process.wait(_KILL_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            self.kill()

    def close(self) -> None:
        """Let go of the agent's pipes, once it has ended."""
        with self._sending:  # a heartbeat must not go to whoever gets the descriptor next
            for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
                try:
                    _present(pipe).close()
                except OSError:  # what was still to be sent to it
                    pass

    def kill(self) -> None:
        """The agent's ranks die with it; those of another host end when ssh does."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)


def is_local(name: str) -> bool:
    """Whether `name` is this very host, so that no ssh is needed.

    An alias from ssh's configuration does not count.
    """
    here = socket.gethostname()
    if name in ("localhost", "127.0.0.1", "::1", here, here.partition(".")[0]):
        return True
    return real_name(name) == name and is_own_address(name)


def local_command() -> list[str]:
    # The end of its standard input alone tells it of the launcher's end.
    return [sys.executable, "-S", "-E", agent.__file__, "0"]


def ssh_command(
    name: str,
    timeout: int,
    port: int | None = None,
    identity_file: str | None = None,
    *,
    accept_new_keys: bool = False,
    silence: float = SILENCE_SECONDS,
) -> list[str]:
    """ssh that runs the agent it reads from standard input: no command line has a secret.

    silence: seconds after which agent and launcher take each other for lost.
    The user's ssh configuration decides which host keys are good, unless accept_new_keys also
    admits hosts that known_hosts does not list.
    """
    bootstrap = "import sys;r=sys.stdin.buffer;exec(r.read(int(r.readline())))"
    shell = f'p={shlex.quote(sys.executable)}; [ -x "$p" ] || p=python3; '
    shell += f'exec "$p" -S -E -c "{bootstrap}" {silence:g}'
    command = ["ssh", "-T", "-o", "BatchMode=yes", "-o", "LogLevel=ERROR"]
    command += ["-o", "ServerAliveInterval=15", "-o", f"ConnectTimeout={timeout}"]
    if accept_new_keys:
        command += ["-o", "StrictHostKeyChecking=accept-new"]
    if port is not None:
        command += ["-p", str(port)]
    if identity_file is not None:
        command += ["-i", identity_file]
    return [*command, "--", name, "exec /bin/sh -c " + shlex.quote(shell)]


def real_name(name: str) -> str:
    """The host name that ssh's configuration gives for `name`, else `name`."""
    try:
        output = subprocess.run(
            ["ssh", "-G", "--", name], capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return name
    for line in output.splitlines():
        if line.startswith("hostname "):
            return line.partition(" ")[2]
    return name


def _present(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe

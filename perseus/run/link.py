"""The launcher's connection to the agent of one host, which is a child process or runs over ssh.

Single-threaded, except for send_heartbeat().
"""

from __future__ import annotations

import os
import resource
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

from perseus.run import agent
from perseus.run.bootstrap.addresses import is_own_address
from perseus.run.reports import Hello, Reports

KILL_SECONDS = 2.0
SILENCE_SECONDS = 30.0


class HostLink:
    """The connection to the agent of one host, and what is known about it and its ranks."""

    def __init__(
        self,
        name: str,
        numbers: list[int],
        local: bool,
        command: list[str],
        descriptors: int | None = None,
    ) -> None:
        """Start an agent by a command.

        numbers: those of the processes that it will run. descriptors: how many files it may open
        at first; None = as many as this process.
        """
        self.name = name
        self.local = local
        self.hello: Hello | None = None
        self.running = set(numbers)
        self.shared_by = len(numbers)  # the ranks among which the host's cores are divided
        self.start_by = float("inf")  # when the agent must have answered
        self.numbers = numbers
        self.given_job = False
        self.lost = False  # given up
        self.gone = False  # the agent has ended
        self.alive_at = float("inf")  # time of the last sign of life, once the agent has a job
        self._sending = threading.Lock()
        self.last_error = ""  # the last line that ssh or the agent wrote to standard error
        self.reports = Reports(numbers)
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # so that Ctrl-C reaches the launcher only
        )
        if descriptors is not None:
            self._limit(descriptors)
        if not local:
            source = Path(agent.__file__).read_bytes()
            self.send(b"%d\n" % len(source) + source)

    def send(self, data: bytes) -> None:
        """Send bytes to the agent, or nothing if it has ended. Blocks while its pipe is full."""
        pipe = opened(self.process.stdin)
        with self._sending:
            try:
                pipe.write(data)
                pipe.flush()
            except OSError:
                pass  # the launcher notices the agent's end when it reads its frames

    def send_heartbeat(self) -> None:
        """Send a heartbeat, unless other data is being sent. Never blocks. Thread-safe."""
        if self._sending.acquire(blocking=False):
            try:
                pipe = opened(self.process.stdin)
                room = select.poll()
                room.register(pipe, select.POLLOUT)
                if room.poll(0):
                    os.write(pipe.fileno(), b"\n")
            except (OSError, ValueError):  # the agent has ended, or its pipes are closed
                pass
            finally:
                self._sending.release()

    def suspend(self) -> bool:
        """Tell the agent to expect no heartbeats until resume().

        Returns whether the agent was told; resume() must follow if so. May be called in a signal
        handler, and returns false if the handler has interrupted code that was sending.
        """
        if not self._sending.acquire(timeout=KILL_SECONDS / 4):
            return False
        try:
            os.write(opened(self.process.stdin).fileno(), b"WAIT\n")
        except (OSError, ValueError):
            pass
        return True

    def resume(self) -> None:
        """Let the agent expect heartbeats again."""
        self._sending.release()
        self.send_heartbeat()

    def _limit(self, descriptors: int) -> None:
        try:
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE, (descriptors, hard))
        except OSError:  # it has ended, or this process may not do so: then it has ours
            pass

    def order_to_kill(self) -> None:
        """Have the agent kill its ranks at once. Never blocks, even in a signal handler."""
        try:
            pipe = opened(self.process.stdin)
            room = select.poll()
            room.register(pipe, select.POLLOUT)
            if not room.poll(0):
                self.kill()
            else:
                os.write(pipe.fileno(), b"\nKILL\n")
        except (OSError, ValueError):
            self.kill()

    def wait_or_kill(self, deadline: float) -> None:
        """Wait until the agent has ended, or kill it at this time.monotonic()."""
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()

    def close(self) -> None:
        """Close the agent's pipes, once it has ended."""
        with self._sending:  # a heartbeat must not go to another file with the same descriptor
            for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
                try:
                    opened(pipe).close()
                except OSError:  # buffered data could not be sent
                    pass

    def kill(self) -> None:
        """Kill the agent. A local agent's ranks, but not their children, die with it; a remote one
        ends when ssh does."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)


def is_local(name: str) -> bool:
    """Return whether `name` is this host, so that no ssh is needed.

    An alias in ssh's configuration counts as another host.
    """
    name = name.lower()  # as ssh has it
    here = socket.gethostname().lower()
    if name in ("localhost", "127.0.0.1", "::1", here, here.partition(".")[0]):
        return True
    if real_name(name) != name:
        return False
    return any(is_own_address(name, family) for family in (socket.AF_INET, socket.AF_INET6))


def local_command() -> list[str]:
    """Return the command that starts an agent on this host."""
    # It needs no heartbeats (0): the kernel closes its standard input when the launcher ends.
    return [sys.executable, "-I", "-S", agent.__file__, "0"]


def ssh_command(
    name: str,
    timeout: int,
    port: int | None = None,
    identity_file: str | None = None,
    *,
    accept_new_keys: bool = False,
    silence: float = SILENCE_SECONDS,
) -> list[str]:
    """Return the ssh command that starts an agent on another host.

    The agent's source and the job are read from standard input, so no command line shows a secret.

    timeout: seconds for ssh to connect.
    accept_new_keys: also trust hosts that known_hosts does not list; otherwise the user's ssh
        configuration decides.
    silence: seconds without a sign of life after which agent and launcher count each other as lost.
    """
    # -I: files in the home directory, where ssh starts it, must not take the place of modules.
    bootstrap = "import sys;r=sys.stdin.buffer;exec(r.read(int(r.readline())))"
    shell = f'p={shlex.quote(sys.executable)}; [ -x "$p" ] || p=python3; '
    shell += f'exec "$p" -I -S -c "{bootstrap}" {silence:g}'
    command = ["ssh", "-T", "-o", "BatchMode=yes", "-o", "LogLevel=ERROR"]
    command += ["-o", "ServerAliveInterval=15", "-o", f"ConnectTimeout={timeout}"]
    # It may use a connection that the user shares, but other jobs must not come to use this one,
    # which ends, or is killed, with its own job.
    command += ["-o", "ControlMaster=no"]
    if accept_new_keys:
        command += ["-o", "StrictHostKeyChecking=accept-new"]
    if port is not None:
        command += ["-p", str(port)]
    if identity_file is not None:
        command += ["-i", identity_file]
    return [*command, "--", name, "exec /bin/sh -c " + shlex.quote(shell)]


def real_name(name: str) -> str:
    """Return the host name to which ssh's configuration maps `name`; `name` itself if to none."""
    try:
        output = subprocess.run(
            ["ssh", "-G", "--", name],
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=10,
            check=True,
        ).stdout
    except (OSError, ValueError, subprocess.SubprocessError):  # ValueError: no possible name
        return name
    for line in output.splitlines():
        if line.startswith("hostname "):
            return line.partition(" ")[2]
    return name


def opened(pipe: IO[bytes] | None) -> IO[bytes]:
    """Return a pipe that an agent has."""
    assert pipe is not None
    return pipe

"""perseusrun when the connection to a host breaks, or outlives its agent."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from perseusrun_command import Running, environment, eventually

from perseus.run import agent, launch
from perseus.run.hosts import Slot
from perseus.run.job import Job
from perseus.run.launch import Launcher

_HELLO = {"cores": 2, "ssh_connection": "127.0.0.1 5 127.0.0.1 22"}
_LINES = b"".join(b"line %04d\n" % i for i in range(6000))  # with prefixes, more than a pipe holds


def fake_ssh(directory: Path, script: str) -> str:
    """Put an ssh into a directory; return the PATH with which perseusrun finds it.

    It knows no real names (-G).
    """
    ssh = directory / "ssh"
    ssh.write_text(f'#!/bin/sh\n[ "$1" = -G ] && exit 1\ncd "{directory}"\n{script}\n')
    ssh.chmod(0o755)
    return os.pathsep.join([str(directory), os.environ["PATH"]])


def frame(kind: bytes, content: bytes) -> bytes:
    """What the agent of rank 1 says."""
    return agent.FRAME.pack(kind, 1, len(content)) + content


@pytest.mark.parametrize("flags", [[], ["--min-np", "1"]], ids=["fixed", "elastic"])
def test_a_host_is_lost_while_nobody_reads_the_output(flags: list[str], tmp_path: Path) -> None:
    """The ends of both its pipes wait for perseusrun at the same time, and one stays open."""
    said = agent.MARK + frame(agent.HELLO, json.dumps(_HELLO).encode()) + frame(agent.OUT, _LINES)
    (tmp_path / "said").write_bytes(said)
    path = fake_ssh(
        tmp_path,
        "cat said; until [ -e go ]; do sleep 0.05; done\n"
        "echo Connection closed by far >&2; exec >&-; sleep 300 & echo $! >holder; exit 255",
    )
    command = ["-np", "2", *flags, "-H", "localhost:1,far:1", "sleep", "300"]
    with Running(*command, env=environment(PATH=path)) as job:
        assert job.process.stdout is not None
        assert os.read(job.process.stdout.fileno(), 1) == b"["
        (tmp_path / "go").touch()
        holder = tmp_path / "holder"
        assert eventually(lambda: holder.exists() and holder.read_text().endswith("\n"))
        try:
            status, output, errors = job.finish()
        finally:
            os.kill(int(holder.read_text()), signal.SIGKILL)
    assert status == 1, errors
    assert output.count("1]<stdout>:line ") == 6000
    assert "far: the connection broke while ranks [1] ran: Connection closed by far" in errors
    assert "Traceback" not in errors


def test_a_connection_that_outlives_the_agent_does_not_fail_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What the login shell has started keeps it open. Of the rank, something is left that ignores
    SIGTERM and says more after the rank's end."""
    ssh = 'for last; do :; done; sleep 300 & sh -c "$last"; wait'
    monkeypatch.setenv("PATH", fake_ssh(tmp_path, ssh))
    monkeypatch.setattr(launch, "_AGENT_GRACE", 6)
    rank = 'trap "" TERM; (sleep 1.5; echo last) & echo first'
    job = Job(["sh", "-c", rank], [Slot(0, "far", 0, 1, 0, 1)], silence=12.0)
    assert Launcher(job).run() == 0
    assert capfd.readouterr() == ("[0]<stdout>:first\n[0]<stdout>:last\n", "")

"""Agents, ranks and a perseusrun that say what they never say: the other side ends in one line."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest
from perseusrun_command import environment, perseusrun

from perseus.run import agent
from perseus.run.bootstrap.membership import Membership
from perseus.run.reports import MOST_BYTES, Reports

GARBAGE = {
    "kind": (agent.FRAME.pack(b"?", 0, 0), r"a report of kind b'?'"),
    "process": (
        agent.FRAME.pack(agent.EXIT, 9, 1) + b"1",
        "a report about process 9, which it does not run",
    ),
    "size": (agent.FRAME.pack(agent.HELLO, 0, MOST_BYTES + 1), f"{MOST_BYTES + 1} bytes at once"),
    "hello": (
        agent.FRAME.pack(agent.HELLO, 0, 2) + b"[]",
        "a first report that does not describe a host",
    ),
    "status": (agent.FRAME.pack(agent.EXIT, 0, 2) + b"-1", "b'-1' instead of a number"),
}


@pytest.mark.parametrize("kind", GARBAGE)
@pytest.mark.parametrize("flags", [[], ["--min-np", "1"]], ids=["fixed", "elastic"])
def test_a_host_that_sends_garbage_is_named(flags: list[str], kind: str, tmp_path: Path) -> None:
    content, reason = GARBAGE[kind]
    (tmp_path / "said").write_bytes(b"Welcome!\n" + agent.MARK + content)
    ssh = tmp_path / "ssh"  # -G asks for a host's real name
    ssh.write_text(
        f'#!/bin/sh\n[ "$1" = -G ] && exit 1\ncat "{tmp_path}/said"\nexec cat >/dev/null\n'
    )
    ssh.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    done = perseusrun(
        *("-np", "1", *flags, "-H", "elsewhere.example", "true"),
        env=environment(PATH=path),
        timeout=60,
    )
    assert done.returncode == 1
    expected = f"elsewhere.example: its agent has sent what no agent sends ({reason})"
    assert expected in done.stderr
    assert len(done.stderr.splitlines()) <= 4
    assert "Traceback" not in done.stderr


def test_a_long_greeting_does_not_fill_the_memory() -> None:
    reports = Reports([0])
    for _ in range(100):
        assert reports.read(b"x" * 1000 + agent.MARK[:-1]) == []
    assert len(reports._received) < len(agent.MARK)
    (alive,) = reports.read(agent.MARK[-1:] + agent.FRAME.pack(agent.ALIVE, 0, 0))
    assert alive.kind == agent.ALIVE


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (r'b"{}\n"', "'{}' is nothing that a rank says"),
        (r'b"\xff" * 70 + b"\n"', "… is nothing that a rank says"),
        (f'b"x" * {MOST_BYTES + 1}', "no line of a rank has"),
    ],
    ids=["object", "bytes", "endless"],
)
def test_a_rank_that_writes_garbage_is_killed(said: str, reason: str) -> None:
    script = (
        "import os, socket, time; s = socket.socket(fileno=int(os.environ['PERSEUS_CONTROL_FD']));"
        f"s.sendall({said}); time.sleep(300)"
    )
    done = perseusrun("-np", "1", "--min-np", "1", sys.executable, "-c", script, timeout=60)
    assert done.returncode == 137, done.stderr
    assert reason in done.stderr
    assert "it is killed" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("said", [b"[]\n", b'{"place": {}}\n', b'{"news": [1, "x"]}\n'])
def test_a_rank_does_not_wait_for_a_strange_perseusrun(said: bytes) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        member = Membership(ours.detach())
        theirs.sendall(said)
        with pytest.raises(RuntimeError, match="is nothing that perseusrun says"):
            member.join()
    member._socket.close()

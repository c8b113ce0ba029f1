"""Virtual hosts behave as hosts: separate, as slow as asked for, and gone with their owner."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from perseus.bench.virtual_hosts import VirtualHosts, bits_per_second, sweep, unavailable

if reason := unavailable():
    pytest.skip(reason, allow_module_level=True)

# One connection that carries this many bytes from host 1 to host 0, and the seconds it took.
_BYTES = 5_000_000
_TRANSFER = f"""
import os, socket, time
if os.environ["HOST"] == "0":
    server = socket.create_server(("", 5000))
    peer, _ = server.accept()
    start, left = time.monotonic(), {_BYTES}
    while left: left -= len(peer.recv(min(left, 1 << 20)))
    print(time.monotonic() - start)
else:
    for _ in range(200):
        try: peer = socket.create_connection(("host0", 5000)); break
        except OSError: time.sleep(0.02)
    peer.sendall(bytes({_BYTES}))
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[VirtualHosts]:
    with VirtualHosts(3, rate="100mbit", links=2) as made:
        yield made


def existing(directory: str) -> bool:
    """Whether anything of a set of hosts is left: its directory or a process that knows it."""
    if Path(directory).exists():
        return True
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if directory.encode() in command.read_bytes():
                return True
        except OSError:
            continue
    return False


def test_hosts_have_names_addresses_and_processes_of_their_own(hosts: VirtualHosts) -> None:
    for i in range(3):
        lines = hosts.run(i, ["sh", "-c", "hostname; ip -br -4 address"]).stdout.splitlines()
        assert lines[0] == f"host{i}"
        addresses = [line.split()[-1] for line in lines if line.startswith("eth")]
        assert addresses == [f"10.77.0.{i + 1}/24", f"10.77.1.{i + 1}/24"]
        servers = [line for line in hosts.command_lines(i) if line.startswith("sshd")]
        assert len(servers) == 1 and f"host{i}_sshd_config" in servers[0]


def test_shared_memory_is_not_shared_between_hosts(hosts: VirtualHosts) -> None:
    hosts.run(0, ["sh", "-c", "echo 0 > /dev/shm/perseus-test"])
    assert hosts.run(0, ["cat", "/dev/shm/perseus-test"]).stdout == "0\n"
    assert hosts.run(1, ["ls", "/dev/shm"]).stdout == ""
    assert not Path("/dev/shm/perseus-test").exists()


def test_ssh_knows_the_hosts_by_name(hosts: VirtualHosts) -> None:
    result = hosts.run(0, ["ssh", "host2", "hostname; echo $SSH_CONNECTION; exit 7"], timeout=60)
    assert result.returncode == 7, result.stderr
    assert result.stdout.splitlines()[0] == "host2"
    assert result.stdout.splitlines()[1].startswith("10.77.0.1 ")


def test_rate_is_kept_and_bytes_are_counted(hosts: VirtualHosts) -> None:
    # How much less a busy machine moves says nothing about the link: the kernel has its rate.
    for i in range(3):
        for link in range(2):
            limit = hosts.run(i, ["tc", "qdisc", "show", "dev", f"eth{link}"]).stdout
            assert re.search(r"\btbf\b.* rate 100Mbit\b", limit), limit
    before = [hosts.counters(i)[0] for i in range(3)]
    environments = [{**hosts.environment(), "HOST": str(i)} for i in range(2)]
    processes = [
        hosts.popen(
            i, [sys.executable, "-c", _TRANSFER], env=env, stdout=subprocess.PIPE, text=True
        )
        for i, env in enumerate(environments)
    ]
    seconds = float(processes[0].communicate(timeout=300)[0])
    processes[1].communicate(timeout=300)
    assert _BYTES * 8 / seconds < 1.05 * 100e6
    moved = [hosts.counters(i)[0] - before[i] for i in range(3)]
    assert _BYTES < moved[0].received_bytes < 1.1 * _BYTES
    assert _BYTES < moved[1].sent_bytes < 1.1 * _BYTES
    assert moved[0].sent_bytes < 0.1 * _BYTES > moved[1].received_bytes
    assert moved[2].received_bytes < 0.1 * _BYTES


def test_cable_can_be_pulled(hosts: VirtualHosts) -> None:
    def reached(seconds: float) -> bool:
        probe = f"import socket; socket.create_connection(('10.77.1.3', 22), {seconds})"
        return hosts.run(0, [sys.executable, "-c", probe]).returncode == 0

    assert reached(30)
    hosts.set_link(2, up=False, link=1)
    try:
        assert not reached(0.5)
    finally:
        hosts.set_link(2, up=True, link=1)
    deadline = time.monotonic() + 60
    while not reached(5):
        assert time.monotonic() < deadline


def test_command_reports_its_end_and_takes_signals(hosts: VirtualHosts) -> None:
    assert hosts.run(1, ["sh", "-c", "exit 9"]).returncode == 9
    assert hosts.run(1, ["no-such-command"]).returncode == 127
    sleeper = hosts.popen(1, ["sh", "-c", "echo up; exec sleep 60"], stdout=subprocess.PIPE)
    assert sleeper.stdout is not None
    sleeper.stdout.readline()
    sleeper.send_signal(signal.SIGTERM)
    sleeper.communicate(timeout=60)
    assert sleeper.returncode == 128 + signal.SIGTERM


def test_killed_host_takes_its_processes_along() -> None:
    with VirtualHosts(2, ssh=False) as pair:
        sleeper = pair.popen(1, ["sh", "-c", "echo up; sleep 60"], stdout=subprocess.PIPE)
        assert sleeper.stdout is not None
        sleeper.stdout.readline()
        pair.kill(1)
        sleeper.communicate(timeout=60)
        assert sleeper.returncode == 128 + signal.SIGKILL
        assert pair.run(0, ["hostname"]).stdout == "host0\n"


_OWNER = """
import sys, time
from perseus.bench.virtual_hosts import VirtualHosts
hosts = VirtualHosts(2).start()
background = hosts.popen(1, ["sh", "-c", "sleep 60 & sleep 60"])
print(hosts.ssh_config.parent, flush=True)
if "raise" in sys.argv: raise SystemExit(1)
time.sleep(60)
"""


@pytest.mark.parametrize("end", ["kill", "terminate", "interrupt", "raise"])
def test_nothing_outlives_the_owner(end: str) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER, end],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert owner.stdout is not None
    directory = owner.stdout.readline().strip()
    signals = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "interrupt": signal.SIGINT}
    if end in signals:
        assert existing(directory)
        owner.send_signal(signals[end])
    owner.communicate(timeout=60)
    deadline = time.monotonic() + 60
    while existing(directory) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not existing(directory)


def test_sweep_removes_what_dead_owners_left_and_nothing_else(
    hosts: VirtualHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    gone = subprocess.Popen(["true"])
    gone.wait()
    # This process's number with another start time: the number was used again.
    dead = [
        tmp_path / f"perseus-hosts-{gone.pid}-123-x",
        tmp_path / f"perseus-hosts-{os.getpid()}-1-x",
    ]
    living = tmp_path / hosts.ssh_config.parent.name
    for directory in (*dead, living, tmp_path / "perseus-hosts-of-somebody"):
        directory.mkdir()
    leftover = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()", str(dead[0])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert leftover.stdin is not None and leftover.stdout is not None
    leftover.stdout.readline()  # Popen returns before the kernel shows the new command line.
    assert sorted(sweep()) == sorted(str(directory) for directory in dead)
    assert leftover.wait(timeout=60) == -signal.SIGKILL
    leftover.stdin.close()
    leftover.stdout.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [living.name, "perseus-hosts-of-somebody"]
    )


def test_rates_are_read() -> None:
    assert bits_per_second("1gbit") == 10**9
    assert bits_per_second("2.5Mbit") == 2_500_000
    for text in ("1", "fast", "1gb", "-1gbit"):
        with pytest.raises(ValueError, match="expected a number with kbit, mbit or gbit"):
            bits_per_second(text)
    for text in ("0mbit", "0.9kbit"):
        with pytest.raises(ValueError, match="expected 1kbit or more"):
            bits_per_second(text)


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        (["--hosts", "2", "--"], "expected a command, such as"),
        (["--rate", "0mbit", "true"], "rate '0mbit': expected 1kbit or more"),
        (["--on", "host2", "true"], "--on host2: expected one of host0, host1"),
    ],
)
def test_command_line_refuses_what_it_cannot_run(arguments: list[str], fact: str) -> None:
    command = [sys.executable, "-m", "perseus.bench.virtual_hosts", "run", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert fact in result.stderr.splitlines()[-1]


def test_tools_of_root_need_not_be_on_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for tool in ("sh", "unshare", "nsenter", "ssh", "ssh-keygen", "true"):
        (tmp_path / tool).symlink_to(shutil.which(tool) or tool)
    monkeypatch.setenv("PATH", str(tmp_path))
    with VirtualHosts(1, ssh=False) as alone:
        assert alone.counters(0)[0].sent_bytes >= 0


def test_command_line_runs_on_every_host() -> None:
    command = [
        sys.executable,
        "-m",
        "perseus.bench.virtual_hosts",
        "run",
        "--hosts",
        "2",
        "--",
        "sh",
        "-c",
        "hostname; exit 3",
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 3
    assert sorted(result.stdout.splitlines()) == ["host0", "host1"]
    assert "host1 eth0: " in result.stderr

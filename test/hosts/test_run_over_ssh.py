"""perseusrun over ssh, and ranks started by hand, across virtual hosts."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from perseus.bench.virtual_hosts import VirtualHosts, unavailable

if reason := unavailable():
    pytest.skip(reason, allow_module_level=True)

_ROOT = Path(__file__).resolve().parents[2]

# Joins the world and says where this rank is in it.
_WORLD = """
import socket
from perseus import basics
basics.init()
print(socket.gethostname(), basics.rank(), basics.size(), basics.local_rank(), basics.local_size(),
      basics.cross_rank(), basics.cross_size(), flush=True)
{use}
basics.shutdown()
"""
_ALLREDUCE = """
import torch
import perseus.torch.horovod as hvd
values = torch.arange(5.0) + 10.0 ** hvd.rank()
total = hvd.allreduce(values, op=hvd.Sum)
expected = [sum(i + 10.0 ** r for r in range(hvd.size())) for i in range(5)]
assert total.tolist() == expected, total
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[VirtualHosts]:
    with VirtualHosts(2) as made:
        yield made


def environment(hosts: VirtualHosts, **changes: str) -> dict[str, str]:
    return {**hosts.environment(), "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1", **changes}


def perseusrun(
    hosts: VirtualHosts, *arguments: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "perseus.run", *arguments]
    return hosts.run(0, command, env=env or environment(hosts), timeout=300)


def test_ranks_are_placed_and_named_as_written(hosts: VirtualHosts) -> None:
    names = "$PERSEUS_RANK $PERSEUS_LOCAL_RANK/$PERSEUS_LOCAL_SIZE $PERSEUS_CROSS_RANK"
    result = perseusrun(
        hosts, "-np", "3", "-H", "host1:2,host0:2",
        "sh", "-c", f"echo $(hostname) {names}/$PERSEUS_CROSS_SIZE $HOROVOD_HOSTNAME",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [
        "[0]<stdout>:host1 0 0/2 0/2 host1",
        "[1]<stdout>:host1 1 1/2 0/1 host1",
        "[2]<stdout>:host0 2 0/1 1/2 host0",
    ]


def test_world_forms_across_hosts(hosts: VirtualHosts, tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("host0 slots=2\nhost1 slots=2\n")
    before = hosts.counters(1)[0]
    result = perseusrun(
        hosts, "-np", "4", "--hostfile", str(hostfile), sys.executable, "-c", _WORLD.format(use="")
    )
    assert result.returncode == 0, result.stderr
    lines = sorted(line.partition(":")[2] for line in result.stdout.splitlines())
    assert lines == [
        "host0 0 4 0 2 0 2",
        "host0 1 4 1 2 0 2",
        "host1 2 4 0 2 1 2",
        "host1 3 4 1 2 1 2",
    ]
    assert (hosts.counters(1)[0] - before).received_bytes > 1000


def test_environment_travels_but_not_what_belongs_to_a_host(hosts: VirtualHosts) -> None:
    env = environment(hosts, CUDA_VISIBLE_DEVICES="3", OLDPWD="/old", TEXT="a 'b' \"$c\"\né")
    show = (
        "import os; print([os.environ.get(n) for n in ('CUDA_VISIBLE_DEVICES', 'OLDPWD', 'TEXT')])"
    )
    arguments = ["-np", "1", "-H", "host1", sys.executable, "-c", show]
    assert perseusrun(hosts, *arguments, env=env).stdout == (
        f"[0]<stdout>:{[None, None, env['TEXT']]}\n"
    )


def test_no_secret_is_on_any_command_line_of_any_host(hosts: VirtualHosts, tmp_path: Path) -> None:
    # Namespaces of processes differ, so each rank looks at its own host's. It does once both are
    # up, and with them all that is needed to start them.
    look = (
        f"import os, pathlib; up = pathlib.Path({str(tmp_path)!r});"
        "up.joinpath(os.environ['PERSEUS_RANK']).touch()\n"
        "while len(list(up.iterdir())) < 2: pass\n"
        "secret = os.environ['PERSEUS_SECRET'].encode();"
        "lines = [p.read_bytes() for p in pathlib.Path('/proc').glob('[0-9]*/cmdline')];"
        "print(len(lines) > 3, sum(secret in line for line in lines))"
    )
    result = perseusrun(hosts, "-np", "2", "-H", "host0,host1", sys.executable, "-c", look)
    assert [line.partition(":")[2] for line in result.stdout.splitlines()] == ["True 0"] * 2


def test_working_directory_is_the_launchers(hosts: VirtualHosts, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "perseus.run", "-np", "2", "-H", "host0,host1", "pwd"]
    result = hosts.run(0, command, env=environment(hosts), cwd=tmp_path, timeout=300)
    lines = sorted(result.stdout.splitlines())
    assert lines == [f"[0]<stdout>:{tmp_path}", f"[1]<stdout>:{tmp_path}"]


def test_failure_on_another_host_ends_the_job_and_leaves_nothing(hosts: VirtualHosts) -> None:
    script = "[ $PERSEUS_RANK = 1 ] && exit 5; sleep 601 & sleep 601"
    result = perseusrun(hosts, "-np", "3", "-H", "host0,host1:2", "sh", "-c", script)
    assert result.returncode == 5
    assert "Process 1 exit with status code 5." in result.stderr
    assert "rank 1 on host1 was the first to fail" in result.stderr
    for host in range(2):
        assert "sleep 601" not in hosts.command_lines(host)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_end_of_the_launcher_ends_ranks_of_other_hosts(hosts: VirtualHosts, number: int) -> None:
    # SIGKILL cannot be handed on, so the launcher's number comes from its own host.
    command = [sys.executable, "-m", "perseus.run", "-np", "2", "-H", "host0,host1"]
    job = hosts.popen(
        0,
        ["sh", "-c", 'echo $$; exec "$@"', "sh", *command, "sh", "-c", "echo up; sleep 602"],
        env=environment(hosts),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert job.stdout is not None
    pid = job.stdout.readline().strip()
    assert [job.stdout.readline()[3:] for _ in range(2)] == ["<stdout>:up\n"] * 2
    hosts.run(0, ["sh", "-c", f"kill -{int(number)} {pid}"])
    output, _ = job.communicate(timeout=300)
    assert (job.returncode, output) == (128 + number, "")
    deadline = time.monotonic() + 300
    while any("sleep 602" in hosts.command_lines(host) for host in range(2)):
        assert time.monotonic() < deadline
        time.sleep(0.1)


# perseusrun with a shorter clock: as many seconds of silence as its first argument says.
_IMPATIENT = """
import sys
from perseus.run.hosts import parse_hosts, place
from perseus.run.launch import Job, Launcher, LaunchError
slots = place(parse_hosts("host0,host1"), 2)
try:
    sys.exit(Launcher(Job(sys.argv[2:], slots, silence=float(sys.argv[1]))).run())
except LaunchError as error:
    sys.exit(str(error))
"""


def job_with_a_short_clock(
    hosts: VirtualHosts, seconds: float, script: str
) -> subprocess.Popen[str]:
    launcher = [sys.executable, "-c", _IMPATIENT, str(seconds), "sh", "-c", script]
    # Signals reach the launcher through its own host.
    return hosts.popen(
        0,
        ["sh", "-c", 'echo $$; exec "$@"', "sh", *launcher],
        env=environment(hosts),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("script", ["sleep 604", "sleep 604 & yes"])
def test_both_sides_end_when_the_network_between_them_vanishes(
    hosts: VirtualHosts, script: str, tmp_path: Path
) -> None:
    """No end of a connection tells them. The second script's agent is stuck in a report."""
    job = job_with_a_short_clock(hosts, 3, f"touch {tmp_path}/$PERSEUS_RANK; {script}")
    assert job.stdout is not None and job.stderr is not None
    drain = threading.Thread(target=job.stdout.read)
    drain.start()
    deadline = time.monotonic() + 300
    while len(list(tmp_path.iterdir())) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    hosts.set_link(0, up=False)
    try:
        errors = job.stderr.read()
        assert job.wait(300) == 1
        while any("sleep 604" in line or "r.readline" in line for line in hosts.command_lines(1)):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert "sleep 604" not in hosts.command_lines(0)
    finally:
        hosts.set_link(0, up=True)
        while hosts.run(0, ["ssh", "host1", "true"]).returncode != 0:
            assert time.monotonic() < deadline
    drain.join()
    job.communicate()  # closes its pipes
    assert errors.splitlines() == [
        "host1: no sign of life for 3 s while ranks [1] ran: the host or the network to it is "
        "down; its ranks end by themselves"
    ]


def test_stopped_launcher_is_not_taken_for_lost(hosts: VirtualHosts, tmp_path: Path) -> None:
    go = tmp_path / "go"
    script = f"echo up; until [ -f {go} ]; do sleep 0.05; done; [ $PERSEUS_RANK = 0 ] || exit 7"
    job = job_with_a_short_clock(hosts, 3, script)
    assert job.stdout is not None and job.stderr is not None
    pid = job.stdout.readline().strip()
    lines = [job.stdout.readline()[3:] for _ in range(2)]
    assert lines == ["<stdout>:up\n"] * 2, job.stderr.read()
    hosts.run(0, ["kill", "-TSTP", pid])
    stopped = ["sh", "-c", f"until grep -q ') T' /proc/{pid}/stat; do sleep 0.01; done"]
    assert hosts.run(0, stopped).returncode == 0
    time.sleep(5)  # what is tested: longer than silence may last
    assert any(str(go) in line for line in hosts.command_lines(1))
    hosts.run(0, ["kill", "-CONT", pid])
    go.touch()
    _, errors = job.communicate(timeout=300)
    assert job.returncode == 7, errors


def test_output_that_waits_for_its_reader_is_no_silence(hosts: VirtualHosts) -> None:
    """As in a pager: neither the launcher nor the agent gets on, yet both are well."""
    size = 5 << 20  # more than pipes and ssh hold
    script = f"[ $PERSEUS_RANK = 0 ] || head -c {size} /dev/zero | tr '\\0' x; exit $PERSEUS_RANK"
    job = job_with_a_short_clock(hosts, 2, script)
    assert job.stdout is not None
    job.stdout.readline()
    time.sleep(5)  # what is tested: nobody reads for longer than silence may last
    output, errors = job.communicate(timeout=300)
    assert job.returncode == 1 and "no sign of life" not in errors, errors
    assert output.count("x") == size


def test_results_of_functions_come_from_other_hosts(hosts: VirtualHosts) -> None:
    script = (
        "import os, socket, perseus\n"
        "def work(x):\n"
        "    if x == 3 and os.environ['PERSEUS_RANK'] == '2': raise KeyError('wrong')\n"
        "    return socket.gethostname(), x * int(os.environ['PERSEUS_RANK']), b'x' * 300_000\n"
        "found = perseus.run(work, (2,), num_proc=3, hosts='host0,host1:2')\n"
        "print([(host, number, len(data)) for host, number, data in found])\n"
        "try: perseus.run(work, (3,), num_proc=3, hosts='host0,host1:2')\n"
        "except RuntimeError as error: print(str(error).splitlines()[0], repr(error.__cause__))\n"
    )
    result = hosts.run(0, [sys.executable, "-c", script], env=environment(hosts), timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "[('host0', 0, 300000), ('host1', 2, 300000), ('host1', 4, 300000)]",
        "[run] rank 2 on host1 failed: KeyError('wrong')",
    ]


def test_unreachable_host_is_named_in_one_line(hosts: VirtualHosts) -> None:
    result = perseusrun(hosts, "-np", "2", "-H", "host0,host9", "true")
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert "host9: could not be reached by ssh: " in result.stderr


@pytest.mark.parametrize("known", ["unknown", "another key"])
def test_host_with_a_key_that_ssh_does_not_trust_gets_nothing(
    hosts: VirtualHosts, tmp_path: Path, known: str
) -> None:
    """ssh's configuration decides; --ssh-accept-new-keys admits new hosts, never a wrong key."""
    true_keys = hosts.ssh_config.with_name("known_hosts").read_text().splitlines()
    address, kind, key = true_keys[1].split()
    others = true_keys[0].split()[2]
    entry = f"{address} {kind} {others}\n" if known == "another key" else ""
    list_of_keys = tmp_path / "known_hosts"
    list_of_keys.write_text(entry)
    wrapper = tmp_path / "ssh"
    ssh = shutil.which("ssh", path=hosts.environment()["PATH"])
    wrapper.write_text(f'#!/bin/sh\nexec {ssh} -o UserKnownHostsFile={list_of_keys} "$@"\n')
    wrapper.chmod(0o755)
    env = environment(hosts)
    env["PATH"] = f"{tmp_path}:{env['PATH']}"
    seen = tmp_path / "ran"
    tell = f"echo $PERSEUS_SECRET > {seen}$PERSEUS_RANK"
    job = ["-np", "2", "-H", "host0,host1", "sh", "-c", tell]
    refused = perseusrun(hosts, *job, env=env)
    assert refused.returncode == 1
    assert refused.stderr.splitlines() == [
        "perseusrun: error: host1: could not be reached by ssh: Host key verification failed.; "
        "'ssh host1' shows why: accept the key there if the host is new, or give "
        "--ssh-accept-new-keys"
    ]
    assert not list(tmp_path.glob("ran*")) and list_of_keys.read_text() == entry
    accepted = perseusrun(hosts, "--ssh-accept-new-keys", *job, env=env)
    if known == "unknown":
        assert accepted.returncode == 0, accepted.stderr
        assert len(list(tmp_path.glob("ran*"))) == 2
        assert key in list_of_keys.read_text()
    else:
        assert accepted.stderr == refused.stderr
        assert not list(tmp_path.glob("ran*")) and list_of_keys.read_text() == entry


def test_silent_host_is_given_up_after_the_start_timeout(hosts: VirtualHosts) -> None:
    hosts.set_link(1, up=False)
    started = time.monotonic()
    try:
        result = perseusrun(hosts, "-np", "2", "-H", "host0,host1", "--start-timeout", "2", "true")
    finally:
        hosts.set_link(1, up=True)
    assert time.monotonic() - started < 60
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert "host1" in result.stderr


def test_interface_that_a_variable_names_has_the_store() -> None:
    show = "echo $PERSEUS_RENDEZVOUS_ADDR"
    with VirtualHosts(2, links=2) as pair:
        for name, address in (("eth1", "10.77.1.1"), ("eth0", "10.77.0.1"), ("nope0", "10.77.0.1")):
            env = environment(pair, PERSEUS_GLOO_NETWORK_INTERFACE=name)
            for flags in ([], ["--min-np", "1"]):
                arguments = ["-np", "2", *flags, "-H", "host0,host1", "sh", "-c", show]
                shown = perseusrun(pair, *arguments, env=env).stdout.splitlines()
                assert sorted(shown) == [f"[{rank}]<stdout>:{address}" for rank in (0, 1)]


def test_interface_decides_the_address(hosts: VirtualHosts) -> None:
    show = "echo $PERSEUS_RENDEZVOUS_ADDR $PERSEUS_GLOO_NETWORK_INTERFACE $NCCL_SOCKET_IFNAME"
    arguments = ["-np", "1", "-H", "host1", "--network-interface", "eth0", "sh", "-c", show]
    assert perseusrun(hosts, *arguments).stdout == "[0]<stdout>:10.77.0.1 eth0 =eth0\n"


@pytest.mark.skipif(find_spec("torch") is None, reason="needs PyTorch")
def test_one_tensor_travels_over_all_interfaces() -> None:
    count = 4 << 20
    program = f"""
import torch
import perseus.torch.horovod as hvd
hvd.init()
values = torch.arange({count}, dtype=torch.int32) * (hvd.rank() + 2)
total = hvd.allreduce(values, op=hvd.Sum)
assert torch.equal(total, torch.arange({count}, dtype=torch.int32) * 5)
hvd.shutdown()
"""
    with VirtualHosts(2, links=2) as pair:
        before = pair.counters(1)
        result = perseusrun(
            pair, "-np", "2", "-H", "host0,host1", "--network-interface", "eth0,eth1",
            sys.executable, "-c", program,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        sent = [(now - then).sent_bytes for now, then in zip(pair.counters(1), before, strict=True)]
        few = perseusrun(
            pair, "-np", "2", "-H", "host0,host1", "--network-interface", "eth0,eth1",
            sys.executable, "-c", program, env=environment(pair, PERSEUS_ALLREDUCE_STREAMS="1"),
        )  # fmt: skip
    assert all(0.45 * 4 * count < link < 0.65 * 4 * count for link in sent), sent
    warning = "PERSEUS_ALLREDUCE_STREAMS=1 uses 1 of the 2 interfaces that are named"
    assert (few.returncode, few.stderr.count(warning)) == (0, 1), few.stderr
    assert warning not in result.stderr


@pytest.mark.skipif(find_spec("torch") is None, reason="needs PyTorch")
def test_ranks_by_hand_meet_across_hosts(hosts: VirtualHosts) -> None:
    processes = [
        hosts.popen(
            rank,
            [sys.executable, "-c", _WORLD.format(use=_ALLREDUCE)],
            env=environment(
                hosts, RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1",
                MASTER_ADDR="host0", MASTER_PORT="29500",
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for rank, process in enumerate(processes):
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        assert re.fullmatch(rf"host{rank} {rank} 2 0 1 {rank} 2\n", output)


def test_an_elastic_job_replaces_a_rank_of_another_host(
    hosts: VirtualHosts, tmp_path: Path
) -> None:
    """Rank 1 is killed, and the survivor takes in its successor, whose agent comes over ssh."""
    plan = {"steps": 10, "size": 2, "worlds": 3, "events": [{"step": 5, "what": "kill", "rank": 1}]}
    result = perseusrun(
        hosts, "-H", "host0:1,host1:1", "--min-np", "1", "-np", "2",
        "--blacklist-cooldown-range", "1", "2", sys.executable,
        str(_ROOT / "test" / "faults" / "elastic_rank.py"), str(tmp_path), json.dumps(plan),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    entered = re.findall(r"enter (\d) (\d) 0 1 (\d) (\d) \d+ (\d+)", result.stdout)
    assert sorted((rank, size, cross) for rank, size, cross, *_ in entered) == [
        ("0", "1", "0"), ("0", "2", "0"), ("0", "2", "0"), ("1", "2", "1"), ("1", "2", "1"),
    ]  # fmt: skip
    assert len({pid for *_, pid in entered}) == 3
    assert len(set(re.findall(r"finished \d 2 \d+ (\w+)", result.stdout))) == 1

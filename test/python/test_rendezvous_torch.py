"""Ranks that have torch's variables meet through torch's own store, and leave it to the script."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rendezvous_ranks import environment, found, free_port, run_ranks, script

pytest.importorskip("torch")

SECRET = "a secret of these ranks alone"

# The script's own use of torch.distributed, on the same address and port.
ALLREDUCE = """
import torch, torch.distributed
torch.distributed.init_process_group("gloo")
values = torch.full((3,), 10.0 ** me.rank)
torch.distributed.all_reduce(values)
assert values.tolist() == [sum(10.0 ** r for r in range(me.size))] * 3, values
"""
# torch aborts now and then at the end of a process that leaves this out.
DESTROY = "\ntorch.distributed.destroy_process_group()\n"
IDENTIFY = "me = identify()\n"


def by_hand(size: int, **more: str) -> list[dict[str, str]]:
    port = str(free_port())
    return [
        environment(
            RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **more
        )
        for rank in range(size)
    ]


def check_worlds(worlds: list[list[list[Any]]]) -> None:
    """worlds[rank][epoch]: all ranks agree on store and secret, each has its own place."""
    size = len(worlds)
    for epoch in range(len(worlds[0])):
        places = [worlds[rank][epoch] for rank in range(size)]
        assert [place[0] for place in places] == list(range(size))
        assert all(place[1] == size for place in places)
        assert len({tuple(place[6:9]) for place in places}) == 1
        assert len(places[0][8]) >= 16
        assert all(place[9] == "torch" for place in places)


@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.full), "after"])
def test_ranks_by_hand_share_torchs_store_with_the_script(when: str) -> None:
    if when == "before":
        program = script(worlds=2, before=IDENTIFY + ALLREDUCE, after=DESTROY)
    else:
        program = script(worlds=2, after=ALLREDUCE + DESTROY)
    ends = run_ranks(by_hand(2), program)
    check_worlds([found(end) for end in ends])


def test_rank_0_may_come_last_and_leave_first() -> None:
    late = "import time; time.sleep(1.0 if os.environ['RANK'] == '0' else 0)"
    slow = "import time; time.sleep(0 if me.rank == 0 else 0.5)"
    ends = run_ranks(by_hand(3), script(before=late, after=slow))
    check_worlds([found(end) for end in ends])


# One rank leaves and starts again while the others still wait for it in the last world.
AGAIN = """
import torch
import perseus.torch.horovod as hvd
hvd.init()
rank, size = hvd.rank(), hvd.size()
for world in range(2 * size):
    total = hvd.allreduce(torch.tensor([10.0 ** rank + world]), op=hvd.Sum, name="total")
    assert total.item() == sum(10.0 ** r + world for r in range(size)), total
    if rank != world % size:
        try:
            hvd.allreduce(torch.ones(1), name="never")
            raise SystemExit("a rank was missing")
        except hvd.HorovodInternalError as error:
            assert "Horovod has been shut down" in str(error), error
    hvd.shutdown()
    hvd.init()
hvd.barrier()
hvd.shutdown()
"""


def test_rank_0s_store_serves_ranks_that_start_again_before_it_does() -> None:
    for end in run_ranks(by_hand(3), AGAIN):
        assert end.returncode == 0, end.stderr


def test_port_that_is_taken_is_passed_over() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ends = run_ranks(by_hand(2, PERSEUS_MASTER_PORT=str(port)), script())
        assert all(port < found(end)[0][7] <= port + 100 for end in ends)


def test_missing_rank_0_is_named_in_time() -> None:
    lonely = by_hand(2, HOROVOD_START_TIMEOUT="2")[1]
    end = run_ranks([lonely], script())[0]
    assert end.returncode != 0
    last = end.stderr.strip().splitlines()[-1]
    assert last.startswith("TimeoutError: [rendezvous] nobody listens at MASTER_ADDR:MASTER_PORT")
    assert "HOROVOD_START_TIMEOUT" in last


def test_missing_master_address_is_named() -> None:
    end = run_ranks([environment(RANK="0", WORLD_SIZE="2")], script())[0]
    assert "MASTER_ADDR is not" in end.stderr.strip().splitlines()[-1]


def torchrun(program: Path, *options: str) -> subprocess.CompletedProcess[str]:
    tool = shutil.which("torchrun", path=str(Path(sys.executable).parent))
    assert tool is not None
    return subprocess.run(
        [tool, "--standalone", "--nproc-per-node", "2", *options, str(program)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_torchrun_starts_a_world_also_after_a_restart(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    fail_once = "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': os._exit(3)"
    program.write_text(script(worlds=2, after=fail_once + ALLREDUCE + DESTROY))
    result = torchrun(program, "--max-restarts", "1")
    assert result.returncode == 0, result.stderr
    # The lines of two ranks may share one; each world of each attempt is one list.
    worlds = result.stdout.count("127.0.0.1")
    assert worlds == 8
    for rank in range(2):
        assert result.stdout.count(f"[{rank}, 2, {rank}, 2, 0, 1, ") == 4


def test_torchrun_inside_a_rank_of_perseusrun_is_an_error_at_once() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [sys.executable, "-m", "perseus.run", "-np", "2", *torchrun, "--nproc-per-node", "2"]
    result = subprocess.run(
        [*command, "--no-python", sys.executable, "-c", script()],
        env=environment(), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode != 0
    assert re.search(
        r"InvalidArgumentError: \[identity\] PERSEUS_RANK=\d and PERSEUS_SIZE=2 belong to an outer "
        r"job of perseusrun, inside of which torchrun has started this process as rank \d of 2",
        result.stderr,
    ), result.stderr


class Agent:
    """torchrun's part: torch's store, which outlives the ranks, behind a proxy that listens in."""

    def __init__(self) -> None:
        from torch.distributed import TCPStore

        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ends = [self._listener]
        self.received = bytearray()
        threading.Thread(target=self._accept, daemon=True).start()

    def rank(self, rank: int, size: int, **more: str) -> dict[str, str]:
        port = self._listener.getsockname()[1]
        return environment(
            RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True",
            **{"TORCHELASTIC_RESTART_COUNT": "0", **more},
        )  # fmt: skip

    def close(self) -> None:
        for end in self._ends:
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                rank, _ = self._listener.accept()
                store = socket.create_connection(("127.0.0.1", self._store.port))
                self._ends += (rank, store)
                for ends in ((rank, store), (store, rank)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.received += data
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


@pytest.fixture
def agent() -> Iterator[Agent]:
    made = Agent()
    yield made
    made.close()


def secret_file(folder: Path, text: str = SECRET) -> str:
    file = folder / f"secret of {text[0]}"
    file.write_text(text)
    file.chmod(0o600)
    return str(file)


@pytest.mark.parametrize(
    "variable", [pytest.param("PERSEUS_SECRET", marks=pytest.mark.full), "PERSEUS_SECRET_FILE"]
)
def test_a_given_secret_is_never_told_to_torchs_store(
    agent: Agent, tmp_path: Path, variable: str
) -> None:
    value = SECRET if variable == "PERSEUS_SECRET" else secret_file(tmp_path)
    ends = run_ranks([agent.rank(r, 2, **{variable: value}) for r in range(2)], script())
    worlds = [found(end) for end in ends]
    check_worlds(worlds)
    assert worlds[0][0][8] == SECRET
    port = str(worlds[0][0][7]).encode()
    assert port in agent.received  # that is where it would have been
    assert SECRET.encode() not in agent.received
    assert SECRET.encode().hex().encode() not in agent.received


def test_ranks_with_different_secrets_get_one_error_each(agent: Agent) -> None:
    for end in run_ranks(
        [agent.rank(r, 3, PERSEUS_SECRET=SECRET + "!" * (r % 2)) for r in range(3)], script()
    ):
        assert end.returncode != 0
        last = end.stderr.strip().splitlines()[-1]
        assert last.startswith("ValueError: [rendezvous] rank 1 has another secret than rank 0: ")
        assert SECRET not in end.stderr
    assert SECRET.encode() not in agent.received


def test_what_keeps_rank_0_from_starting_is_told_to_all(agent: Agent) -> None:
    secrets = ["too short", SECRET, SECRET]
    begin = time.monotonic()
    ends = run_ranks(
        [agent.rank(r, 3, PERSEUS_SECRET=secret) for r, secret in enumerate(secrets)], script()
    )
    assert time.monotonic() - begin < 120  # of HOROVOD_START_TIMEOUT=250
    why = "[rendezvous] PERSEUS_SECRET: 9 bytes are too few, expected at least 16; make one with:"
    heads = [f"ValueError: {why}", *[f"ValueError: [rendezvous] rank 0 could not start: {why}"] * 2]
    for end, head in zip(ends, heads, strict=True):
        assert end.returncode != 0
        assert end.stderr.strip().splitlines()[-1].startswith(head), end.stderr


def test_what_keeps_rank_0_of_a_process_group_from_starting_is_told_to_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch.distributed import HashStore

    from perseus.run.bootstrap import rendezvous

    def fail(*_: object) -> None:
        raise OSError("[rendezvous] ports 6666 to 6765 are taken")

    monkeypatch.setattr(rendezvous, "_store_server", fail)
    store = HashStore()
    with ThreadPoolExecutor() as threads:
        ranks = [
            threads.submit(rendezvous.find_store_through, store, rank, 3, 60) for rank in range(3)
        ]
        with pytest.raises(OSError, match=r"^\[rendezvous\] ports 6666 to 6765 are taken$"):
            ranks[0].result()
        for rank in ranks[1:]:
            with pytest.raises(ValueError, match=r"rank 0 could not start: .* are taken$"):
                rank.result()


def test_a_process_group_goes_by_the_hosts_of_its_own_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch.distributed import HashStore

    from perseus.run.bootstrap import rendezvous

    names = threading.local()
    monkeypatch.setattr(socket, "gethostname", lambda: names.here)
    monkeypatch.setattr(rendezvous, "host_identity", lambda: names.here, raising=False)
    monkeypatch.setattr(rendezvous, "own_address", lambda hosts: "10.0.0.1")
    monkeypatch.setattr(rendezvous, "_store_server", lambda *_: SimpleNamespace(port=6666))
    store = HashStore()

    def find(rank: int, host: str) -> str:
        names.here = host
        return rendezvous.find_store_through(store, rank, 2, 60).host

    # Host a is lost, so that rank 1 becomes rank 0, and a new rank comes later from host c.
    for hosts in (["a", "b"], ["b", "c"]):
        with ThreadPoolExecutor() as threads:
            first = threads.submit(find, 0, hosts[0])
            time.sleep(0.5)
            other = threads.submit(find, 1, hosts[1])
            assert [first.result(), other.result()] == ["10.0.0.1"] * 2


@pytest.mark.parametrize("identities", ["same", "different"])
def test_a_process_group_of_hosts_with_one_name_goes_by_what_tells_them_apart(
    monkeypatch: pytest.MonkeyPatch, identities: str
) -> None:
    """As containers of one image have; the store on one host is at loopback."""
    from torch.distributed import HashStore

    from perseus.run.bootstrap import rendezvous
    from perseus.torch.distributed import launched

    own = threading.local()
    ranks = threading.Barrier(2)
    told: list[str] = ["", ""]
    addresses: dict[str, list[list[str]]] = {"asked": []}

    def address(hosts: list[str]) -> str:
        addresses["asked"].append(hosts)
        return "10.0.0.1"

    for module in (rendezvous, launched):
        monkeypatch.setattr(
            module,
            "host_identity",
            lambda: f"boot:{own.rank if identities == 'different' else 7}",
            raising=False,
        )
        monkeypatch.setattr(module, "own_address", address)
    monkeypatch.setattr(socket, "gethostname", lambda: "worker")
    monkeypatch.setattr(rendezvous, "_store_server", lambda *_: SimpleNamespace(port=6666))
    store = HashStore()

    def exchange(rank: int, text: str) -> list[str]:
        told[rank] = text
        ranks.wait()
        found = list(told)
        ranks.wait()
        return found

    def find(rank: int) -> list[str]:
        own.rank = rank
        group = rendezvous.find_store_through(store, rank, 2, 60).host
        return [group, launched._meet(rank, partial(exchange, rank))[0]]

    monkeypatch.setattr(launched, "_held", [])
    monkeypatch.setattr(
        launched.c10d, "TCPStore", lambda *_, **__: SimpleNamespace(port=7777), raising=True
    )
    with ThreadPoolExecutor() as threads:
        found = list(threads.map(find, range(2)))
    if identities == "same":
        assert found == [["127.0.0.1", "127.0.0.1"]] * 2
        assert addresses["asked"] == []
    else:
        assert found == [["10.0.0.1", "10.0.0.1"]] * 2
        assert addresses["asked"] == [["worker", "worker"]] * 2


def test_a_process_group_does_not_wait_longer_than_its_timeout_for_torchs_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from perseus.torch.distributed import launched

    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        monkeypatch.setattr(launched._World, "variables", {**variables, "MASTER_PORT": str(port)})
        monkeypatch.setattr(launched, "raise_if_ended", lambda: end_after(200))
        expected = f"rank 0's store at 127.0.0.1:{port} within 0:00:00.500000"
        with pytest.raises(TimeoutError, match=expected):
            next(launched.rendezvous(timedelta(seconds=0.5)))


_looks = count(1)


def end_after(most: int) -> None:
    if next(_looks) > most:
        raise AssertionError("it still waits")


LATE_0 = "import time; time.sleep(1.5 if os.environ['RANK'] == '0' else 0)"
# Rank 1 of the first world fails, which rank 0 does not notice: its agent ends it for the others.
FAILS_ONCE = """
import pathlib
failed = pathlib.Path("failed")
was_there = failed.exists()
"""
FAIL = """
import time
if not was_there and me.rank == 1:
    failed.touch()
    os._exit(3)
time.sleep(0 if was_there else 60)
"""


def test_agents_of_two_hosts_start_again_with_different_restart_counts(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(script(before=FAILS_ONCE + LATE_0, after=FAIL))
    tool = shutil.which("torchrun", path=str(Path(sys.executable).parent))
    assert tool is not None
    agents = [
        subprocess.Popen(
            [tool, "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "1",
             "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--monitor-interval", "0.2",
             str(program)],
            env=environment(HOROVOD_START_TIMEOUT="20"), cwd=tmp_path, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for endpoint in [f"127.0.0.1:{free_port()}"] * 2
    ]  # fmt: skip
    try:
        output = "".join(agent.communicate(timeout=100)[0] for agent in agents)
    finally:
        for agent in agents:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()
    assert [agent.returncode for agent in agents] == [0, 0], output
    for rank in range(2):
        assert output.count(f"[{rank}, 2, 0, 1, ") == 2, output

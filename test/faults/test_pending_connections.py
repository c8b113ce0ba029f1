"""Pending connections at the ports of a job: whatever they send or do not send, the job goes on."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from pathlib import Path

import leftovers
import pytest
from live_ranks import PATIENCE, Ranks


def listening_ports(pid: int) -> list[int]:
    """TCP ports that a process listens on."""
    inodes = {str(number) for _, number in leftovers.holdings([pid])}
    ports = []
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                ports.append(int(fields[1].rpartition(":")[2], 16))
    return ports


class Intruders:
    """Connections that never belong: silent ones, talkative ones, ones that hang up at once."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._stop = threading.Event()
        self._held: list[socket.socket] = []
        self._thread = threading.Thread(target=self._bother)
        self.connections = 0

    def __enter__(self) -> Intruders:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for connection in self._held:
            connection.close()

    def wait_for(self, connections: int) -> None:
        deadline = time.monotonic() + PATIENCE
        while self.connections < connections:
            assert time.monotonic() < deadline, f"{self.connections} connections"
            time.sleep(0.01)

    def _bother(self) -> None:
        chance = random.Random(self._port)
        while not self._stop.wait(0.005):
            try:
                connection = socket.create_connection(("127.0.0.1", self._port), timeout=1)
            except OSError:
                continue
            self.connections += 1
            kind = self.connections % 6
            try:
                self._talk(connection, kind, chance)
            except OSError:
                connection.close()

    def _talk(self, connection: socket.socket, kind: int, chance: random.Random) -> None:
        if kind == 0:
            self._held.append(connection)  # says nothing, stays
            return
        if kind == 1:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        elif kind == 2:
            connection.sendall(chance.randbytes(chance.randrange(1, 100_000)))
        elif kind == 3:
            connection.sendall(struct.pack("<4I", 0x7FFFFFFF, 1, 0xFFFFFFFF, 0) * 100)
        elif kind == 4:
            # What the other side says, back to it: its own proof proves nothing.
            connection.settimeout(0.2)
            connection.sendall(connection.recv(4096))
        else:
            # A reset in the face.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()


def test_pending_connections_at_the_store_do_not_disturb_a_start(tmp_path):
    with Ranks(tmp_path, ["start"], 3, start=False) as ranks, Intruders(ranks.server.port) as crowd:
        ranks.start(0)
        crowd.wait_for(30)
        ranks.start(1)
        crowd.wait_for(60)
        ranks.start(2)
        ranks.all_note("passed")
        assert [ranks.finish(rank) for rank in range(3)] == [0, 0, 0]


def test_pending_connections_at_a_rank_do_not_disturb_its_work(tmp_path):
    with Ranks(
        tmp_path, ["keep_going"], 3, PERSEUS_TRANSPORT="tcp", GLOO_TIMEOUT_SECONDS="10"
    ) as ranks:
        ranks.all_note("going")
        ports = [listening_ports(ranks.rank[rank].pid) for rank in range(3)]
        assert all(ports)
        with Intruders(ports[0][0]) as first, Intruders(ports[2][0]) as last:
            first.wait_for(200)
            last.wait_for(200)
            Path(tmp_path, "enough").touch()
            ranks.all_note("passed")
        assert [ranks.finish(rank) for rank in range(3)] == [0, 0, 0]
        # Some of them are reported, not all: a port scan must not fill the log.
        for rank in (0, 2):
            assert 1 <= ranks.output(rank).count("closed a connection from ") <= 10
        assert ranks.output(1) == ""


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_store_that_goes_away_after_the_start_does_not_matter(tmp_path, transport):
    with Ranks(tmp_path, ["keep_going"], 2, PERSEUS_TRANSPORT=transport) as ranks:
        ranks.all_note("going")
        ranks.server.close()
        ranks.wait_for_steps(3)
        Path(tmp_path, "enough").touch()
        ranks.all_note("passed")
        assert [ranks.finish(rank) for rank in range(2)] == [0, 0]

"""Measures the network's speed: a raw exchange over TCP, both ways at once.

One thread per rank calls it, and it starts threads of its own.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from perseus.run.bootstrap.addresses import named_interfaces, reachable_address, source_address

if TYPE_CHECKING:
    import torch

_DEADLINE_SECONDS = 120
_PIECE = 4 << 20  # bytes per system call


def own_address() -> str:
    """Return the address at which other ranks reach this one: IPv4, else IPv6."""
    for name in ("PERSEUS_RENDEZVOUS_ADDR", "MASTER_ADDR"):
        for family in (socket.AF_INET, socket.AF_INET6):
            server = os.environ.get(name)
            if server and (address := source_address(server, family)):
                return address
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def own_addresses() -> list[str]:
    """Return the address of each interface that the job names (perseusrun --network-interface).

    Without any, returns own_address() alone.
    """
    return [reachable_address(name) for name in named_interfaces()] or [own_address()]


class RawExchange:
    """Sends bytes to the next rank while receiving as many from the previous one.

    share: a collective that gathers a value of every rank, ordered by rank.
    addresses: those of this rank, one per link. Each link carries an equal part of the bytes over
        its own connection. Two ranks use the same connections for both directions.

    Sockets fail after 120 s without progress.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        share: Callable[[object], list[object]],
        addresses: Sequence[str],
    ) -> None:
        self._lanes = [_Lane(rank, size, share, address) for address in addresses]

    def run(self, outgoing: torch.Tensor, incoming: torch.Tensor, call: int = 0) -> None:
        """Send all bytes of one tensor while receiving all bytes of the other.

        Raises OSError if a connection fails.
        """
        failures: list[OSError] = []
        work = []
        count = len(self._lanes)
        for lane, out, into in zip(
            self._lanes, outgoing.tensor_split(count), incoming.tensor_split(count), strict=True
        ):
            work += [partial(lane.send, _bytes(out)), partial(lane.receive, _bytes(into))]
        *others, own = work

        def attempt(part: Callable[[], None]) -> None:
            try:
                part()
            except OSError as error:
                failures.append(error)

        threads = [threading.Thread(target=attempt, args=(part,), daemon=True) for part in others]
        for thread in threads:
            thread.start()
        attempt(own)
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def close(self) -> None:
        """Close the connections."""
        for lane in self._lanes:
            lane.close()


class _Lane:
    """The connections of one link, to the next rank and from the previous one."""

    def __init__(
        self, rank: int, size: int, share: Callable[[object], list[object]], address: str
    ) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family) as server:
            server.settimeout(_DEADLINE_SECONDS)
            places = share(server.getsockname()[:2])
            self._to: socket.socket
            self._from: socket.socket
            host, port = _place(places[(rank + 1) % size])
            if size > 2 or rank == 0:
                self._to = socket.create_connection((host, port), _DEADLINE_SECONDS)
            if size > 2 or rank == 1:
                self._from, _ = server.accept()
        if size == 2:
            if rank == 0:
                self._from = self._to
            else:
                self._to = self._from
        limit = struct.pack("ll", _DEADLINE_SECONDS, 0)
        for connection in (self._to, self._from):
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def receive(self, view: memoryview) -> None:
        received = 0
        while received < len(view):
            piece = view[received : received + _PIECE]
            count = self._from.recv_into(piece, len(piece), socket.MSG_WAITALL)
            if count == 0:
                raise ConnectionError("[bench] the neighbour closed its connection")
            received += count

    def send(self, view: memoryview) -> None:
        for start in range(0, len(view), _PIECE):
            self._to.sendall(view[start : start + _PIECE])

    def close(self) -> None:
        self._to.close()
        self._from.close()


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.numpy().data).cast("B")


def _place(value: object) -> tuple[str, int]:
    assert isinstance(value, tuple)
    return str(value[0]), int(value[1])

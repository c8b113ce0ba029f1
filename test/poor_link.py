"""One end of a link between two hosts that delays packets and loses some, as netem does, which not
every kernel has: a tunnel whose packets travel through a socket of this process and that of the
other end.

    python poor_link.py DESCRIPTOR DEVICE ADDRESS SECONDS LOSS SEED

Prints a line when the device is there and one for each packet that it loses, and ends with the
other end.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import select
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perseus.bench.virtual_hosts import VirtualHosts

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_PACKET = 65536


@contextlib.contextmanager
def poor_link(hosts: VirtualHosts, delay: float, loss: float) -> Iterator[None]:
    """A link between the first two hosts, whose devices are `poor0`, with the addresses 10.78.0.1
    and 10.78.0.2. delay: in seconds; loss: the share of packets. Fails if it has lost none.
    """
    ends = []
    with contextlib.ExitStack() as stack:
        for host, end in enumerate(socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)):
            with end:
                words = [str(end.fileno()), "poor0", f"10.78.0.{host + 1}", str(delay), str(loss)]
                process = hosts.popen(
                    host,
                    [sys.executable, __file__, *words, "7"],
                    pass_fds=(end.fileno(),),
                    stdout=subprocess.PIPE,
                    text=True,
                )
            ends.append(stack.enter_context(process))
            stack.callback(process.terminate)
            assert process.stdout.readline() == "ready\n"
        yield
        for process in ends:
            process.terminate()
            assert "lost\n" in process.stdout.read(), "a link that loses nothing shows nothing"


def opened(device: str, address: str) -> int:
    """The tunnel's descriptor, in this network namespace."""
    tunnel = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tunnel, _TUNSETIFF, struct.pack("16sH", device.encode(), _IFF_TUN | _IFF_NO_PI))
    subprocess.run(["ip", "address", "add", f"{address}/24", "dev", device], check=True)
    subprocess.run(["ip", "link", "set", device, "up"], check=True)
    return tunnel


def main(words: list[str]) -> None:
    descriptor, device, address, delay, loss, seed = words
    other = socket.socket(fileno=int(descriptor))
    tunnel = opened(device, address)
    print("ready", flush=True)
    chance = random.Random(seed)
    waiting: deque[tuple[float, bytes]] = deque()  # all packets take as long: first in, first out
    while True:
        left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select([tunnel, other], [], [], left)
        if other in ready:
            packet = other.recv(_PACKET)
            if not packet:
                return
            os.write(tunnel, packet)
        if tunnel in ready:
            packet = os.read(tunnel, _PACKET)
            if chance.random() >= float(loss):
                waiting.append((time.monotonic() + float(delay), packet))
            else:
                print("lost", flush=True)
        while waiting and waiting[0][0] <= time.monotonic():
            other.send(waiting.popleft()[1])


if __name__ == "__main__":
    main(sys.argv[1:])

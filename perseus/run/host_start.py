"""Tells the agents of the hosts to start their ranks: the message, the store, the threads.

Stateless.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from perseus.run import environment
from perseus.run.bootstrap.addresses import interface_address, is_own_address, source_address
from perseus.run.job import Job, LaunchError
from perseus.run.link import HostLink, real_name


def store_address(hosts: Sequence[HostLink], interfaces: Sequence[str]) -> str:
    """Return the address of this host at which the ranks of all hosts reach the store.

    It is that of the first interface if there is one, loopback if all ranks are on this host, and
    otherwise the address from which this host reaches the first other host. Raises LaunchError for
    an interface that does not exist or has no address.
    """
    if interfaces:
        try:
            return interface_address(interfaces[0])
        except ValueError as error:
            raise LaunchError(str(error)) from None
    others = [host for host in hosts if not host.local]
    if not others:
        return "127.0.0.1"
    seen = str(_hello(others[0])["ssh_connection"]).split(" ")[0]
    # sshd reports this host as the origin, unless there is a jump host between them.
    if "." in seen and is_own_address(seen):
        return seen
    return source_address(real_name(others[0].name)) or seen


def threads_per_rank(host: HostLink) -> int:
    """Return OMP_NUM_THREADS for the ranks of a host: its cores / its ranks, at least 1."""
    return max(1, cores(host) // len(host.slots))


def cores(host: HostLink) -> int:
    """Return the number of processors that the ranks of a host may use."""
    return int(_hello(host)["cores"])


def start_messages(
    job: Job, hosts: Sequence[HostLink], common: dict[str, str], *, share_cores: bool
) -> Iterator[tuple[HostLink, bytes]]:
    """Yield each host with the line of JSON that has its agent start the ranks.

    common: variables that all ranks get. share_cores: set OMP_NUM_THREADS to threads_per_rank().
    Raises LaunchError if the current directory does not exist any more.
    """
    directory = _current_directory()
    call = None if job.call is None else base64.b64encode(job.call).decode()
    for host in hosts:
        threads = {"OMP_NUM_THREADS": str(threads_per_rank(host))} if share_cores else {}
        base = environment.local_base if host.local else environment.remote_base
        message = {
            "command": job.command,
            "directory": directory,
            "call": call,
            "grace": job.grace,
            "keep_environment": not host.local,
            "environment": base(os.environ) | common | threads,
            "ranks": [
                {"rank": slot.rank, "environment": environment.of_rank(slot, len(job.slots))}
                for slot in host.slots
            ],
        }
        yield host, json.dumps(message).encode() + b"\n"


def _hello(host: HostLink) -> dict[str, Any]:
    assert host.hello is not None
    return host.hello


def _current_directory() -> str:
    try:
        return os.getcwd()
    except OSError as error:
        raise LaunchError(f"the current directory is gone: {error.strerror}") from None

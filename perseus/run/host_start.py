"""Tells the agents of the hosts to start their ranks: the message, the store, the threads.

Stateless.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Sequence
from contextlib import suppress

from perseus.run import environment
from perseus.run.bootstrap.addresses import (
    is_loopback,
    is_own_address,
    named_interfaces,
    outward_address,
    reachable_address,
    source_address,
)
from perseus.run.bootstrap.membership import CONTROL_VARIABLE
from perseus.run.job import Job, LaunchError
from perseus.run.link import HostLink, real_name
from perseus.run.reports import Hello


def store_address(hosts: Sequence[HostLink], interfaces: Sequence[str]) -> str:
    """Return the address of this host at which the ranks of all hosts reach the store.

    It is that of the first interface if there is one, loopback if all ranks are on this host, and
    otherwise that of the interface which the user's variables name, or the address from which this
    host reaches the first other host to which loopback does not lead, or outward_address(). Raises
    LaunchError for an interface that does not exist or has no address.
    """
    if interfaces:
        try:
            return reachable_address(interfaces[0])
        except ValueError as error:
            raise LaunchError(str(error)) from None
    others = [host for host in hosts if not host.local]
    if not others:
        return "127.0.0.1"
    if address := address_by_variables():
        return address
    for host in others:
        seen = _hello(host).ssh_connection.split(" ")[0]
        # sshd reports this host as the origin, unless a jump host or a tunnel is between them.
        if "." not in seen or is_loopback(seen) or not is_own_address(seen):
            seen = source_address(real_name(host.name)) or seen
        if seen and not is_loopback(seen):
            return seen
    # Loopback leads to other names of this host, but also into tunnels, whose other ends do not
    # reach it; both reach its address.
    return outward_address() or "127.0.0.1"


def address_by_variables() -> str | None:
    """Return the address of the first interface that the user's variables name and this host has.

    The hosts of the ranks may have others.
    """
    for name in named_interfaces():
        with suppress(ValueError):
            return reachable_address(name)
    return None


def threads_per_rank(host: HostLink) -> int:
    """Return OMP_NUM_THREADS for the ranks of a host: its cores / its ranks, at least 1."""
    return max(1, cores(host) // host.shared_by)


def cores(host: HostLink) -> int:
    """Return the number of processors that the ranks of a host may use."""
    return _hello(host).cores


def start_message(
    job: Job,
    host: HostLink,
    ranks: Sequence[tuple[int, dict[str, str]]],
    common: dict[str, str],
    threads: int | None,
    *,
    control: bool = False,
) -> bytes:
    """Return the line of JSON that has an agent start processes.

    ranks: the number and the own variables of each process. common: variables that all of them get.
    threads: OMP_NUM_THREADS; None leaves it as it is. control: whether each gets a socket.
    Raises LaunchError if the current directory does not exist any more.
    """
    base = environment.local_base if host.local else environment.remote_base
    shared = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    message = {
        "command": job.command,
        "directory": _current_directory(),
        "call": None if job.call is None else base64.b64encode(job.call).decode(),
        "grace": job.grace,
        "keep_environment": not host.local,
        "control": CONTROL_VARIABLE if control else None,
        "environment": base(os.environ) | common | shared,
        "ranks": [{"rank": number, "environment": variables} for number, variables in ranks],
    }
    return json.dumps(message).encode() + b"\n"


def _hello(host: HostLink) -> Hello:
    assert host.hello is not None
    return host.hello


def _current_directory() -> str:
    try:
        return os.getcwd()
    except OSError as error:
        raise LaunchError(f"the current directory is gone: {error.strerror}") from None

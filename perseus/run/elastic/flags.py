"""The flags of elastic jobs, which are horovodrun's."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from perseus.run.elastic.discovery import FixedHosts, HostDiscovery, HostDiscoveryScript
from perseus.run.elastic.elasticity import Elasticity
from perseus.run.hosts import Host, parse_hostfile, parse_hosts, place
from perseus.run.settings import positive

_TIMEOUT = "HOROVOD_ELASTIC_TIMEOUT"
_DEFAULT_TIMEOUT = 600
_LONGEST_COOLDOWN = 3600


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the flags to a parser; --host-discovery-script belongs to those about hosts."""
    group = parser.add_argument_group(
        "elastic", "--min-np or --host-discovery-script makes a job elastic"
    )
    add = group.add_argument
    add("--min-np", "--min-num-proc", dest="min_num_proc", type=int, metavar="N",
        help="fewest ranks with which training goes on; default: -np")  # fmt: skip
    add("--max-np", "--max-num-proc", dest="max_num_proc", type=int, metavar="N",
        help="most ranks; default: all slots")  # fmt: skip
    add("--slots-per-host", dest="slots", type=positive, metavar="N",
        help="slots of discovered hosts that are printed without a number")  # fmt: skip
    add("--elastic-timeout", type=int, metavar="SECONDS",
        help=f"limit for slots to appear; default {_TIMEOUT}, else {_DEFAULT_TIMEOUT}")  # fmt: skip
    add("--reset-limit", type=int, metavar="N",
        help="worlds after the first one before the job fails; default: any number")  # fmt: skip
    add("--blacklist-cooldown-range", dest="cooldown_range", type=int, nargs=2,
        metavar=("SHORTEST", "LONGEST"),
        help="seconds until a slot whose rank failed is used again; default: never")  # fmt: skip


def is_elastic(given: argparse.Namespace) -> bool:
    """Return whether the flags ask for an elastic job."""
    return given.min_num_proc is not None or given.host_discovery_script is not None


def refuse_alone(**settings: object) -> None:
    """Raise ValueError if a setting of elastic jobs is given for a job that is not elastic."""
    for name, value in settings.items():
        if value is not None:
            raise ValueError(
                f"{name} is for elastic jobs: give --min-np (min_num_proc) or "
                f"--host-discovery-script (host_discovery_script) as well"
            )


def given_hosts(given: argparse.Namespace) -> list[Host] | None:
    """Return the hosts of -H or --hostfile; None without them."""
    if given.hostfile is not None:
        return parse_hostfile(given.hostfile)
    return None if given.hosts is None else parse_hosts(given.hosts)


def elasticity(given: argparse.Namespace) -> Elasticity:
    """Return what the flags say. Raises ValueError for flags that do not fit together."""
    if given.mpi:
        raise ValueError("--mpi cannot start elastic jobs: mpirun's ranks are fixed")
    if given.npernode is not None:
        raise ValueError("-npernode does not go with elastic jobs: give the hosts' slots instead")
    if given.host_discovery_script is not None:
        discovery: HostDiscovery = HostDiscoveryScript(given.host_discovery_script, given.slots)
    else:
        ranks = given.max_num_proc or given.num_proc or given.min_num_proc
        discovery = FixedHosts(given_hosts(given) or [Host("localhost", ranks)])
    return checked_elasticity(
        discovery,
        given.num_proc,
        given.min_num_proc,
        given.max_num_proc,
        timeout=given.elastic_timeout,
        reset_limit=given.reset_limit,
        cooldown=given.cooldown_range,
    )


def checked_elasticity(
    discovery: HostDiscovery,
    start: int | None,
    least: int | None,
    most: int | None,
    *,
    timeout: int | None,
    reset_limit: int | None,
    cooldown: Sequence[int] | None,
) -> Elasticity:
    """Return an Elasticity with the defaults of what is None; ValueError for what does not fit."""
    least = least if least is not None else start
    start = start if start is not None else least
    if start is None or least is None:
        raise ValueError("-np or --min-np is missing: give the number of ranks, such as -np 2")
    if not 1 <= least <= start or (most is not None and most < start):
        limit = "" if most is None else f", --max-np {most}"
        raise ValueError(f"--min-np {least}, -np {start}{limit}: expected 1 <= min <= np <= max")
    if isinstance(discovery, FixedHosts):
        place(discovery.find(), start)  # which refuses too few slots
    if reset_limit is not None and reset_limit < 0:
        raise ValueError(f"--reset-limit {reset_limit}: expected 0 or more")
    limits = None if cooldown is None else _checked_cooldown(cooldown)
    return Elasticity(discovery, start, least, most, _timeout(timeout), reset_limit, limits)


def _timeout(given: int | None) -> float:
    if given is None:
        text = os.environ.get(_TIMEOUT) or str(_DEFAULT_TIMEOUT)
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"{_TIMEOUT}='{text}': expected a whole number of seconds, 1 or more")
        return float(text)
    if given < 1:
        raise ValueError(f"--elastic-timeout {given}: expected 1 or more seconds")
    return float(given)


def _checked_cooldown(given: Sequence[int]) -> tuple[float, float]:
    try:
        shortest, longest = (float(seconds) for seconds in given)
        fits = 1 <= shortest <= longest <= _LONGEST_COOLDOWN
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise ValueError(
            f"--blacklist-cooldown-range (cooldown_range) {given}: expected two numbers of seconds "
            f"from 1 to {_LONGEST_COOLDOWN}, the shorter one first"
        )
    return shortest, longest

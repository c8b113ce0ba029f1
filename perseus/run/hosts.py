"""Parses host lists and places ranks on their slots. Pure functions, thread-safe."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_HOST = re.compile(r"(?P<name>\[[^\]\s]+\]|[^\s:\[\],=#-][^\s:\[\],=#]*)(?::(?P<slots>[0-9]+))?")
_HOSTFILE_LINE = re.compile(r"(?P<host>\S+)(?:\s+slots\s*=\s*(?P<slots>[0-9]+))?(?:\s+\S+=\S+)*")


@dataclass(frozen=True)
class Host:
    """A host as the user wrote it, and how many ranks it takes."""

    name: str
    slots: int


@dataclass(frozen=True)
class Slot:
    """One rank's place.

    local_rank is its index on its host; cross_rank is its host's index among the hosts that have
    this local rank.
    """

    rank: int
    host: str
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def parse_hosts(text: str) -> list[Host]:
    """'a:2,b' -> a with 2 slots, b with 1. ValueError names what it does not understand."""
    return _merge(_parse_host(part.strip(), f"-H {text}") for part in text.split(","))


def parse_hostfile(path: str) -> list[Host]:
    """Reads lines 'host', 'host:2' or 'host slots=2'; '#' starts a comment.

    A ValueError names the file and the line.
    """
    hosts = []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise ValueError(f"--hostfile {path}: {reason}") from None
    for number, line in enumerate(lines, start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        where = f"{path}, line {number}"
        match = _HOSTFILE_LINE.fullmatch(content)
        if match is None:
            raise ValueError(f"{where}: '{content}': expected 'host', 'host:2' or 'host slots=2'")
        host = _parse_host(match["host"], where)
        if match["slots"] is not None:
            host = Host(host.name, _slots(match["slots"], where))
        hosts.append(host)
    if not hosts:
        raise ValueError(f"--hostfile {path}: names no host")
    return _merge(hosts)


def place(hosts: list[Host], ranks: int) -> list[Slot]:
    """Places ranks in the hosts' order and fills every host before the next.

    Raises ValueError when there are too few slots.
    """
    available = sum(host.slots for host in hosts)
    if ranks > available:
        names = ", ".join(f"{host.name}:{host.slots}" for host in hosts)
        raise ValueError(
            f"Requested more processes ({ranks}) than slots available ({available}) on {names}; "
            "add hosts or slots (-H name:slots), or lower -np"
        )
    used: list[Host] = []
    left = ranks
    for host in hosts:
        if left > 0 and host.slots > 0:
            used.append(Host(host.name, min(host.slots, left)))
            left -= used[-1].slots
    slots: list[Slot] = []
    for index, host in enumerate(used):
        for local_rank in range(host.slots):
            owners = [i for i, other in enumerate(used) if other.slots > local_rank]
            slots.append(
                Slot(
                    len(slots),
                    host.name,
                    local_rank,
                    host.slots,
                    owners.index(index),
                    len(owners),
                )
            )
    return slots


def _parse_host(text: str, where: str) -> Host:
    match = _HOST.fullmatch(text)
    name = match["name"].strip("[]") if match else ""
    # ssh would take what begins with a dash for an option.
    if match is None or any(part.startswith("-") for part in (name, name.rpartition("@")[2])):
        raise ValueError(f"Invalid host input in {where}: '{text}': expected name or name:slots")
    return Host(name, _slots(match["slots"] or "1", where))


def _slots(text: str, where: str) -> int:
    if int(text) < 1:
        raise ValueError(f"Invalid host input in {where}: slots={text}: expected 1 or more")
    return int(text)


def _merge(hosts: Iterable[Host]) -> list[Host]:
    """A host named twice has the slots of both."""
    total: dict[str, int] = {}
    for host in hosts:
        total[host.name] = total.get(host.name, 0) + host.slots
    return [Host(name, slots) for name, slots in total.items()]

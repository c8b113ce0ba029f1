"""Parses host lists and assigns ranks to slots. Pure functions, thread-safe."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_SLOTS = r"(?P<slots>[0-9]{1,9})"
_HOST = re.compile(rf"(?P<name>\[[^\]\s]+\]|[^\s:\[\],=#-][^\s:\[\],=#]*)(?::{_SLOTS})?")
_HOSTFILE_LINE = re.compile(r"(?P<host>\S+)(?P<keys>(?:\s+[^\s=]+\s*=\s*[^\s=]+)*)")


@dataclass(frozen=True)
class Host:
    """A host, by the name that the user gave, and the number of ranks that it takes."""

    name: str
    slots: int


@dataclass(frozen=True)
class Slot:
    """The position of one rank in the job.

    local_rank is the rank's index on its host. cross_rank is the host's index among the hosts that
    have a rank with this local_rank.
    """

    rank: int
    host: str
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def parse_hosts(text: str) -> list[Host]:
    """Parse a list of hosts: 'a:2,b' gives a 2 slots and b 1 slot.

    Raises ValueError, which quotes the part that is wrong.
    """
    return _merge(_parse_host(part.strip(), f"-H {_shown(text)}") for part in text.split(","))


def parse_hostfile(path: str) -> list[Host]:
    """Read a file with lines 'host', 'host:2' or 'host slots=2', where '#' starts a comment.

    Raises ValueError, which names the file and the line.
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
            raise ValueError(
                f"{where}: '{_shown(content)}': expected 'host', 'host:2' or 'host slots=2'"
            )
        host = _parse_host(match["host"], where)
        for key, value in re.findall(r"([^\s=]+)\s*=\s*([^\s=]+)", match["keys"]):
            if key == "slots":  # other keys are those of other launchers
                host = Host(host.name, _slots(value, where))
        hosts.append(host)
    if not hosts:
        raise ValueError(f"--hostfile {path}: names no host")
    return _merge(hosts)


def parse_discovered(text: str, slots: int | None, script: str) -> list[Host]:
    """Parse what a script that discovers hosts prints: lines 'host' or 'host:2', none or more.

    As with Horovod, a line that is printed again says nothing new; the slots of different lines
    with one host add up. slots: of a host without a number.

    Raises ValueError, which names the script and the line.
    """
    hosts = []
    seen: set[str] = set()
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.strip()
        if not content or content in seen:
            continue
        seen.add(content)
        where = f"--host-discovery-script {script}, line {number}"
        if content.endswith(":0"):  # a host that must not be used now
            continue
        host = _parse_host(content, where)
        if not re.search(r":[0-9]+$", content):
            if slots is None:
                raise ValueError(
                    f"{where}: '{_shown(content)}' has no number of slots: print name:slots, or "
                    f"give --slots-per-host"
                )
            host = Host(host.name, slots)
        hosts.append(host)
    return _merge(hosts)


def place(hosts: list[Host], ranks: int) -> list[Slot]:
    """Assign ranks to hosts in the order of the hosts; each host is filled before the next one.

    Raises ValueError if there are too few slots.
    """
    available = sum(host.slots for host in hosts)
    if ranks > available:
        names = ", ".join(f"{host.name}:{host.slots}" for host in hosts)
        raise ValueError(
            f"Requested more processes ({ranks}) than slots available ({available}) on {names}; "
            "add hosts or slots (-H name:slots, hosts=), or lower -np (num_proc)"
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
    # ssh would parse a name that begins with a dash as an option.
    if match is None or any(part.startswith("-") for part in (name, name.rpartition("@")[2])):
        raise ValueError(
            f"Invalid host input in {where}: '{_shown(text)}': expected name or name:slots"
        )
    return Host(name, _slots(match["slots"] or "1", where))


def _shown(text: str) -> str:
    """On one line."""
    return text if text.isprintable() else repr(text)[1:-1]


def _slots(text: str, where: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) < 1:
        raise ValueError(f"Invalid host input in {where}: slots={text}: expected 1 or more")
    return int(text)


def _merge(hosts: Iterable[Host]) -> list[Host]:
    """Merge repeated hosts: a host that is listed twice has the slots of both entries."""
    total: dict[str, int] = {}
    for host in hosts:
        total[host.name] = total.get(host.name, 0) + host.slots
    return [Host(name, slots) for name, slots in total.items()]

"""Which interface a user names, by Perseus' own variables or another library's, and its address."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from perseus.run import host_start
from perseus.run.bootstrap import addresses
from perseus.run.bootstrap.addresses import named_interface, named_interfaces
from perseus.run.reports import Hello

_VARIABLES = (
    "PERSEUS_GLOO_NETWORK_INTERFACE",
    "PERSEUS_NCCL_NETWORK_INTERFACE",
    "HOROVOD_GLOO_IFACE",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, []),
        ({"PERSEUS_GLOO_NETWORK_INTERFACE": " ,eth7 , eth0"}, ["eth7", "eth0"]),
        ({"PERSEUS_GLOO_NETWORK_INTERFACE": "", "HOROVOD_GLOO_IFACE": "eth1"}, ["eth1"]),
        ({"GLOO_SOCKET_IFNAME": "ib1", "NCCL_SOCKET_IFNAME": "eth"}, ["ib1"]),
        ({"NCCL_SOCKET_IFNAME": "ib,eth"}, ["eth0", "eth1"]),
        ({"NCCL_SOCKET_IFNAME": "eth1,eth"}, ["eth1", "eth0"]),
        ({"NCCL_SOCKET_IFNAME": "eth2"}, ["eth2"]),  # which has no address, as an error will say
        ({"NCCL_SOCKET_IFNAME": "=eth1,eth0"}, ["eth1", "eth0"]),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, ["eth"]),
        ({"NCCL_SOCKET_IFNAME": "bond"}, ["bond"]),
        ({"NCCL_SOCKET_IFNAME": "^docker,lo"}, []),
        ({"NCCL_SOCKET_IFNAME": "^=eth0"}, []),
    ],
)
def test_named_interfaces(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: list[str]
) -> None:
    for name in _VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    here = [(1, "lo"), (2, "eth1"), (3, "eth0"), (4, "docker0"), (5, "eth2")]
    monkeypatch.setattr(socket, "if_nameindex", lambda: here)
    found = {"lo": "127.0.0.1", "eth0": "10.0.0.1", "eth1": "10.1.0.1", "docker0": "172.17.0.1"}
    monkeypatch.setattr(addresses, "_address", found.get)
    assert named_interfaces() == expected
    assert named_interface() == next(iter(expected), None)


# What Python, and rank 0 of two under a PMI, which this plays, take as this host's address. The
# argument is the name of the other rank's host.
_ASK = """
import json, os, socket, sys, threading
from perseus import _core
from perseus.run.bootstrap.addresses import own_address

ours, theirs = socket.socketpair()
other = sys.argv[1]
values = {"perseus-host-1": other.encode().hex()}

def answer(request):
    words = dict(word.split("=", 1) for word in request.split() if "=" in word)
    if words["cmd"] == "put":
        values[words["key"]] = words["value"]
    return {
        "init": "response_to_init rc=0",
        "get_maxes": "maxes rc=0 vallen_max=1024",
        "get_my_kvsname": "my_kvsname rc=0 kvsname=k",
        "put": "put_result rc=0",
        "get": f"get_result rc=0 value={values.get(words.get('key'))}",
        "barrier_in": "barrier_out rc=0",
        "finalize": "finalize_ack rc=0",
    }[words["cmd"]]

def serve():
    stream = theirs.makefile("rw")
    for request in stream:
        stream.write(f"cmd={answer(request)}\\n")
        stream.flush()

threading.Thread(target=serve, daemon=True).start()
os.environ |= {"PMI_RANK": "0", "PMI_SIZE": "2", "PMI_FD": str(ours.fileno())}
print(json.dumps([own_address([other]), _core.launched_store()[0]]))
"""
# Which of these perseusrun starts without ssh.
_ASK_LOCAL = """
import json, sys
from perseus.run.link import is_local

print(json.dumps([is_local(name) for name in sys.argv[1:]]))
"""

# eno1 is down, and without an address; six0 has only one of IPv6.
_NETWORK = """
set -e
ip link set lo up
ip link add eno1 type veth peer name ens3
ip address add 10.0.0.1/24 dev ens3
ip link set ens3 up
ip link add six0 type veth peer name zz0
ip address add fd00::2/64 dev six0 nodad
ip link set six0 up
"""
# The host is node1, whose hosts file has a loopback address for it, as Debian's has.
_NAMES = """
hostname node1
mount --bind "$HOSTS_FILE" /etc/hosts
mount --bind /dev/null /etc/resolv.conf
"""
_ALONE = {"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}  # says that the other rank is elsewhere
_ROUTE = """
ip address add 10.9.0.1/24 dev zz0
ip link set zz0 up
ip route add default dev zz0
"""


def asked(there: str, program: str, *arguments: str, **variables: str) -> Any:
    """Return what a program prints on a host of its own, whose network and names a script makes."""
    unshare = ["unshare", "--net", "--uts", "--mount", "sh", "-c"]
    if subprocess.run([*unshare, _NETWORK], capture_output=True).returncode:
        pytest.skip("needs root and ip: a network of its own")
    result = subprocess.run(
        [*unshare, there + 'exec "$@"', "sh", sys.executable, "-c", program, *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("NCCL_SOCKET_IFNAME", "ens", "10.0.0.1"),
        ("NCCL_SOCKET_IFNAME", "en", "10.0.0.1"),
        ("NCCL_SOCKET_IFNAME", "en,six", "10.0.0.1"),
        ("PERSEUS_GLOO_NETWORK_INTERFACE", "six0", "fd00::2"),
    ],
)
def test_the_store_is_at_the_first_named_interface_with_an_address(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, expected: str
) -> None:
    for variable in _VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    found = asked(_NETWORK, _ASK, "other", **_ALONE, **{name: value})
    assert found == [expected, expected]


@pytest.mark.parametrize("other", ["node1", "node2"])
@pytest.mark.parametrize(
    ("more", "expected"), [("", "10.0.0.1"), (_ROUTE, "10.9.0.1")], ids=["", "route"]
)
def test_the_store_is_not_at_loopback_where_no_name_leads_to_another_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, other: str, more: str, expected: str
) -> None:
    """All hosts are called node1, or node2 is unknown."""
    for variable in _VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n127.0.1.1 node1\n")
    there = _NETWORK + _NAMES + more
    found = asked(there, _ASK, other, **_ALONE, HOSTS_FILE=str(hosts))
    assert found == [expected, expected]
    if other == "node1":  # it may be that all ranks are on this host
        assert asked(there, _ASK, other, HOSTS_FILE=str(hosts))[1] == "127.0.0.1"


def test_an_ipv6_address_of_this_host_needs_no_ssh() -> None:
    """fd00::3 is another host's in the same network."""
    found = asked(_NETWORK, _ASK_LOCAL, "fd00::2", "FD00::2", "10.0.0.1", "fd00::3", "10.0.0.2")
    assert found == [True, True, True, False, False]


def test_hosts_without_a_boot_id_differ_by_their_names() -> None:
    hidden = "mount --bind /dev/null /proc/sys/kernel/random/boot_id\n"
    program = (
        "import json, os; from perseus.run.bootstrap.addresses import host_identity;"
        "print(json.dumps([host_identity(), os.stat('/proc/self/ns/net').st_ino]))"
    )
    for name in ("first", "second"):
        identity, network = asked(f"hostname {name}\n{hidden}", program)
        assert identity == f"no-boot-id:{name}:{network}"


# What sshd of these hosts reports as the origin; 10.0.0.1 and loopback are this host's own.
_SEEN = {
    "a": "10.0.0.1",
    "alias": "127.0.0.1",  # of this host, in ssh's configuration
    "tunnel": "127.0.0.1",
    "proxy": "127.0.0.1",
    "guest": "10.0.2.2",  # the router of a virtual machine
    "six": "fd00::9",
    "local": "",
}
_SOURCES = {"alias": "127.0.0.1", "tunnel": "127.0.0.1", "guest": "127.0.0.1", "proxy": "10.0.0.2"}


@pytest.mark.parametrize("outward", ["10.0.0.3", None])
@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("local", "127.0.0.1"),
        ("local a", "10.0.0.1"),
        ("alias a", "10.0.0.1"),
        ("tunnel guest proxy a", "10.0.0.2"),
        ("six", "fd00::9"),
        ("alias", None),
        ("local tunnel", None),
        ("guest", None),
    ],
)
def test_other_hosts_are_sent_to_loopback_only_if_there_is_nothing_else(
    monkeypatch: pytest.MonkeyPatch, hosts: str, expected: str | None, outward: str | None
) -> None:
    for name in _VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(host_start, "is_own_address", ["10.0.0.1", "127.0.0.1"].__contains__)
    monkeypatch.setattr(host_start, "real_name", lambda name: f"{name}.example")
    sources = {f"{name}.example": source for name, source in _SOURCES.items()}
    monkeypatch.setattr(host_start, "source_address", sources.get)
    monkeypatch.setattr(host_start, "outward_address", lambda: outward, raising=False)
    links: list[Any] = [
        SimpleNamespace(name=name, local=name == "local", hello=Hello(4, f"{_SEEN[name]} 5 x 22"))
        for name in hosts.split()
    ]
    assert host_start.store_address(links, []) == (expected or outward or "127.0.0.1")

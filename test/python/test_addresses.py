"""Which interface a user names, by Perseus' own variables and by those of NCCL and gloo."""

from __future__ import annotations

import socket

import pytest

from perseus.run.bootstrap import addresses
from perseus.run.bootstrap.addresses import named_interface, named_interfaces

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

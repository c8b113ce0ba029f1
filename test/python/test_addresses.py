"""Which interface a user names, by Perseus' own variables and by those of NCCL and gloo."""

from __future__ import annotations

import socket

import pytest

from perseus.run.bootstrap.addresses import named_interface

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
        ({}, None),
        ({"PERSEUS_GLOO_NETWORK_INTERFACE": " ,eth7 , eth0"}, "eth7"),
        ({"PERSEUS_GLOO_NETWORK_INTERFACE": "", "HOROVOD_GLOO_IFACE": "eth1"}, "eth1"),
        ({"GLOO_SOCKET_IFNAME": "ib1", "NCCL_SOCKET_IFNAME": "eth"}, "ib1"),
        ({"NCCL_SOCKET_IFNAME": "ib,eth"}, "eth0"),
        ({"NCCL_SOCKET_IFNAME": "eth,ib"}, "eth0"),
        ({"NCCL_SOCKET_IFNAME": "=eth1,eth0"}, "eth1"),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, "eth"),
        ({"NCCL_SOCKET_IFNAME": "bond"}, "bond"),
        ({"NCCL_SOCKET_IFNAME": "^docker,lo"}, None),
        ({"NCCL_SOCKET_IFNAME": "^=eth0"}, None),
    ],
)
def test_named_interface(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str | None
) -> None:
    for name in _VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    here = [(1, "lo"), (2, "eth1"), (3, "eth0"), (4, "docker0")]
    monkeypatch.setattr(socket, "if_nameindex", lambda: here)
    assert named_interface() == expected

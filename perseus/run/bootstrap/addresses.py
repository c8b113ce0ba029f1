"""Finds the addresses at which other hosts reach this one. Stateless, thread-safe."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct

from perseus.run.bootstrap.start_settings import setting

_SIOCGIFADDR = 0x8915
_FAR_AWAY = "192.0.2.1"  # belongs to nobody (RFC 5737)
_LINK_LOCAL = "20"  # a scope in /proc/net/if_inet6
_NAMING = (
    "PERSEUS_GLOO_NETWORK_INTERFACE",
    "PERSEUS_NCCL_NETWORK_INTERFACE",
    "HOROVOD_GLOO_IFACE",
    "GLOO_SOCKET_IFNAME",
)


def named_interfaces() -> list[str]:
    """Return the network interfaces that the user's variables name, in their order.

    The rules are those of common/net/interface_choice.h: most variables list exact names. Entries
    of NCCL_SOCKET_IFNAME are prefixes of names; after a leading "=" they are exact, and after a
    leading "^" they exclude interfaces, so that none is named.
    """
    if names := _entries(setting(*_NAMING)):
        return names
    nccl = setting("NCCL_SOCKET_IFNAME")
    entries = _entries(nccl.removeprefix("="))
    if nccl.startswith("^"):
        return []
    here = [] if nccl.startswith("=") else sorted(name for _, name in socket.if_nameindex())
    meant = dict.fromkeys(name for entry in entries for name in here if name.startswith(entry))
    usable = [name for name in meant if _address(name) or _ipv6_address(name)]
    return usable or list(meant) or entries


def named_interface() -> str | None:
    """Return the first of named_interfaces(), or None."""
    return next(iter(named_interfaces()), None)


def _entries(text: str) -> list[str]:
    return [entry.strip() for entry in text.split(",") if entry.strip()]


def interface_address(name: str) -> str:
    """Return the IPv4 address of a network interface.

    Raises ValueError, which lists this host's interfaces, if it does not exist or has no address.
    """
    address = _address(name)
    if address is None:
        known = ", ".join(sorted(interface for _, interface in socket.if_nameindex()))
        raise ValueError(
            f"[rendezvous] network interface '{name}': no such interface or no IPv4 address; "
            f"this host has {known}"
        )
    return address


def _address(name: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            request = struct.pack("256s", name.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
        except OSError:
            return None


def reachable_address(name: str) -> str:
    """Return the IPv4 address of a network interface, or its IPv6 address if it has no other.

    Raises ValueError as interface_address() does.
    """
    return _address(name) or _ipv6_address(name) or interface_address(name)


def _ipv6_address(name: str) -> str | None:
    with contextlib.suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as table:
        for line in table:
            digits, _, _, scope, _, interface = line.split()
            if interface == name and scope != _LINK_LOCAL:
                return str(ipaddress.IPv6Address(bytes.fromhex(digits)))
    return None


def source_address(host: str, family: socket.AddressFamily = socket.AF_INET) -> str | None:
    """Return the address of this family from which this host reaches `host`.

    Returns None if the name is unknown or no route leads there.
    """
    try:
        address = socket.getaddrinfo(host, 9, family, socket.SOCK_DGRAM)[0][4]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # for UDP it sends nothing, it only consults the routing table
            return str(probe.getsockname()[0])
    except (OSError, ValueError):  # ValueError: it cannot be a name
        return None


def host_identity() -> str:
    """Return what tells this host from others, whose names may be the same.

    It is that of common/topology/host.h: containers with networks of their own are hosts.
    """
    boot_id, network = "", 0
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        boot_id = file.read().strip()
    with contextlib.suppress(OSError):
        network = os.stat("/proc/self/ns/net").st_ino
    # Network namespaces may have the same number on several hosts.
    return f"{boot_id or f'no-boot-id:{socket.gethostname()}'}:{network}"


def own_address(hosts: list[str]) -> str:
    """Return the address at which other hosts reach this one.

    It is the address of the interface that the user names, else the source address of the route to
    one of the other hosts, else outward_address(). Names may be unknown to DNS, or the same on all
    hosts, and many a hosts file gives a host's own name a loopback address.
    """
    if interface := named_interface():
        return reachable_address(interface)
    here = socket.gethostname()
    others = [host for host in hosts if host != here]
    for host in [*others[:1], here]:
        address = source_address(host)
        if address is not None and not is_loopback(address):
            return address
    return outward_address() or here


def outward_address() -> str | None:
    """Return an IPv4 address of this host that others may reach; None if it has only loopback.

    It is the source address of the route to far away hosts, else that of any interface.
    """
    for address in (
        source_address(_FAR_AWAY),
        *(_address(name) for _, name in socket.if_nameindex()),
    ):
        if address is not None and not is_loopback(address):
            return address
    return None


def is_own_address(host: str, family: socket.AddressFamily = socket.AF_INET) -> bool:
    """Return whether `host` is a name or an address of this host; its address is of this family."""
    try:
        address = str(socket.getaddrinfo(host, 9, family, socket.SOCK_DGRAM)[0][4][0])
    except (OSError, ValueError):  # ValueError: it cannot be a name
        return False
    # What this host sends to itself comes from the address it goes to. (Binding tells nothing where
    # net.ipv4.ip_nonlocal_bind allows addresses of others.)
    return is_loopback(address) or source_address(address, family) == address


def is_loopback(host: str) -> bool:
    """Return whether `host` is a loopback address or localhost."""
    return host == "localhost" or host.startswith("127.") or host == "::1"

"""Virtual hosts on one machine, each with its own network, name, processes, /dev/shm and sshd.

    with VirtualHosts(2, rate="1gbit") as hosts:
        hosts.run(0, ["ssh", "host1", "hostname"], timeout=10)
        print(hosts.counters(1)[0].received_bytes)

    python -m perseus.bench.virtual_hosts run --hosts 2 --rate 1gbit -- ip address
    python -m perseus.bench.virtual_hosts clean

Every host has links eth0, eth1, …, each to its own switch, with the address
10.77.<link>.<host + 1> or fd77:<link>::<host + 1>, an MTU of 1500 and a limited bandwidth.
Everything consists of anonymous namespaces. Several sets of hosts may therefore exist at once, the
machine's own network does not change, and nothing outlives the owner, even if it is killed. Needs
root. One thread per VirtualHosts.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

_NAMESPACES = str(Path(__file__).with_name("namespaces.py"))
_PREFIX = "perseus-hosts-"
_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_LEAST_RATE = 1000
_BURST_SECONDS = 131072 * 8 / 1e9  # 128 kB at 1 Gbit/s
_LEAST_BURST = 16384
_QUEUE_SECONDS = 0.02
_LARGEST_SEGMENT = 65536
_WITHOUT_HEADERS = 0.94  # the bucket counts a header for each packet
_START_SECONDS = 20.0


@dataclass(frozen=True)
class Counters:
    """The traffic counters of an interface.

    Frames that the kernel processes together count with one header.
    """

    received_bytes: int
    sent_bytes: int
    received_packets: int
    sent_packets: int

    def __sub__(self, earlier: Counters) -> Counters:
        return Counters(
            self.received_bytes - earlier.received_bytes,
            self.sent_bytes - earlier.sent_bytes,
            self.received_packets - earlier.received_packets,
            self.sent_packets - earlier.sent_packets,
        )


class HostsUnavailableError(RuntimeError):
    """This machine cannot have virtual hosts; the message is one line."""


def unavailable() -> str | None:
    """Return the reason why this machine cannot have virtual hosts; None if it can."""
    if os.geteuid() != 0:
        return "virtual hosts need root"
    for tool, package in (
        ("ip", "iproute2"),
        ("tc", "iproute2"),
        ("nsenter", "util-linux"),
        ("ssh", "openssh-client"),
        ("ssh-keygen", "openssh-client"),
        ("sshd", "openssh-server"),
    ):
        if _find(tool) is None:
            return f"virtual hosts need {tool}: apt-get install {package}"
    probe = ["unshare", "--net", "--pid", "--mount", "--uts", "--ipc", "--fork"]
    probe += [
        "sh",
        "-c",
        "ip link add v0 type veth peer name v1 && tc qdisc add dev v0 root tbf rate 1gbit "
        "burst 128kb limit 1mb && ip link add b0 type bridge",
    ]
    result = subprocess.run(
        probe, env=_environment(), capture_output=True, text=True, timeout=20, check=False
    )
    if result.returncode != 0:
        return f"virtual hosts need a kernel that lets them be made: {result.stderr.strip()}"
    return None


class VirtualHosts:
    """Hosts named host0, host1, … that exist between start() and close(), or within `with`."""

    def __init__(
        self,
        count: int = 2,
        rate: str | None = None,
        links: int = 1,
        ssh: bool = True,
        ipv6: bool = False,
    ) -> None:
        """Check the arguments; start() creates the hosts.

        rate: the bandwidth of each link in each direction, such as "1gbit" or "100mbit"; None does
            not limit it.
        ssh: whether to run an sshd on each host.
        ipv6: whether links have IPv6 addresses instead of IPv4 addresses.

        Raises ValueError for a wrong rate, and unless there are 1..200 hosts and 1..8 links.
        """
        if not (1 <= count <= 200 and 1 <= links <= 8):
            raise ValueError(f"{count} hosts with {links} links: expected 1..200 and 1..8")
        self.count = count
        self.links = links
        self._rate = None if rate is None else bits_per_second(rate)
        self._ssh = ssh
        self._ipv6 = ipv6
        self._directory = Path()
        self._holders: list[subprocess.Popen[str]] = []  # the switch, then the hosts
        self._pids: list[int] = []
        self._servers: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> VirtualHosts:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def start(self) -> VirtualHosts:
        """Create the hosts. Raises HostsUnavailableError if this machine cannot have them."""
        if reason := unavailable():
            raise HostsUnavailableError(reason)
        sweep()
        name = f"{_PREFIX}{os.getpid()}-{_start_time(os.getpid())}-"
        self._directory = Path(tempfile.mkdtemp(prefix=name))
        try:
            self._write_hosts_file()
            for i in range(-1, self.count):
                self._holders.append(self._hold(i))
            self._pids = [self._first_process(holder) for holder in self._holders]
            self._connect()
            if self._ssh:
                self._start_ssh()
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """End every process of every host. May be called twice."""
        for holder in self._holders:
            _present(holder.stdin).close()
        for process in (*self._holders, *self._servers):
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        self._holders, self._servers, self._pids = [], [], []
        if self._directory.name.startswith(_PREFIX):
            shutil.rmtree(self._directory, ignore_errors=True)

    # ---- using them --------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """The names of all hosts."""
        return [f"host{i}" for i in range(self.count)]

    @property
    def ssh_config(self) -> Path:
        """The configuration for `ssh -F` with aliases host0, host1, …, for use on the hosts."""
        return self._directory / "ssh_config"

    def address(self, host: int, link: int = 0) -> str:
        """Return the address of a host's link."""
        if self._ipv6:  # in the form that ssh looks up
            return str(ipaddress.IPv6Address(f"fd77:{link}::{host + 1:x}"))
        return f"10.77.{link}.{host + 1}"

    def environment(self) -> dict[str, str]:
        """Return this process's environment, with an `ssh` first on PATH that knows the aliases."""
        return {**os.environ, "PATH": f"{self._directory}/bin:{os.environ.get('PATH', os.defpath)}"}

    def popen(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on a host, like subprocess.Popen.

        The process forwards signals that end a program to the command, which is killed if the
        process is killed. SIGSTOP stops only the process. If signal n ends the command, the
        returncode is 128 + n.
        """
        options.setdefault("env", self.environment())
        return subprocess.Popen(_inside(self._pids[host + 1], command), **options)

    def run(
        self, host: int, command: Sequence[str], timeout: float = 60, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host and capture its output. timeout: in seconds."""
        options.setdefault("env", self.environment())
        return subprocess.run(
            _inside(self._pids[host + 1], command),
            timeout=timeout,
            capture_output=True,
            text=True,
            check=False,
            **options,
        )

    def counters(self, host: int) -> list[Counters]:
        """Return the counters of each link of a host."""
        statistics = self._in_network(host + 1, ["ip", "-s", "-o", "link", "show"])
        found = {}
        for line in statistics.splitlines():
            name = line.split(": ")[1].partition("@")[0]
            received, sent = re.findall(r"[RT]X:[^\\]*\\\s*(\d+)\s+(\d+)", line)
            found[name] = Counters(int(received[0]), int(sent[0]), int(received[1]), int(sent[1]))
        return [found[f"eth{link}"] for link in range(self.links)]

    def command_lines(self, host: int) -> list[str]:
        """Return the command line of every process on a host."""
        show = "for file in /proc/[0-9]*/cmdline; do tr '\\0' ' ' < $file; echo; done 2>/dev/null"
        return [line.strip() for line in self.run(host, ["sh", "-c", show]).stdout.splitlines()]

    def set_link(self, host: int, up: bool, link: int = 0) -> None:
        """Disconnect a link of a host, or connect it again."""
        port = f"h{host}l{link}"
        self._in_network(0, ["ip", "link", "set", port, "up" if up else "down"])

    def set_rate(self, rate: str) -> None:
        """Change the bandwidth of all links, which had one. Raises ValueError for a wrong rate."""
        if self._rate is None:
            raise ValueError("links without a rate get none later: make the hosts with rate=")
        self._rate = bits_per_second(rate)
        self._limit_all("change")

    def kill(self, host: int) -> None:
        """Kill a host with all of its processes at once. It cannot be started again."""
        os.kill(self._pids[host + 1], signal.SIGKILL)

    # ---- making them -------------------------------------------------------------------------

    def _write_hosts_file(self) -> None:
        lines = ["127.0.0.1 localhost"]
        lines += [f"{self.address(i)} {name}" for i, name in enumerate(self.names)]
        (self._directory / "hosts").write_text("\n".join(lines) + "\n")

    def _hold(self, host: int) -> subprocess.Popen[str]:
        """Start the process that holds a host's namespaces.

        Host -1 is the switch, whose process also removes the temporary directory.
        """
        command = [sys.executable, "-S", "-E", _NAMESPACES, "hold"]
        command += ["switch" if host < 0 else f"host{host}", str(self._directory / "hosts")]
        command += ["--remove", str(self._directory)] if host < 0 else []
        return subprocess.Popen(
            command,
            env=_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # so that Ctrl-C reaches the owner only
        )

    def _first_process(self, holder: subprocess.Popen[str]) -> int:
        line = _present(holder.stdout).readline()
        if not line.strip().isdecimal():
            reason = _present(holder.stderr).read().strip()
            raise RuntimeError(f"a virtual host could not be made: {reason}")
        return int(line)

    def _connect(self) -> None:
        switch = []
        for link in range(self.links):
            switch += [f"link add br{link} type bridge", f"link set br{link} up"]
            for host in range(self.count):
                port = f"h{host}l{link}"
                peer = f"peer name eth{link} netns {self._pids[host + 1]}"
                switch.append(f"link add {port} mtu 1500 type veth {peer}")
                switch.append(f"link set {port} master br{link} up")
        self._in_network(0, ["ip", "-batch", "-"], "\n".join(switch))
        # Nobody else has the address: there is no need to wait until that is known.
        width = "64 nodad" if self._ipv6 else "24"
        for host in range(self.count):
            lines = []
            for link in range(self.links):
                lines.append(f"address add {self.address(host, link)}/{width} dev eth{link}")
                lines.append(f"link set eth{link} mtu 1500 up")
            self._in_network(host + 1, ["ip", "-batch", "-"], "\n".join(lines))
        if self._rate is not None:
            self._limit_all("add")

    def _limit_all(self, verb: str) -> None:
        ports = [f"h{i}l{j}" for i in range(self.count) for j in range(self.links)]
        self._limit(verb, 0, ports)
        for host in range(self.count):
            self._limit(verb, host + 1, [f"eth{link}" for link in range(self.links)])

    def _limit(self, verb: str, place: int, interfaces: list[str]) -> None:
        """Limit what these interfaces send, with a token bucket. verb: of tc's qdisc."""
        assert self._rate is not None
        burst = max(_LEAST_BURST, round(self._rate / 8 * _BURST_SECONDS))
        limit = burst + round(self._rate / 8 * _QUEUE_SECONDS)
        bucket = f"tbf rate {self._rate}bit burst {burst} limit {limit}"
        lines = [f"qdisc {verb} dev {name} root {bucket}" for name in interfaces]
        self._in_network(place, ["tc", "-batch", "-"], "\n".join(lines))
        # A network card cuts what the kernel hands over at once into packets. The bucket would cut
        # what exceeds the burst itself, which costs a third of a core at 300 Mbit/s.
        whole = min(_LARGEST_SEGMENT, round(burst * _WITHOUT_HEADERS))
        lines = [f"link set {name} gso_max_size {whole}" for name in interfaces]
        self._in_network(place, ["ip", "-batch", "-"], "\n".join(lines))

    def _in_network(self, place: int, command: list[str], text: str = "") -> str:
        """Run a tool of this machine in the network of the switch (0) or of a host (1 + host)."""
        entered = ["nsenter", f"--net=/proc/{self._pids[place]}/ns/net", *command]
        result = subprocess.run(
            entered,
            input=text,
            env=_environment(),
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        if result.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: {result.stderr.strip()}")
        return result.stdout

    def _start_ssh(self) -> None:
        directory = self._directory
        keys = [directory / "user_key", *(directory / f"{name}_key" for name in self.names)]
        makers = [
            subprocess.Popen(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)])
            for key in keys
        ]
        for maker in makers:
            maker.wait(timeout=30)
        shutil.copy(f"{keys[0]}.pub", directory / "authorized_keys")
        known, config = "", ""
        for i, name in enumerate(self.names):
            key = (directory / f"{name}_key.pub").read_text().split()
            known += f"{self.address(i)} {key[0]} {key[1]}\n"
            config += f"Host {name}\n  HostName {self.address(i)}\n"
        config += f"Host *\n  User root\n  IdentityFile {keys[0]}\n  IdentitiesOnly yes\n"
        config += f"  UserKnownHostsFile {directory}/known_hosts\n"
        config += "  GlobalKnownHostsFile /dev/null\n"
        (directory / "known_hosts").write_text(known)
        self.ssh_config.write_text(config)
        wrapper = directory / "bin" / "ssh"
        wrapper.parent.mkdir()
        wrapper.write_text(f'#!/bin/sh\nexec {_find("ssh")} -F {self.ssh_config} "$@"\n')
        wrapper.chmod(0o755)
        for host in range(self.count):
            self._servers.append(self._start_sshd(host))
        for host in range(self.count):
            self._wait_for_sshd(host)

    def _start_sshd(self, host: int) -> subprocess.Popen[Any]:
        directory = self._directory
        options = {
            "HostKey": directory / f"host{host}_key",
            "AuthorizedKeysFile": directory / "authorized_keys",
            "PidFile": "none",
            "StrictModes": "no",  # the keys are in a directory below one that is world-writable
            "PermitRootLogin": "yes",
            "PasswordAuthentication": "no",
            "UsePAM": "no",
            "MaxStartups": "100",
        }
        config = directory / f"host{host}_sshd_config"
        config.write_text("".join(f"{name} {value}\n" for name, value in options.items()))
        with (directory / f"host{host}_sshd.log").open("w") as log:
            command = [str(_find("sshd")), "-D", "-e", "-f", str(config)]
            return self.popen(host, command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _wait_for_sshd(self, host: int) -> None:
        log = self._directory / f"host{host}_sshd.log"
        deadline = time.monotonic() + _START_SECONDS
        while "Server listening" not in log.read_text():
            if self._servers[host].poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"sshd of host{host} did not start: {log.read_text().strip()}")
            time.sleep(0.01)


def sweep() -> list[str]:
    """Remove the processes and directories of owners that have died; return the directories.

    They are left behind only if an owner's helper processes were killed as well.
    """
    removed = []
    for directory in Path(tempfile.gettempdir()).glob(_PREFIX + "*"):
        match = re.fullmatch(re.escape(_PREFIX) + r"(\d+)-(\d+)-.*", directory.name)
        if match is None or _start_time(int(match[1])) == int(match[2]):
            continue
        for entry in Path("/proc").iterdir():
            try:
                if (
                    entry.name.isdecimal()
                    and str(directory).encode() in (entry / "cmdline").read_bytes()
                ):
                    os.kill(int(entry.name), signal.SIGKILL)
            except OSError:
                continue
        shutil.rmtree(directory, ignore_errors=True)
        removed.append(str(directory))
    return removed


def bits_per_second(rate: str) -> int:
    """Parse a rate: '1gbit' gives 1000000000. Raises ValueError for anything else, and for less
    than 1kbit."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate.lower())
    if match is None:
        raise ValueError(f"rate '{rate}': expected a number with kbit, mbit or gbit, such as 1gbit")
    bits = round(float(match[1]) * _UNITS[match[2]])
    if bits < _LEAST_RATE:
        raise ValueError(f"rate '{rate}': expected 1kbit or more")
    return bits


def _inside(pid: int, command: Sequence[str]) -> list[str]:
    return [sys.executable, "-S", "-E", _NAMESPACES, "enter", str(pid), *command]


def _find(tool: str) -> str | None:
    return shutil.which(tool, path=_environment()["PATH"])


def _environment() -> dict[str, str]:
    """Return this process's environment, with the folders of root's tools last on PATH."""
    return {**os.environ, "PATH": os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"}


def _start_time(pid: int) -> int:
    """Return when a process started, in clock ticks since boot; 0 if there is no such process.

    Together with the pid it identifies a process, as pids are reused.
    """
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0


def _present(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def _run_everywhere(made: VirtualHosts, on: str | None, command: list[str]) -> int:
    with made as hosts:
        chosen = range(hosts.count) if on is None else [hosts.names.index(on)]
        processes = [
            hosts.popen(i, command, env={**hosts.environment(), "VIRTUAL_HOST": str(i)})
            for i in chosen
        ]
        codes = [process.wait() for process in processes]
        for i in chosen:
            for link, counters in enumerate(hosts.counters(i)):
                sent, received = counters.sent_bytes, counters.received_bytes
                print(f"host{i} eth{link}: {sent} bytes sent, {received} received", file=sys.stderr)
        return max(codes)


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description="Hosts on one machine, from network namespaces.")
    modes = parser.add_subparsers(dest="mode", required=True)
    runner = modes.add_parser("run", help="make hosts and run a command on each, or on one")
    runner.add_argument("--hosts", type=int, default=2)
    runner.add_argument("--rate", help="of each link, such as 1gbit; default unlimited")
    runner.add_argument("--links", type=int, default=1)
    runner.add_argument("--on", metavar="host0", help="run it on this host only")
    runner.add_argument("command", nargs=argparse.REMAINDER)
    modes.add_parser("clean", help="remove what dead owners left behind")
    given = parser.parse_args()
    if given.mode == "clean":
        for directory in sweep():
            print(f"removed {directory}")
        return 0
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    if not command:
        runner.error("expected a command, such as: run --hosts 2 -- ip address")
    try:
        hosts = VirtualHosts(given.hosts, given.rate, given.links)
    except ValueError as error:
        runner.error(str(error))
    if given.on not in (None, *hosts.names):
        runner.error(f"--on {given.on}: expected one of {', '.join(hosts.names)}")
    if reason := unavailable():
        print(reason, file=sys.stderr)
        return 2
    return _run_everywhere(hosts, given.on, command)


if __name__ == "__main__":
    sys.exit(main())

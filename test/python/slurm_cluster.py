"""A Slurm cluster of this machine alone, for the tests of srun: two nodes, one partition.

As Debian's packages slurmctld, slurmd, slurm-client and munge have it, in a folder of its own, with
its own key and free ports; what the machine's own cluster does, if it has one, is not touched.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rendezvous_ranks import environment, free_port

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sinfo")
_PLACES = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
_PATIENCE_SECONDS = 60
# Nodes are hosts by name: rank 0's must lead here.
_NODES = "127.0.0.1", socket.gethostname().partition(".")[0]
_CONFIGURATION = """
ClusterName=perseus
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SwitchType=switch/none
SchedulerType=sched/builtin
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
NodeName={nodes[0]} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4
NodeName={nodes[1]} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
"""


class Cluster:
    """Runs commands in the cluster that a configuration describes."""

    def __init__(self, configuration: Path) -> None:
        self._configuration = str(configuration)

    def run(
        self, *command: str, timeout: float = 120, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """One of Slurm's commands to its end, without any trace of another launcher."""
        return subprocess.run(
            command,
            env=environment(**variables, SLURM_CONF=self._configuration),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )


@contextmanager
def running(folder: Path) -> Iterator[Cluster]:
    """The cluster; the test is skipped where it cannot be had. Its daemons end with it."""
    programs = {name: shutil.which(name, path=_PLACES) for name in _PROGRAMS}
    if missing := [name for name, path in programs.items() if path is None]:
        pytest.skip(f"no {', '.join(missing)}: apt-get install slurmctld slurmd slurm-client munge")
    configuration = folder / "slurm.conf"
    user = subprocess.check_output(["id", "-un"], text=True).strip()
    configuration.write_text(
        _CONFIGURATION.format(
            host=_NODES[1],
            user=user,
            folder=folder,
            nodes=_NODES,
            ports=[free_port() for _ in range(3)],
        )
    )
    key = folder / "key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    (folder / "state").mkdir()
    commands = [
        # By force, where others may not look into the folder: nobody else is to use this key.
        [programs["munged"], "--foreground", "--force", f"--socket={folder}/munge"]
        + [f"--{name}-file={folder}/{name}" for name in ("key", "log", "pid", "seed")],
        [programs["slurmctld"], "-D", "-i"],
        *([programs["slurmd"], "-D", "-N", node] for node in _NODES),
    ]
    daemons: list[subprocess.Popen[bytes]] = []
    log = folder / "daemons.log"
    try:
        with log.open("wb") as output:
            for command in commands:
                # Should this process be killed, they are, too.
                daemon = subprocess.Popen(
                    ["setpriv", "--pdeathsig", "KILL", *map(str, command)],
                    env=environment(SLURM_CONF=str(configuration)),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                )
                daemons.append(daemon)
                if len(daemons) == 1:
                    _await((folder / "munge").exists, daemons, log)
        cluster = Cluster(configuration)
        _await(lambda: _idle_nodes(cluster) == len(_NODES), daemons, log)
        try:
            yield cluster
        finally:
            cluster.run("scancel", f"--user={user}")
            _await(lambda: not cluster.run("squeue", "--noheader").stdout.strip(), daemons, log)
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(timeout=30)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _idle_nodes(cluster: Cluster) -> int:
    states = cluster.run("sinfo", "--noheader", "--Node", "--format=%T")
    return states.stdout.split().count("idle")


def _await(ready: Callable[[], bool], daemons: list[subprocess.Popen[bytes]], log: Path) -> None:
    """Skip the test with the daemons' last words when one ends, or they take too long."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not ready():
        if time.monotonic() > deadline or any(daemon.poll() is not None for daemon in daemons):
            words = " | ".join(log.read_text(errors="replace").splitlines()[-5:])
            pytest.skip(f"Slurm does not start here: {words}")
        time.sleep(0.1)

"""Starts the ranks of a job by perseusrun or mpirun, here or on virtual hosts; reads their records.

Single-threaded, with a timer that ends a job which takes too long.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from perseus.bench.plan import MARK, NEED_MPIRUN, Plan
from perseus.bench.virtual_hosts import HostsUnavailableError, VirtualHosts, bits_per_second

_END_GRACE = 20.0  # seconds for a job to end after SIGINT


class JobError(Exception):
    """The job did not measure everything; the message is one line."""


@dataclass(frozen=True)
class Job:
    """A plan and where it runs: on this host, or with ranks spread over virtual hosts.

    hosts: the number of virtual hosts; 1 = this host itself.
    rate: the bandwidth of each virtual link, such as "1gbit"; None = unlimited.
    placement: real hosts instead, in the form of perseusrun's -H.
    environment: variables for the ranks.
    timeout: seconds for the whole job.
    """

    plan: Plan
    ranks: int = 2
    hosts: int = 1
    rate: str | None = None
    placement: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    timeout: float = 600.0


def run(job: Job, log: Callable[[str], None], on_record: Callable[[str], None]) -> None:
    """Run a job, and leave no process behind.

    on_record: is called with each record as JSON, as soon as it arrives.
    log: is called with every other line of output.

    Raises JobError if the job fails, HostsUnavailableError if it needs virtual hosts and this
    machine cannot have them.
    """
    launcher, peers = _launcher(job, log)
    plan = replace(job.plan, peers=peers)
    worker = [sys.executable, "-m", "perseus.bench.worker"]
    with _place(job) as (start, plan_of_place):
        command = [*launcher, *worker, plan_of_place(plan).to_json()]
        process = start(command, _environment(job))
        try:
            status = _listen(process, job.timeout, log, on_record)
        finally:
            _end(process)
    if status != 0:
        raise JobError(f"the job ended with status {status}")


def _environment(job: Job) -> dict[str, str]:
    """Return the launcher's environment, from which the ranks have theirs."""
    usual = {"TORCH_CPP_LOG_LEVEL": "ERROR", "TF_CPP_MIN_LOG_LEVEL": "2"}
    if job.placement is None:
        # Virtual hosts share the cores of this machine; those of real hosts perseusrun divides.
        usual["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // job.ranks))
    warm_ups = {"topk": "LIGHT_TOPK", "powersgd": "PERSEUS_POWERSGD", "auto": "PERSEUS_POWERSGD"}
    for label in job.plan.codecs:
        if prefix := warm_ups.get(label.partition(":")[0]):
            usual[f"{prefix}_WARMUP_STEPS"] = "0"  # a run is shorter than the warm-up
    return {**usual, **os.environ, **job.environment}


def _launcher(job: Job, log: Callable[[str], None]) -> tuple[list[str], list[str]]:
    """Return the launcher's command, and the peers that work under it."""
    peers = [peer for peer in job.plan.peers if peer not in NEED_MPIRUN]
    wanted = [peer for peer in job.plan.peers if peer in NEED_MPIRUN]
    found = []
    for peer in wanted:
        if reason := _missing(job, peer):
            log(f"perseus-bench: {peer} is skipped: {reason}")
        else:
            found.append(peer)
    if found:
        return [_mpirun(), "-np", str(job.ranks)], peers + found
    launcher = [sys.executable, "-m", "perseus.run", "-np", str(job.ranks)]
    if job.placement is not None:
        launcher += ["-H", job.placement]
    elif job.hosts > 1:
        least, more = divmod(job.ranks, job.hosts)
        shares = [least + (i < more) for i in range(job.hosts)]
        launcher += ["-H", ",".join(f"host{i}:{share}" for i, share in enumerate(shares))]
        if job.plan.links > 1:
            names = [f"eth{link}" for link in range(job.plan.links)]
            launcher += ["--network-interface", ",".join(names)]
    return [*launcher, "--"], peers


def _missing(job: Job, peer: str) -> str:
    """Return the reason why a peer is not available; "" if it seems to be."""
    if job.hosts > 1 or job.placement is not None:
        return "several hosts are driven by perseusrun, it needs mpirun"
    if not _mpirun():
        return "there is no mpirun"
    modules = ("mpi4py.MPI", "horovod.torch") if peer == "horovod" else ("mpi4py.MPI",)
    for module in modules:
        # The import may load MPI and crash, so a separate process tries it.
        command = [sys.executable, "-c", f"import {module}"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=_END_GRACE * 3)
        if result.returncode != 0:
            return f"import {module} fails: {(result.stderr.strip().splitlines() or ['?'])[-1]}"
    return ""


def _mpirun() -> str:
    places = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
    return shutil.which("mpirun", path=places) or ""


@contextmanager
def _place(
    job: Job,
) -> Iterator[tuple[Callable[..., subprocess.Popen[str]], Callable[[Plan], Plan]]]:
    """Yield functions that start a command where the job runs, and that complete a plan for it."""
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    if job.hosts == 1:
        # By default, Open MPI rejects root and more ranks than cores. MPICH ignores the variables.
        mpi = {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            "OMPI_MCA_hwloc_base_binding_policy": "none",
        }
        yield (lambda command, env: subprocess.Popen(command, env={**mpi, **env}, **options)), _same
        return
    with VirtualHosts(job.hosts, job.rate, job.plan.links) as hosts:
        rate = None if job.rate is None else bits_per_second(job.rate) / 1e9
        yield (
            lambda command, env: hosts.popen(
                0, command, env={**env, "PATH": hosts.environment()["PATH"]}, **options
            ),
            lambda plan: replace(plan, rate_gbit=rate),
        )


def _same(plan: Plan) -> Plan:
    return plan


def _listen(
    process: subprocess.Popen[str],
    timeout: float,
    log: Callable[[str], None],
    on_record: Callable[[str], None],
) -> int:
    """Read output until the job ends; return its status. Raises JobError if it takes too long."""
    late = threading.Event()

    def interrupt() -> None:
        late.set()
        process.send_signal(signal.SIGINT)
        killer.start()

    killer = threading.Timer(_END_GRACE, process.kill)
    killer.daemon = True
    timer = threading.Timer(timeout, interrupt)
    timer.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            text, mark, content = line.partition(MARK)
            if mark:
                on_record(content)
            else:
                log(text.rstrip())
        status = process.wait(_END_GRACE)
    finally:
        timer.cancel()
        killer.cancel()
    if late.is_set():
        raise JobError(f"the job was ended after {timeout:.0f} s (--timeout)")
    return status


def _end(process: subprocess.Popen[str]) -> None:
    """End the job's process, if it still runs, and close its output."""
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGKILL):
        if process.poll() is not None:
            break
        process.send_signal(number)
        try:
            process.wait(_END_GRACE / 2)
        except subprocess.TimeoutExpired:
            continue
    if process.stdout is not None:
        process.stdout.close()


__all__ = ["HostsUnavailableError", "Job", "JobError", "run"]

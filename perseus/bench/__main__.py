"""The command line of perseus-bench: runs jobs, and prints and saves their records.

Single-threaded.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from types import FrameType

from perseus import command_line, config
from perseus.bench import report
from perseus.bench.bars import suite
from perseus.bench.codecs import check_variables
from perseus.bench.codecs import parse as parse_codecs
from perseus.bench.launch import HostsUnavailableError, Job, JobError, run
from perseus.bench.models import MODELS, TRAINED
from perseus.bench.outputs import Outputs
from perseus.bench.plan import (
    DDP,
    IN_EQUAL_PARTS,
    NEED_MPIRUN,
    ON_DDP,
    ON_GPUS,
    OWN_SIZES,
    PEERS,
    TENSORFLOW,
    TORCH,
    Plan,
)
from perseus.bench.record import Record
from perseus.bench.sizes import in_equal_parts, parse_sizes, show_bytes
from perseus.bench.virtual_hosts import VirtualHosts
from perseus.command_line import Parser, log
from perseus.run.hosts import parse_hosts

_CASES = {
    "memory": "in-place allreduce of one large tensor, against memcpy",
    "latency": "blocking allreduce of 4 bytes",
    "tensors": "500 tensors of 1000 floats, against packing them",
    "network": "in-place allreduce of one large tensor, against a raw TCP exchange",
    "gradients": "all gradients of a model, or of one tensor, through codecs",
    "training": "a network's optimizer steps, against DDP or MultiWorkerMirroredStrategy",
    "ddp": "all gradients of a model through DDP's buckets, whose sizes --sizes gives",
    "ddp-training": "DDP's training steps, on Perseus and on gloo with torch's hooks",
    "collectives": "every operation over a range of sizes",
}
# Options that the suite has no use for.
_OF_CASES = (
    "num_proc", "sizes", "gpu", "peer", "model", "codec", "seconds", "timeout", "placement",
    "hosts", "rate", "links", "compute",
)  # fmt: skip
_SECONDS = 3.0
_WITH_CODECS = ("gradients", "training", "ddp-training")
_WITH_MODELS = ("gradients", "training", "ddp", "ddp-training")
_AGAINST_NATIVE = ("training", *ON_DDP)  # have the framework's own training as their only peer
_USAGE_ERROR = 2
_ENDING = (signal.SIGTERM, signal.SIGHUP)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; return the exit status.

    It is 0 on success, 1 if a job failed, a result was wrong or an output could not be written, 2
    for wrong usage, and 128 + n if signal n ended it, where a closed output counts as SIGPIPE.
    """
    for number in _ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP, which must remain so
            signal.signal(number, _ended)
    try:
        return command_line.run("perseus-bench", lambda: _measure(arguments))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _measure(arguments: Sequence[str] | None) -> int:
    try:
        given = _parser().parse_args(arguments)
        outputs = Outputs(given)
        config.check()
        if given.advise:
            return _advise(given, outputs)
        jobs = _jobs(given)
        outputs.open()
    except ValueError as error:
        log(f"perseus-bench: error: {error}")
        return _USAGE_ERROR
    for job in jobs:
        _log_other_sizes(job)
    load_before = os.getloadavg()[0]
    records: list[Record] = []
    problems, complete = _run_all(jobs, records, outputs)
    outputs.conclude(records, problems, load_before)
    if not given.cases:
        outputs.show(f"\n{report.summary(records)}")
    complete = complete and outputs.complete
    return 0 if complete and all(record.verified for record in records) else 1


def _log_other_sizes(job: Job) -> None:
    """Print a message if a case measures other sizes than those of --sizes."""
    sizes = job.plan.sizes
    for case in job.plan.cases:
        if sizes and case in OWN_SIZES:
            log(f"perseus-bench: {case}: it has its own sizes, --sizes does not change them")
    parted = {size: in_equal_parts(size, job.ranks) for size in sizes}
    others = [f"{exact} bytes for {size}" for size, exact in parted.items() if exact != size]
    if others and "collectives" in job.plan.cases:
        log(
            f"perseus-bench: {', '.join(IN_EQUAL_PARTS)}: {', '.join(others)}, an equal part of "
            f"float32 for each of {job.ranks} ranks"
        )


def _advise(given: argparse.Namespace, outputs: Outputs) -> int:
    """Run a job that measures links, and print which settings to use; return the exit status."""
    others = ("codec", "sizes", "plot", "readme", "bars", "gpu", "peer", "seconds")
    if given.cases or _has_any(given, others):
        raise ValueError("--advise takes models, ranks, hosts and --compute, and measures no case")
    if given.framework != TORCH:
        raise ValueError(f"--framework {given.framework}: --advise computes with torch")
    _check_packages(TORCH)
    from perseus.bench import advice

    def show(line: str) -> None:
        outputs.add(line.rstrip())
        outputs.show(advice.show(advice.Advice.from_json(line)))

    models = _names(given.model, MODELS, "--model")
    plan = Plan([], models=models, links=given.links or 1, advise=True, compute_s=given.compute)
    job = _job(given, plan)
    outputs.open()
    try:
        run(job, log, show)
    except (JobError, HostsUnavailableError) as error:
        log(f"perseus-bench: {error}")
        return 1
    return 0 if outputs.complete else 1


def _ended(number: int, frame: FrameType | None) -> None:
    # A terminal that closes sends two: the second must not interrupt what the first one began.
    for each in _ENDING:
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(128 + number)  # an exception, so that `finally` clauses end the ranks


def _run_all(jobs: list[Job], records: list[Record], outputs: Outputs) -> tuple[list[str], bool]:
    """Run jobs one after the other; append to records, and add each to outputs at once.

    Returns what went wrong, and whether all jobs ran that can run here: if there are several, those
    that need virtual hosts may be missing.
    """

    def show(line: str) -> None:
        record = Record.from_json(line)
        records.append(record)
        outputs.add(record.to_json())
        outputs.show(report.show_line(record))

    problems, complete = [], True
    outputs.show(report.heading())
    for job in jobs:
        try:
            run(job, log, show)
        except (JobError, HostsUnavailableError) as error:
            log(f"perseus-bench: {error}")
            problems.append(str(error))
            optional = len(jobs) > 1 and isinstance(error, HostsUnavailableError)
            complete = complete and optional
    return problems, complete


def _jobs(given: argparse.Namespace) -> list[Job]:
    _check_packages(given.framework, "numpy")
    if given.framework == TENSORFLOW and given.cases != ["training"]:
        raise ValueError(f"--framework {TENSORFLOW}: it has the case training")
    if not given.cases or not set(_WITH_MODELS).isdisjoint(given.cases):
        check_variables(os.environ)
    if not given.cases:
        if _has_any(given, _OF_CASES):
            raise ValueError(
                "the suite has its own ranks, hosts, sizes, peers and times: name a case, such as "
                "memory"
            )
        return suite()
    unknown = [case for case in given.cases if case not in _CASES]
    if unknown:
        raise ValueError(f"no case '{unknown[0]}': expected {', '.join(_CASES)}")
    if given.compute is not None:
        raise ValueError("--compute is of --advise")
    if given.model and not set(_WITH_MODELS).intersection(given.cases):
        raise ValueError(f"--model is of {', '.join(_WITH_MODELS)}, not of {given.cases[0]}")
    trains = not {"training", "ddp-training"}.isdisjoint(given.cases)
    plan = Plan(
        cases=given.cases,
        peers=_peers(given),
        sizes=parse_sizes(given.sizes) if given.sizes else [],
        models=_names(given.model, TRAINED if trains else MODELS, "--model"),
        codecs=_codecs(given),
        seconds=given.seconds or _SECONDS,
        links=given.links or 1,
        framework=given.framework,
        gpu=given.gpu,
        here=not given.placement,
    )
    if plan.gpu:
        _check_gpus(plan)
    job = _job(given, plan)
    _check_memory(given.sizes, job)
    if "network" in plan.cases and job.ranks < 2:
        raise ValueError("network -np 1: expected two ranks or more, which exchange their bytes")
    return [job]


def _check_packages(*names: str) -> None:
    """Raise ValueError if a package that the ranks import is missing here."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"{sys.executable} has no {name}, which perseus-bench needs")


def _has_any(given: argparse.Namespace, names: Collection[str]) -> bool:
    """Return whether the command line sets one of these options."""
    parser = _parser()
    return any(getattr(given, name) != parser.get_default(name) for name in names)


def _check_gpus(plan: Plan) -> None:
    """Raise ValueError if a case or peer has no tensors on GPUs, or ranks here have no GPU."""
    others = [f"case {name}" for name in plan.cases if name not in ON_GPUS]
    others += [f"--peer {name}" for name in plan.peers if name in NEED_MPIRUN]
    if others:
        raise ValueError(f"--gpu: {others[0]} has tensors in host memory alone")
    from torch import cuda

    if plan.here and not cuda.is_available():
        raise ValueError("--gpu: PyTorch sees no GPU on this machine")


def _check_memory(sizes: str | None, job: Job) -> None:
    """Raise ValueError if this machine cannot hold a tensor of the largest size for each rank."""
    plan = job.plan
    holds_tensors = not {*plan.cases}.issubset((*ON_DDP, *OWN_SIZES))
    if not holds_tensors or not plan.here or plan.gpu:
        return
    largest, memory = max(plan.sizes, default=0), report.memory()
    if job.ranks * largest > memory:
        raise ValueError(
            f"--sizes {sizes}: {job.ranks} ranks hold {show_bytes(largest)} each, and this machine "
            f"has {show_bytes(memory)} of memory"
        )


def _job(given: argparse.Namespace, plan: Plan) -> Job:
    """Return a job for the plan, with the ranks and hosts of the command line."""
    if given.hosts and given.placement:
        raise ValueError("--hosts makes virtual hosts, -H names real ones: give one of them")
    hosts = given.hosts or 1
    links = given.links or 1
    usual = max(2, hosts)
    if given.placement:
        usual = sum(host.slots for host in parse_hosts(given.placement))
    ranks = given.num_proc or usual
    if hosts > ranks:
        raise ValueError(f"--hosts {hosts}: more hosts than ranks (-np {ranks})")
    if hosts == 1 and (given.rate or links > 1):
        raise ValueError("--rate and --links are of virtual hosts: add --hosts 2")
    if hosts > 1:
        VirtualHosts(hosts, given.rate, links)  # raises ValueError for wrong arguments
    long = any("training" in case for case in given.cases)
    timeout = given.timeout or (3600.0 if long else 600.0)
    return Job(plan, ranks, hosts, given.rate, given.placement, timeout=timeout)


def _peers(given: argparse.Namespace) -> list[str]:
    peers = PEERS[given.framework]
    if given.peer is None:
        return [peers[0]]
    if given.peer != DDP or given.framework != TORCH:
        named = _names(given.peer, peers, "--peer")
        if peers[0] not in named and (on_ddp := [case for case in given.cases if case in ON_DDP]):
            raise ValueError(f"--peer {given.peer}: {on_ddp[0]} compares with {peers[0]}")
        others = [name for name in named if name != peers[0]]
        if others and set(given.cases).issubset(_AGAINST_NATIVE):
            raise ValueError(f"--peer {others[0]}: {given.cases[0]} compares with {peers[0]}")
        return named
    if given.cases != ["training"]:
        raise ValueError(f"--peer {DDP}: it is a peer of training; others have torch-gloo")
    return ["torch-gloo"]


def _codecs(given: argparse.Namespace) -> list[str]:
    """Return the labels of the codecs; raise ValueError for one that this build does not have."""
    found = parse_codecs(given.codec)
    others = [case for case in given.cases if case not in _WITH_CODECS]
    if found and others:
        raise ValueError(f"--codec is of {', '.join(_WITH_CODECS)}, not of {others[0]}")
    for codec in found:
        codec.arguments(given.framework)
        if codec.name == "rotate" and "gradients" in given.cases:
            raise ValueError(
                f"--codec {codec.label}: it averages parameters after a step, not gradients; "
                f"measure it by the case training"
            )
        if "ddp-training" in given.cases:
            codec.variables()
    return [codec.label for codec in found]


def _names(text: str, known: Collection[str], flag: str) -> list[str]:
    names = list(dict.fromkeys(name for name in text.split(",") if name))
    for name in names:
        if name not in known:
            raise ValueError(f"{flag} {name}: expected some of {', '.join(known)}")
    return names


def _parser() -> argparse.ArgumentParser:
    cases = "\n".join(f"  {name:12} {text}" for name, text in _CASES.items())
    parser = Parser(
        prog="perseus-bench",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Starts ranks and measures Perseus, peers and the machine's limits in turn in "
        "the same processes.\nEvery result is verified. Variables such as PERSEUS_TRANSPORT=tcp "
        "are handed on to the ranks.",
        epilog=f"cases:\n{cases}\nWithout a case: all bars of benchmarks/README.md.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "cases",
        nargs="*",
        metavar="case",
        help="see below; none = the suite of benchmarks/README.md",
    )
    add("-np", "--num-proc", type=_positive, metavar="N", help="ranks (2, or all slots of -H)")
    add("--sizes", metavar="LIST", help="bytes, such as 4,64K or 4K-64M (steps of four)")
    add("--framework", choices=PEERS, default=TORCH, help="whose tensors (torch)")
    add("--gpu", action="store_true", help=f"tensors on GPUs: {' and '.join(ON_GPUS)}")
    peers = "; ".join(f"{', '.join(names)} of {name}" for name, names in PEERS.items())
    add("--peer", metavar="LIST", help=f"{peers}; default each one's first, '' = none")
    add("--model", default="", metavar="LIST", help=f"of {', '.join(MODELS)}; default all")
    add(
        "--codec",
        default="",
        metavar="LIST",
        help="such as int8,int4,int2,topk:0.01,powersgd:4,rotate:8,auto",
    )
    add("--seconds", type=_seconds, help=f"per size, all contenders together ({_SECONDS:g})")
    add("--timeout", type=_seconds, metavar="SECONDS", help="for a job (600; training 3600)")
    add("-H", dest="placement", metavar="host:slots,...", help="real hosts, as for perseusrun")
    add("--hosts", type=_positive, metavar="N", help="spread the ranks over N virtual hosts (root)")
    add("--rate", metavar="RATE", help="of each virtual link, such as 1gbit; default unlimited")
    add("--links", type=_positive, metavar="K", help="links per virtual host (1)")
    add("--advise", action="store_true", help="no case: measure links, say what settings to use")
    add("--compute", type=_seconds, metavar="SECONDS", help="that a step computes (--advise)")
    add("--json", type=Path, metavar="FILE", help="write one JSON record a line")
    add("--plot", type=Path, metavar="FILE.png", help="draw the records")
    add("--readme", type=Path, metavar="FILE", help="write the suite's results between its markers")
    add("--bars", type=Path, metavar="FILE", help="write the suite's bars between its markers")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}': expected a whole number, 1 or more")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"'{text}': expected seconds above 0")
    return value


if __name__ == "__main__":
    sys.exit(main())

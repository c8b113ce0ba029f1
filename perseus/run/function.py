"""perseus.run(): calls a Python function on many ranks and returns their results.

The pickled function and the pickled results travel through the hosts' agents, which means through
pipes on this host and through ssh to other hosts. Therefore only the ranks that were started can
send a pickle. One thread at a time. Source of behaviour: Horovod 0.28.1, horovod.run.
"""
# ruff: noqa: PLR0917 - the signature is Horovod's

from __future__ import annotations

import signal
import sys
import warnings
from collections.abc import Callable, Iterable
from pickle import UnpicklingError
from typing import Any, NoReturn

from perseus.compat.common.command import WITHOUT_HOROVOD, is_aliased, with_alias
from perseus.objects import dumps, loads
from perseus.run.bootstrap.start_settings import start_timeout as usual_start_timeout
from perseus.run.elastic.discovery import (
    FixedHosts,
    HostDiscovery,
    HostDiscoveryFunction,
    HostDiscoveryScript,
)
from perseus.run.elastic.driver import ElasticLauncher
from perseus.run.elastic.elasticity import Elasticity
from perseus.run.elastic.flags import checked_elasticity, refuse_alone
from perseus.run.hosts import Host, Slot, parse_hostfile, parse_hosts, place
from perseus.run.job import Job, LaunchError
from perseus.run.launch import Launcher

# The first byte of a rank's answer: the pickled result follows, or a pickled pair (traceback,
# pickled exception or None).
RETURNED, FAILED = b"r", b"f"

_TRACE_HEAD = "Traceback (most recent call last):\n"
_HOROVOD_HINT = (
    "the function imports horovod, which is not installed: start this program with "
    "'python -m perseus.compat.horovod', and it finds Perseus under that name"
)
_MPI = (
    "Perseus starts the ranks by itself: leave it out, or start a script with mpirun "
    "(docs/launching.md)"
)


def run(
    func: Callable[..., Any],
    args: Iterable[Any] = (),
    kwargs: dict[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Any = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | Callable[[], dict[str, int]] | None = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: str | Iterable[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Call func(*args, **kwargs) on num_proc ranks; return their results, ordered by rank.

    func: is pickled with cloudpickle, so it may be a lambda or a function of the main script. It
        calls hvd.init() itself. It imports modules from this process's sys.path, unless
        `executable` is given.
    hosts, hostfile: as for perseusrun's -H and --hostfile; default: this host.
    start_timeout: seconds within which hosts and ranks must appear; default: the value of
        HOROVOD_START_TIMEOUT, or 60.
    ssh_port, ssh_identity_file, output_filename, verbose: as for perseusrun's flags.
    network_interfaces: names, in a list or separated by commas.
    executable: the Python that runs the ranks; default: the one that runs this process.
    min_num_proc, max_num_proc, slots, reset_limit, cooldown_range, host_discovery_script: make the
        job elastic, as perseusrun's flags --min-np, --max-np, --slots-per-host, --reset-limit,
        --blacklist-cooldown-range and --host-discovery-script do; the first or the last one is
        enough. host_discovery_script may also be a function that returns {host: slots}, which is
        called once a second. The results are those of the last world's ranks.
    np, min_np, max_np, network_interface: deprecated names of num_proc, min_num_proc, max_num_proc
        and network_interfaces.
    disable_cache, use_gloo: have no effect, because nothing is cached, and gloo means the built-in
        backend.

    The ranks' output is printed as perseusrun prints it. If a rank fails, all others are ended.
    Ctrl-C or the end of this process ends all ranks. In a thread other than the main thread, no
    signal handlers are installed.

    Raises RuntimeError if a rank fails, with the rank's traceback in the message and its exception
    as the cause, or if ranks cannot be started; an elastic job goes on without ranks that fail, as
    long as enough are left. ValueError for inconsistent arguments; NotImplementedError for use_mpi
    and mpi_args.
    """
    if use_gloo and use_mpi:
        raise ValueError("[run] use_gloo and use_mpi: expected one of them, or none")
    for name, given in (("use_mpi", use_mpi), ("mpi_args", mpi_args)):
        if given:
            raise NotImplementedError(f"[run] {name}: {_MPI}")
    for old, count in (("np", np), ("min_np", min_np), ("max_np", max_np)):
        if count is not None:
            new = old.replace("np", "num_proc")
            warnings.warn(f"{old} is deprecated: use {new}", DeprecationWarning, stacklevel=2)
    num_proc = num_proc if np is None else np
    min_num_proc = min_num_proc if min_np is None else min_np
    max_num_proc = max_num_proc if max_np is None else max_np
    elasticity = None
    if min_num_proc is None and host_discovery_script is None:
        refuse_alone(
            max_num_proc=max_num_proc,
            slots=slots,
            reset_limit=reset_limit,
            cooldown_range=cooldown_range,
        )
    else:
        start = max(num_proc, min_num_proc or 1)
        elasticity = checked_elasticity(
            _discovery(host_discovery_script, slots, hosts, hostfile, max_num_proc or start),
            start,
            min_num_proc,
            max_num_proc,
            timeout=None,
            reset_limit=reset_limit,
            cooldown=cooldown_range,
        )
    if network_interface is not None:
        warnings.warn(
            "network_interface is deprecated: use network_interfaces",
            DeprecationWarning,
            stacklevel=2,
        )
        network_interfaces = network_interfaces or network_interface
    command = [executable or sys.executable, "-m", "perseus.run.rank"]
    call = dumps((func, tuple(args), dict(kwargs or {})))
    job = Job(
        command=with_alias(command) if is_aliased() else command,
        slots=[] if elasticity is not None else _placed(hosts, hostfile, num_proc),
        start_timeout=start_timeout or usual_start_timeout(),
        ssh_port=ssh_port,
        ssh_identity_file=ssh_identity_file,
        interfaces=_names(network_interfaces),
        flags={"HOROVOD_START_TIMEOUT": str(start_timeout)} if start_timeout else {},
        output_directory=output_filename,
        verbose=bool(verbose),
        call=dumps((None if executable else sys.path, call)),
    )
    return _results(job, elasticity)


def _placed(hosts: str | None, hostfile: str | None, ranks: int) -> list[Slot]:
    if ranks < 1:
        raise ValueError(f"[run] num_proc={ranks}: expected 1 or more")
    return place(_hosts(hosts, hostfile, ranks), ranks)


def _hosts(hosts: str | None, hostfile: str | None, ranks: int) -> list[Host]:
    if hosts is not None and hostfile is not None:
        raise ValueError("[run] hosts and hostfile: expected one of them, or none")
    if hostfile is not None:
        return parse_hostfile(hostfile)
    return [Host("localhost", ranks)] if hosts is None else parse_hosts(hosts)


def _discovery(
    script: str | Callable[[], dict[str, int]] | None,
    slots: int | None,
    hosts: str | None,
    hostfile: str | None,
    ranks: int,
) -> HostDiscovery:
    if script is None:
        return FixedHosts(_hosts(hosts, hostfile, ranks))
    if hosts is not None or hostfile is not None:
        raise ValueError("[run] host_discovery_script does not go with hosts and hostfile")
    if callable(script):
        return HostDiscoveryFunction(script)
    return HostDiscoveryScript(script, slots)


def _names(interfaces: str | Iterable[str] | None) -> list[str]:
    given = interfaces.split(",") if isinstance(interfaces, str) else interfaces or []
    return [name for name in given if name]


class _Answers:
    """The answers that have arrived from the ranks so far."""

    def __init__(self) -> None:
        self.of_rank: dict[int, bytearray] = {}
        self.failures: list[int] = []  # ranks, in the order in which they reported their failure

    def on_answer(self, rank: int, data: bytes) -> None:
        if rank not in self.of_rank:
            self.of_rank[rank] = bytearray()
            if data.startswith(FAILED):
                self.failures.append(rank)
        self.of_rank[rank] += data

    def content(self, rank: int) -> memoryview:
        return memoryview(self.of_rank[rank])[1:]


def _results(job: Job, elasticity: Elasticity | None) -> list[Any]:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()  # the ranks' output must come after this process's
    answers = _Answers()
    launcher = (
        Launcher(job, answers.on_answer)
        if elasticity is None
        else ElasticLauncher(job, elasticity, answers.on_answer)
    )
    try:
        launcher.run()
    except LaunchError as error:
        kind = ValueError if error.code == 2 else RuntimeError
        raise kind(f"[run] {error}") from None
    if launcher.signalled == signal.SIGPIPE:
        raise BrokenPipeError("[run] nobody reads what the ranks print")
    if launcher.signalled is not None:
        signal.raise_signal(launcher.signalled)  # for the handler that this process has for it
        raise RuntimeError(f"[run] ended by {signal.Signals(launcher.signalled).name}")
    if launcher.first_failure is not None:
        _raise_failure(launcher, answers, *launcher.first_failure)
    numbers = launcher.ranks()
    for number in numbers:
        if number not in answers.of_rank:
            raise RuntimeError(
                f"[run] {launcher.name_of(number)} ended without a result: the function left by "
                f"sys.exit() or os._exit()"
            )
    return [loads(answers.content(number)) for number in numbers]


def _raise_failure(launcher: Launcher, answers: _Answers, number: int, status: int) -> NoReturn:
    """Raise RuntimeError for the rank that failed first: others may have failed because of it."""
    if number not in answers.of_rank:
        raise RuntimeError(
            f"[run] {launcher.name_of(number)} ended with exit code {status} and without a result; "
            f"what it printed comes before"
        )
    failures = answers.failures
    if isinstance(launcher, ElasticLauncher):  # it has survived other failures
        failures = [number] if number in failures else []
    if not failures:
        raise RuntimeError(
            f"[run] {launcher.name_of(number)} had its result and then ended with exit code "
            f"{status}; what it printed comes before"
        )
    # Ranks may exit in another order than the one in which they failed, as each one cleans up.
    number = failures[0]
    trace, cause = _failure_in(answers.content(number))
    if WITHOUT_HOROVOD in trace:
        trace += f"({_HOROVOD_HINT})\n"
    raise RuntimeError(f"[run] {launcher.name_of(number)} failed:\n{trace}") from cause


def _failure_in(content: memoryview) -> tuple[str, BaseException | None]:
    """Return a failed rank's traceback and its exception, or None if pickle cannot restore it."""
    try:
        trace, pickled = loads(content)
    except (EOFError, UnpicklingError):
        return "(it was ended before it could say why; what it printed comes before)", None
    # The traceback in which it is printed has this head already.
    trace = trace.removeprefix(_TRACE_HEAD)
    try:
        cause = None if pickled is None else loads(pickled)
    except Exception:  # such as an exception whose constructor takes other arguments
        return trace, None
    return trace, cause if isinstance(cause, BaseException) else None

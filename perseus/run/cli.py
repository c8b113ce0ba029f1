"""The command line of perseusrun: turns its arguments into a Job and runs it. Single-threaded."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from perseus import command_line
from perseus.command_line import Parser, log, show
from perseus.compat.common.command import with_alias
from perseus.installed import require
from perseus.run import mpirun, settings, signals
from perseus.run.bootstrap.start_settings import start_timeout
from perseus.run.check_build import report
from perseus.run.config_file import arguments_of
from perseus.run.elastic import flags as elastic_flags
from perseus.run.elastic.driver import ElasticLauncher
from perseus.run.elastic.flags import elasticity, given_hosts, is_elastic
from perseus.run.hosts import Host, Slot, place
from perseus.run.inspection import ask
from perseus.run.job import Job, LaunchError
from perseus.run.launch import Launcher
from perseus.run.settings import positive
from perseus.version import __version__

_USAGE_ERROR = 2
_LOG_LEVELS = ("PERSEUS_LOG_LEVEL", "HOROVOD_LOG_LEVEL")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a job.

    Returns the exit status: 0 if all ranks succeeded, else that of the first rank that failed;
    2 for wrong usage.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    return command_line.run("perseusrun", lambda: _run(words))


def _run(arguments: list[str]) -> int:
    signals.remember_children()
    try:
        given = _parsed(arguments)
        if given.version:
            show(__version__)
            return 0
        if given.check_build:
            show(report(__version__))
            return 0
        if given.inspect is not None:
            show(ask(given.inspect))
            return 0
        if given.build_xla:
            require("tensorflow")
            # A separate process keeps TensorFlow out of the launcher.
            module = "perseus.tensorflow.build_xla"
            return subprocess.run([sys.executable, "-m", module]).returncode
        signals.inspect_signal()  # which refuses a wrong number
        arguments_of_mpirun = _words("--mpi-args", given.mpi_args)
        binding = _words("--binding-args", given.binding_args)
        job = _job(given)
        launcher = _launcher(given, job)
    except ValueError as error:
        return _complain(str(error), _USAGE_ERROR)
    except ModuleNotFoundError as error:
        return _complain(str(error), 1)
    try:
        if given.mpi:
            mpirun.start(job, arguments_of_mpirun, binding)
        return launcher.run()
    except LaunchError as error:
        return _complain(str(error), error.code)


def _parsed(arguments: list[str]) -> argparse.Namespace:
    """Return what the command line and its --config-file say; what both say, the former decides."""
    given = _parser().parse_args(arguments)
    if given.config_file is not None:
        of_file = arguments_of(
            given.config_file,
            with_controller=not (given.gloo or given.mpi or given.jsrun),
            with_hosts=given.hosts is None and given.hostfile is None,
            is_elastic=is_elastic(given),
        )
        try:
            given = _parser().parse_args([*of_file, *arguments])
        except ValueError as error:
            raise ValueError(f"with --config-file {given.config_file}: {error}") from None
    for flag, why in (given.needless or {}).items():
        log(f"perseusrun: {flag} has no effect: {why}")
    return given


def _words(flag: str, text: str | None) -> list[str]:
    try:
        return shlex.split(text or "")
    except ValueError as error:
        raise ValueError(f"{flag} {text}: {error}") from None


def _job(given: argparse.Namespace) -> Job:
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    if given.jsrun:
        raise ValueError("perseusrun does not support --jsrun; --mpi starts the ranks with mpirun")
    for flag, arguments in (("--mpi-args", given.mpi_args), ("--binding-args", given.binding_args)):
        if arguments is not None and not given.mpi:
            raise ValueError(f"{flag} needs --mpi: they are arguments of mpirun")
    if not command:
        raise ValueError("no command given: expected one such as perseusrun -np 2 python train.py")
    if given.horovod:
        command = with_alias(command)
    flags = settings.variables(given)
    if given.start_timeout is not None:
        flags["HOROVOD_START_TIMEOUT"] = str(given.start_timeout)
    if given.verbose and not any(os.environ.get(name) for name in _LOG_LEVELS):
        flags.setdefault("PERSEUS_LOG_LEVEL", "info")
    return Job(
        command=command,
        slots=_slots(given),
        start_timeout=given.start_timeout or start_timeout(),
        ssh_port=given.ssh_port,
        ssh_identity_file=given.ssh_identity_file,
        ssh_accept_new_keys=given.ssh_accept_new_keys,
        interfaces=list(dict.fromkeys(name for names in given.nics or () for name in names)),
        flags=flags,
        output_directory=given.output_filename,
        timestamps=given.prefix_output_with_timestamp,
        verbose=given.verbose,
    )


def _slots(given: argparse.Namespace) -> list[Slot]:
    """Return the places of a job's ranks, which change in an elastic one."""
    if is_elastic(given):
        return []
    elastic_flags.refuse_alone(
        **{
            "--max-np": given.max_num_proc,
            "--slots-per-host": given.slots,
            "--elastic-timeout": given.elastic_timeout,
            "--reset-limit": given.reset_limit,
            "--blacklist-cooldown-range": given.cooldown_range,
        }
    )
    return place(*_where(given))


def _launcher(given: argparse.Namespace, job: Job) -> Launcher:
    if not is_elastic(given):
        return Launcher(job)
    return ElasticLauncher(job, elasticity(given))


def _where(given: argparse.Namespace) -> tuple[list[Host], int]:
    """Return the hosts and the total number of ranks."""
    hosts = given_hosts(given)
    ranks = given.num_proc
    if given.npernode is not None:  # as in mpirun, it overrides the slots of the hosts
        hosts = [Host(host.name, given.npernode) for host in hosts or [Host("localhost", 1)]]
        ranks = given.npernode * len(hosts) if ranks is None else ranks
    if ranks is None:
        raise ValueError("-np is missing: give the number of ranks, such as -np 2")
    if ranks < 1:
        raise ValueError(f"-np {ranks}: expected 1 or more")
    return hosts or [Host("localhost", ranks)], ranks


class _Parser(Parser):
    """Loads the core's table of variables only for -h."""

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Return the options that a word may mean, without abbreviations of words such as -np.

        argparse looks at all words before it knows where the command begins, and allow_abbrev does
        not concern words with one dash: the -n of `train.py -n 5` would mean -np or -npernode.
        """
        found: list[Any] = super()._get_option_tuples(option_string)
        return [each for each in found if len(each[1]) == len("-p")]

    def format_help(self) -> str:
        return super().format_help() + "\n" + _variables()


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="perseusrun",
        usage="perseusrun -np N [-H host:slots,... | --hostfile FILE] [options] [--] command ...",
        description="Starts N ranks of a command on this and other hosts and ends them together.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-v", "--version", action="store_true", help="show the version and exit")
    add("-np", "--num-proc", type=int, metavar="N", help="number of ranks")
    add(
        "-npernode",
        "--npernode",
        type=positive,
        metavar="N",
        help="ranks on each host, regardless of its slots; without -np, use all hosts",
    )
    add(
        "-cb",
        "--check-build",
        action="store_true",
        help="show the available frameworks, controllers and operations, and exit",
    )
    add(
        "--inspect",
        type=positive,
        metavar="PID",
        help="have the ranks of that perseusrun say what they wait for, and exit",
    )
    add(
        "--build-xla",
        action="store_true",
        help="compile the library that TensorFlow's jit_compile=True needs here, and exit",
    )
    add(
        "--start-timeout",
        type=positive,
        metavar="SECONDS",
        help="limit for hosts and ranks to appear; default HOROVOD_START_TIMEOUT, else 60",
    )
    add(
        "--network-interface",
        "--network-interfaces",
        dest="nics",
        action="append",
        type=lambda text: [name for name in text.split(",") if name],
        metavar="NAME[,NAME]",
        help="network interfaces for bootstrap (the first) and data; default: by routing",
    )
    add(
        "--output-filename",
        metavar="DIR",
        help="also write each rank's output to DIR/rank.<rank>/stdout and stderr",
    )
    add(
        "-prefix-timestamp",
        "--prefix-output-with-timestamp",
        action="store_true",
        help="put the time before every line that a rank prints",
    )
    add(
        "--verbose",
        action="store_true",
        help="log what perseusrun does, and what ranks decide (unless a log level is set)",
    )
    add(
        "--config-file",
        metavar="FILE",
        help="YAML with horovodrun's keys, and a group elastic; flags win (needs PyYAML)",
    )
    add(
        "--horovod",
        action="store_true",
        help="let 'import horovod' find Perseus, for unchanged scripts",
    )
    controller = parser.add_argument_group("controller")
    either = controller.add_mutually_exclusive_group()
    either.add_argument(
        "--gloo", action="store_true", help="use the built-in backend, which needs no MPI (default)"
    )
    either.add_argument("--jsrun", action="store_true", help=argparse.SUPPRESS)
    either.add_argument(
        "--mpi", action="store_true", help="let mpirun (Open MPI or MPICH) start the ranks"
    )
    controller.add_argument(
        "--binding-args", metavar="'...'", help="arguments of mpirun that bind ranks to cores"
    )
    controller.add_argument(
        "--mpi-args",
        metavar="'...'",
        help="more arguments of mpirun, such as --mpi-args='-x A --mca b c'",
    )
    elastic_flags.add_to(parser)
    where = parser.add_argument_group("hosts").add_mutually_exclusive_group()
    where.add_argument(
        "-H", "--hosts", metavar="host:slots,...", help="default localhost:N; slots default to 1"
    )
    where.add_argument(
        "-hostfile", "--hostfile", metavar="FILE", help="lines 'host slots=n', 'host:n' or 'host'"
    )
    where.add_argument(
        "--host-discovery-script",
        metavar="COMMAND",
        help="elastic: a shell command that prints 'host' or 'host:slots' lines; runs every second",
    )
    ssh = parser.add_argument_group("ssh (host names are passed on exactly as written)")
    ssh.add_argument("-p", "--ssh-port", type=positive, metavar="PORT", help="port of every host")
    ssh.add_argument("-i", "--ssh-identity-file", metavar="FILE", help="private key")
    ssh.add_argument(
        "--ssh-accept-new-keys",
        action="store_true",
        help="also trust hosts that known_hosts does not list (StrictHostKeyChecking=accept-new); "
        "default: the configuration of ssh",
    )
    settings.add_to(parser)
    add("command", nargs=argparse.REMAINDER, help="program and arguments, run by every rank")
    return parser


def _variables() -> str:
    """Return the core's table of environment variables as text."""
    try:
        table: list[dict[str, Any]] = import_module("perseus._core").config_table()
    except ImportError as error:
        return f"The native core, which has the environment variables, does not load: {error}\n"
    lines = ["environment variables (if set for perseusrun, every rank gets them):"]
    for entry in table:
        allowed = f" {entry['allowed']}" if entry["allowed"] else ""
        default = f", default {entry['default']}" if entry["default"] else ", default unset"
        lines.append(f"  {entry['name']}  ({entry['type']}{allowed}{default})")
        lines += textwrap.wrap(
            entry["help"], 100, initial_indent=" " * 8, subsequent_indent=" " * 8
        )
        if entry["aliases"]:
            lines.append(" " * 8 + "also: " + str(entry["aliases"]).replace(",", ", "))
    return "\n".join(lines) + "\n"


def _complain(message: str, code: int) -> int:
    log(f"perseusrun: error: {message}")
    return code

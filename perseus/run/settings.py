"""Flags that only set an environment variable for the ranks.

They are one table, with the names and ranges of horovodrun's flags. Immutable, thread-safe.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

_BYTES_PER_MIB = 1 << 20


@dataclass(frozen=True)
class Setting:
    """A flag with a value, and the variables that carry the value.

    variables: the first is the name in the configuration table, the others are its aliases.
    translate: converts the flag's text into the variables' text.
    """

    flag: str
    group: str
    kind: type[int] | type[float] | type[str]
    variables: tuple[str, ...]
    help: str
    choices: tuple[str, ...] = ()
    translate: Callable[[str], str] = str


@dataclass(frozen=True)
class Switch:
    """A flag without a value that sets a variable to a constant.

    alias: another name of the variable, which gets the constant as well.
    """

    flag: str
    group: str
    variable: str
    value: str
    help: str
    alias: str = ""


_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")

SETTINGS = (
    Setting(
        "--fusion-threshold-mb",
        "tuning",
        int,
        ("HOROVOD_FUSION_THRESHOLD",),
        "largest fused bucket in MiB; 0 turns fusion off",
        translate=lambda text: str(int(text) * _BYTES_PER_MIB),
    ),
    Setting(
        "--cycle-time-ms",
        "tuning",
        float,
        ("HOROVOD_CYCLE_TIME",),
        "pause between negotiation rounds in milliseconds",
    ),
    Setting(
        "--num-nccl-streams",
        "tuning",
        int,
        ("PERSEUS_ALLREDUCE_STREAMS", "HOROVOD_NUM_NCCL_STREAMS"),
        "how many buckets may be in flight at once",
    ),
    Setting(
        "--autotune-log-file",
        "tuning",
        str,
        ("HOROVOD_AUTOTUNE_LOG",),
        "file into which rank 0 writes what the tuner tried and chose",
    ),
    Setting(
        "--gloo-timeout-seconds",
        "tuning",
        int,
        ("GLOO_TIMEOUT_SECONDS", "HOROVOD_GLOO_TIMEOUT_SECONDS"),
        "seconds without a heartbeat after which a rank counts as dead",
    ),
    Setting(
        "--stall-check-warning-time-seconds",
        "stall check",
        int,
        ("HOROVOD_STALL_CHECK_TIME_SECONDS",),
        "age in seconds at which a tensor that some ranks lack is reported",
    ),
    Setting(
        "--stall-check-shutdown-time-seconds",
        "stall check",
        int,
        ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",),
        "age in seconds at which such a tensor ends the job; 0 = never",
    ),
    Setting(
        "--timeline-filename",
        "timeline",
        str,
        ("HOROVOD_TIMELINE",),
        "file into which rank 0 writes a Chrome trace; DYNAMIC = only from start_timeline() on",
    ),
    Setting(
        "--log-level",
        "logging",
        str,
        ("PERSEUS_LOG_LEVEL", "HOROVOD_LOG_LEVEL"),
        "least severe level of messages that ranks write",
        choices=_LEVELS,
        translate=str.lower,
    ),
)

SWITCHES = (
    Switch("--autotune", "tuning", "HOROVOD_AUTOTUNE", "1", "always try bucket sizes and streams"),
    Switch("--no-autotune", "tuning", "HOROVOD_AUTOTUNE", "0", "keep the initial ones"),
    Switch(
        "--hierarchical-allreduce",
        "tuning",
        "PERSEUS_ALLREDUCE_MODE",
        "1",
        "let one rank of each host exchange its data with the other hosts",
        alias="HOROVOD_HIERARCHICAL_ALLREDUCE",
    ),
    Switch(
        "--no-hierarchical-allreduce",
        "tuning",
        "PERSEUS_ALLREDUCE_MODE",
        "0",
        "treat all ranks alike",
        alias="HOROVOD_HIERARCHICAL_ALLREDUCE",
    ),
    Switch(
        "--torus-allreduce",
        "tuning",
        "LIGHT_2D_ALLREDUCE",
        "1",
        "reduce inside groups of LIGHT_INTRA_SIZE ranks, then across the groups",
        alias="HOROVOD_TORUS_ALLREDUCE",
    ),
    Switch(
        "--no-torus-allreduce",
        "tuning",
        "LIGHT_2D_ALLREDUCE",
        "0",
        "treat all ranks alike",
        alias="HOROVOD_TORUS_ALLREDUCE",
    ),
    Switch("--tcp", "tuning", "NCCL_IB_DISABLE", "1", "keep NCCL away from InfiniBand"),
    Switch(
        "--no-stall-check",
        "stall check",
        "HOROVOD_STALL_CHECK_DISABLE",
        "1",
        "do not warn of stalled tensors",
    ),
    Switch("--stall-check", "stall check", "HOROVOD_STALL_CHECK_DISABLE", "0", argparse.SUPPRESS),
    Switch(
        "--timeline-mark-cycles",
        "timeline",
        "HOROVOD_TIMELINE_MARK_CYCLES",
        "1",
        "mark negotiation rounds in the timeline",
    ),
    Switch(
        "--no-timeline-mark-cycles",
        "timeline",
        "HOROVOD_TIMELINE_MARK_CYCLES",
        "0",
        argparse.SUPPRESS,
    ),
    Switch(
        "--log-without-timestamp",
        "logging",
        "HOROVOD_LOG_HIDE_TIME",
        "1",
        "leave the time out of log lines",
    ),
    Switch("--log-with-timestamp", "logging", "HOROVOD_LOG_HIDE_TIME", "0", argparse.SUPPRESS),
    Switch("--log-hide-timestamp", "logging", "HOROVOD_LOG_HIDE_TIME", "1", argparse.SUPPRESS),
    Switch("--no-log-hide-timestamp", "logging", "HOROVOD_LOG_HIDE_TIME", "0", argparse.SUPPRESS),
)


class _Needless(argparse.Action):
    """Takes a flag of horovodrun that asks for what Perseus does not have, and notes why.

    const: why nothing is lost without it.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        namespace.needless = {**(namespace.needless or {}), option_string: self.const}


# Flag -> how many values it has, and why it is not needed. Scripts give them, so they are taken.
_NEEDLESS = {
    "--disable-cache": (0, "perseusrun remembers nothing about hosts"),
    "--cache-capacity": (1, "Perseus remembers the negotiation of every tensor"),
    "--hierarchical-allgather": (0, "an allgather chooses its way itself"),
    "--no-hierarchical-allgather": (0, "an allgather chooses its way itself"),
    "--autotune-warmup-samples": (1, "the tuner decides itself how long it measures"),
    "--autotune-steps-per-sample": (1, "the tuner decides itself how long it measures"),
    "--autotune-bayes-opt-max-samples": (1, "the tuner tries a few settings in turn"),
    "--autotune-gaussian-process-noise": (1, "the tuner tries a few settings in turn"),
    "--mpi-threads-disable": (0, "Perseus calls MPI from one thread at a time"),
    "--no-mpi-threads-disable": (0, "Perseus calls MPI from one thread at a time"),
    "--thread-affinity": (1, "the thread of Perseus sleeps unless there is something to do"),
}


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add every setting and switch to the parser, in its group. Their default is None."""
    for flag, (values, why) in _NEEDLESS.items():
        parser.add_argument(
            flag,
            dest="needless",
            action=_Needless,
            nargs=values,
            const=why,
            help=argparse.SUPPRESS,
        )
    groups: dict[str, argparse._ArgumentGroup] = {}
    for entry in (*SETTINGS, *SWITCHES):
        if entry.group not in groups:
            groups[entry.group] = parser.add_argument_group(entry.group)
        if isinstance(entry, Switch):
            groups[entry.group].add_argument(
                entry.flag,
                dest=entry.variable,
                action="store_const",
                const=entry.value,
                help=entry.help,
            )
        else:
            groups[entry.group].add_argument(
                entry.flag,
                dest=entry.flag,
                type=_value_of(entry),
                choices=entry.choices or None,
                metavar=None if entry.choices else entry.kind.__name__.upper(),
                help=entry.help,
            )


def variables(arguments: argparse.Namespace) -> dict[str, str]:
    """Return {variable: value} for every flag that is on the command line."""
    given = vars(arguments)
    result = {}
    for setting in SETTINGS:
        if given[setting.flag] is not None:
            value = setting.translate(given[setting.flag])
            result.update(dict.fromkeys(setting.variables, value))
    for switch in SWITCHES:
        if given[switch.variable] is not None:
            names = [switch.variable, switch.alias] if switch.alias else [switch.variable]
            result.update(dict.fromkeys(names, given[switch.variable]))
    return result


def _value_of(setting: Setting) -> Callable[[str], str]:
    def check(text: str) -> str:
        if setting.kind is str:
            return text.upper() if setting.choices else text
        try:
            number = setting.kind(text)
        except ValueError:
            what = "whole number" if setting.kind is int else "number"
            raise argparse.ArgumentTypeError(f"'{text}' is not a {what}") from None
        if not float(number) >= 0:
            raise argparse.ArgumentTypeError(f"'{text}': expected 0 or more")
        return text

    return check


def positive(text: str) -> int:
    """Return the number in an argument, 1 or more; an error of argparse for anything else."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}': expected a whole number, 1 or more")
    return int(text)

"""The YAML file of `perseusrun --config-file`: horovodrun's keys, and a group for elastic jobs.

Its values become flags in front of those of the command line, which therefore win. Stateless.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from perseus.installed import require

_COOLDOWN = "--blacklist-cooldown-range"  # two values
_SCRIPT, _SLOTS = "--host-discovery-script", "--slots-per-host"
_LEAST = "--min-np"
_ELASTIC = ["--max-np", "--elastic-timeout", "--reset-limit", _COOLDOWN]
# Group -> key -> the flag with its value, or (the flag for true, the flag for false or "").
_KEYS: dict[str, dict[str, str | tuple[str, str]]] = {
    "params": {
        "fusion_threshold_mb": "--fusion-threshold-mb",
        "cycle_time_ms": "--cycle-time-ms",
        "cache_capacity": "--cache-capacity",
        # Files that spell out Horovod's defaults must not turn off what is best here.
        "hierarchical_allreduce": ("--hierarchical-allreduce", ""),
        "hierarchical_allgather": ("--hierarchical-allgather", ""),
        "torus_allreduce": ("--torus-allreduce", ""),
    },
    "autotune": {
        "enabled": ("--autotune", "--no-autotune"),
        "log_file": "--autotune-log-file",
        "warmup_samples": "--autotune-warmup-samples",
        "steps_per_sample": "--autotune-steps-per-sample",
        "bayes_opt_max_samples": "--autotune-bayes-opt-max-samples",
        "gaussian_process_noise": "--autotune-gaussian-process-noise",
    },
    "timeline": {
        "filename": "--timeline-filename",
        "mark_cycles": ("--timeline-mark-cycles", "--no-timeline-mark-cycles"),
    },
    "stall_check": {
        "enabled": ("--stall-check", "--no-stall-check"),
        "warning_time_seconds": "--stall-check-warning-time-seconds",
        "shutdown_time_seconds": "--stall-check-shutdown-time-seconds",
    },
    "library_options": {
        "mpi_threads_disable": ("--mpi-threads-disable", "--no-mpi-threads-disable"),
        "num_nccl_streams": "--num-nccl-streams",
        "thread_affinity": "--thread-affinity",
        "gloo_timeout_seconds": "--gloo-timeout-seconds",
    },
    "logging": {
        "level": "--log-level",
        "with_timestamp": ("--log-with-timestamp", "--log-without-timestamp"),
    },
    # Not horovodrun's, which has no keys for elastic jobs.
    "elastic": {
        "min_num_proc": _LEAST,
        "max_num_proc": "--max-np",
        "host_discovery_script": _SCRIPT,
        "slots_per_host": _SLOTS,
        "timeout": "--elastic-timeout",
        "reset_limit": "--reset-limit",
        "blacklist_cooldown_range": _COOLDOWN,
    },
}
_CONTROLLERS = ("gloo", "mpi")


def arguments_of(
    path: str, *, with_controller: bool, with_hosts: bool, is_elastic: bool
) -> list[str]:
    """Return the flags that a file stands for.

    with_controller, with_hosts: False where the command line chooses the controller or the hosts.
    is_elastic: whether the command line makes the job elastic. If neither it nor the file's other
        flags do so once a script of the file is left out, those about elastic jobs are, too.
    Raises ValueError that names the file and the key for what cannot be read or has no meaning,
    and ModuleNotFoundError without PyYAML.
    """
    require("yaml")
    import yaml

    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--config-file {path}: {error.strerror}") from None
    except (ValueError, yaml.YAMLError, RecursionError) as error:  # of a text, a date, the grammar
        text = _on_one_line(error)
        raise ValueError(f"--config-file {path}: this is not valid YAML: {text}") from None
    try:
        flags = [(words[0].split("=")[0], words) for words in _arguments(found, with_controller)]
        names = [name for name, _ in flags]
        left_out: list[str] = []
        if not with_hosts and _SCRIPT in names:
            left_out = [_SCRIPT, _SLOTS]
            left_out += [] if is_elastic or _LEAST in names else _ELASTIC
        return [word for name, words in flags if name not in left_out for word in words]
    except ValueError as error:
        raise ValueError(f"--config-file {path}: {_on_one_line(error)}") from None


def _on_one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _arguments(found: Any, with_controller: bool) -> Iterator[list[str]]:
    """Each flag with its values."""
    for group, keys in _mapping(found, "the file").items():
        if group == "controller":
            controller = None if keys is None else str(keys).lower()
            if controller not in (None, *_CONTROLLERS):
                raise ValueError(f"controller: {keys}: expected gloo or mpi")
            if with_controller and controller is not None:
                yield [f"--{controller}"]
            continue
        known = _look_up(_KEYS, group, "")
        for key, value in _mapping(keys, group).items():
            flag = _look_up(known, key, f"{group}.")
            if value is not None and (words := _flag(f"{group}.{key}", flag, value)):
                yield words


def _mapping(value: Any, what: str) -> Mapping[Any, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{what} is not a mapping of keys to values")
    return value


def _look_up(table: Mapping[str, Any], key: Any, prefix: str) -> Any:
    if key in table:
        return table[key]
    close = difflib.get_close_matches(str(key), table, n=1)
    hint = f"did you mean {prefix}{close[0]}?" if close else f"expected {', '.join(table)}"
    raise ValueError(f"{prefix}{key} is unknown: {hint}")


def _flag(key: str, flag: str | tuple[str, str], value: Any) -> list[str]:
    if isinstance(flag, tuple):
        if not isinstance(value, bool):
            raise ValueError(f"{key}: {value}: expected true or false")
        return [word for word in (flag[0] if value else flag[1],) if word]
    if flag == _COOLDOWN:
        if not isinstance(value, list) or [type(each) for each in value] != [int, int]:
            raise ValueError(f"{key}: {value}: expected a list of two whole numbers")
        return [flag, *map(str, value)]
    if not isinstance(value, int | float | str) or isinstance(value, bool):
        raise ValueError(f"{key}: {value}: expected one number or text, for {flag}")
    return [f"{flag}={value}"]

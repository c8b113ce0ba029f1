"""A job that perseusrun runs, the error if it cannot start, and the check of its settings.

Values and pure functions, except that checked_core() loads the native core. Thread-safe.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from perseus.compat.common.extensions import env
from perseus.installed import MissingCoreError
from perseus.run.agent import GRACE_SECONDS
from perseus.run.hosts import Slot
from perseus.run.link import SILENCE_SECONDS


class LaunchError(Exception):
    """The job could not start; the message is one line. `code` is the launcher's exit status."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Job:
    """A command for every rank, the hosts that run it, and how the launcher treats them.

    command: the program and its arguments.
    slots: one for each rank, ordered by rank.
    start_timeout: seconds for all hosts to answer.
    silence: seconds without a sign of life after which the launcher and another host count each
        other as lost.
    grace: seconds between SIGTERM and SIGKILL when ranks are ended.
    interfaces: network interfaces for bootstrap (the first one) and data; [] leaves it to routing.
    flags: environment variables that flags have set.
    output_directory: where to write each rank's output as well.
    call: the bytes that every rank gets on standard input; None leaves it empty.
    """

    command: list[str]
    slots: list[Slot]
    start_timeout: int = 60
    silence: float = SILENCE_SECONDS
    grace: float = GRACE_SECONDS
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    ssh_accept_new_keys: bool = False
    interfaces: list[str] = field(default_factory=list)
    flags: dict[str, str] = field(default_factory=dict)
    output_directory: str | None = None
    timestamps: bool = False
    verbose: bool = False
    call: bytes | None = None


def checked_core(flags: dict[str, str]) -> Any:
    """Return the native core after it has checked every variable in the job's environment.

    Raises LaunchError if the core does not load (code 1) or a variable is wrong (code 2).
    """
    try:
        core = import_module("perseus._core")
    except MissingCoreError as error:
        raise LaunchError(str(error)) from None
    except ImportError as error:
        raise LaunchError(
            f"perseus is not installed whole: {error}; pip install it again"
        ) from None
    try:
        with env(**flags):  # flags take precedence over the environment, as for the ranks
            core.config_check()
    except ValueError as error:
        raise LaunchError(str(error), 2) from None
    return core

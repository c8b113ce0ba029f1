"""What Perseus raises: one class per kind of failure, under the names Horovod users catch.

Everything that ends or spoils a collective is a HorovodInternalError (a RuntimeError); a request
that makes no sense and was never started is a ValueError, a NaN a FloatingPointError. The binding
looks these classes up by name. Plain values, thread-safe.
"""

from __future__ import annotations

NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."


class HorovodInternalError(RuntimeError):
    """A collective failed. hvd.elastic restores the last commit when it sees this one."""


class MismatchError(HorovodInternalError):
    """Ranks disagree about a tensor. Raised on every rank; the job goes on."""


class TransportError(HorovodInternalError):
    """A link, file or memory segment failed."""


class DeadlineError(HorovodInternalError):
    """A deadline passed: a rank is dead, or an operation moved no byte for too long."""


class AbortedError(HorovodInternalError):
    """The world has failed or was shut down; hvd.init() makes a new one."""


class NanGradientError(FloatingPointError):
    """A gradient has a NaN and PERSEUS_ALLREDUCE_NANCHECK_ACTION=raise. Raised on every rank.

    Not a HorovodInternalError: elastic training would roll back to the last commit and fail again.
    """


class InvalidArgumentError(ValueError):
    """The request makes no sense; nothing was started."""


class InitializationError(HorovodInternalError, ValueError):
    """init() failed. Horovod raises a ValueError here, elastic training expects the other."""


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 - the name is Horovod's
    """The set of hosts has changed; raised between steps of elastic training.

    skip_sync: every change was a removal, so the survivors' state is already equal.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """What HorovodVersionMismatchError says."""
    return (
        f"Framework {name} installed with version {installed_version} but found version {version}."
    )


class HorovodVersionMismatchError(ImportError):
    """For scripts that catch it; never raised, as nothing is compiled against a framework."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name = name
        self.version = version
        self.installed_version = installed_version

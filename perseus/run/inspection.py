"""`perseusrun --inspect PID`: has a job's ranks, or one rank, say what they wait for. Stateless."""

from __future__ import annotations

import os

from perseus.run import agent, signals


def ask(pid: int) -> str:
    """Ask a perseusrun of this host, or one of its ranks; return what to expect now.

    Raises ValueError if there is no such process, or if it does not answer.
    """
    number = signals.inspect_signal()
    if number == 0:
        raise ValueError("--inspect: PERSEUS_INSPECT_SIGNAL=0 has no signal that could ask")
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        raise ValueError(f"--inspect {pid}: there is no process with this number") from None
    except PermissionError:
        raise ValueError(f"--inspect {pid}: that is another user's process") from None
    if not agent.handles(pid, number):
        raise ValueError(
            f"--inspect {pid}: this process does not answer signal {number}. Give the number of a "
            "perseusrun, or of a rank on this host, with the same PERSEUS_INSPECT_SIGNAL"
        )
    os.kill(pid, number)
    return (
        f"asked process {pid}: in its output, each rank says within a second or two what it waits "
        "for, and Python where its threads are"
    )

"""How long processes of an elastic job wait for others that were started together with them.

Single-threaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

_LEAST_SECONDS = 2.0  # that the others get, however fast the first one was


@dataclass(eq=False)
class Cohort:
    """The processes of one change of hosts or slots. They join one world if they load equally fast.

    started_at: when they were started, in time.monotonic() seconds.
    waits_until: how long those that are ready wait for the others; inf before the first one is.
    """

    started_at: float
    waits_until: float = inf

    def on_ready(self, now: float) -> None:
        """One has loaded. The others get as long again as the first one took."""
        if self.waits_until == inf:
            self.waits_until = now + max(_LEAST_SECONDS, now - self.started_at)

"""The core for gradients that only the ranks of a host average.

Where no host has two ranks, gradients stay as they are: even to agree on an exchange that none
takes part in would make hosts wait for each other in every step. Any thread may use it.
"""

from __future__ import annotations

from typing import Any

from perseus import basics
from perseus.torch.local_exchanges import TorchLocalSteps
from perseus.torch.session import session

_NOTHING_TO_DO = -1  # a handle that the core never gives


class HostSession:
    """See perseus.gradients.handle_reducer.Session."""

    def __init__(self, local_steps: TorchLocalSteps) -> None:
        self._local_steps = local_steps

    def reduces(self) -> bool:
        """Return whether gradients reach the core."""
        # Settings that act on gradients need to see them.
        return not self._local_steps.workers_of_one or basics.settings_act_on_gradients()

    def submit(self, *arguments: Any, **options: Any) -> int:
        """Start reducing gradients and return a handle."""
        return session.submit(*arguments, **options) if self.reduces() else _NOTHING_TO_DO

    def poll(self, handle: int) -> bool:
        """Return whether synchronize() would return at once."""
        return handle == _NOTHING_TO_DO or session.poll(handle)

    def synchronize(self, handle: int) -> Any:
        """Wait; return None if gradients must not be applied."""
        return True if handle == _NOTHING_TO_DO else session.synchronize(handle)

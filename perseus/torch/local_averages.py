"""What torch parameters with local steps exchange in local SGD: themselves.

Source: Stich 2019, Local SGD converges fast.
"""

from __future__ import annotations

from perseus.torch.local_exchanges import Exchange, TorchLocalSteps


class LocalAverages(TorchLocalSteps):
    """x += average - sent, so that what the steps since then have changed stays."""

    def begin(self, part: int, due: int) -> Exchange | None:
        """See LocalSteps."""
        return None if self.one_worker else self.send(part, due)

    def apply(self, begun: Exchange) -> None:
        """See LocalSteps."""
        if self.pace.delay == 0 and not begun.loaded:
            self.replace(begun)
        else:
            self.correct(begun)

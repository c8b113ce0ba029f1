"""What lossy codecs hold back of one optimizer's gradients, to be saved and brought back.

It lies in the core; here is what was loaded and the core has not been given yet, which may have to
wait for the next world. Belongs to the thread that steps the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from perseus import basics

# (core's number for the placement of ranks; float32 of shape (2, elements): of what this rank
# sends, and of the results that it owns)
Residual = tuple[int, torch.Tensor]


class Residuals:
    """number: of the reducer. names: (name, grouped) of its reductions. group: of its process set.

    ValueError from the core where a reduction is under way.
    """

    def __init__(self, number: int, names: Iterable[tuple[str, bool]], group: int | None) -> None:
        self._number = number
        self._names = list(names)
        self._group = group or 0
        self.waiting: dict[str, Residual] = {}

    def read(self) -> dict[str, Residual]:
        """Copies of all there are, by the names of their reductions."""
        held = {name: (layout, data.clone()) for name, (layout, data) in self.waiting.items()}
        if not basics.is_initialized():
            return held
        for name, grouped in self._names:
            if name in held:
                continue
            found = basics.read_residual(self._number, self._group, name, grouped)
            if found is not None:
                layout, data = found
                held[name] = layout, torch.frombuffer(data, dtype=torch.float32).reshape(2, -1)
        return held

    def replace(self, held: Mapping[str, Residual]) -> None:
        """Go on with these, as read() gave them; the core must have forgotten what it had."""
        self.waiting = dict(held)

    def hand_over(self, name: str, grouped: bool) -> None:
        """Give the core what waits for it under a name that is about to be reduced."""
        layout, data = self.waiting.pop(name, (0, None))
        if data is not None:
            numbers = data.detach().to("cpu", torch.float32).contiguous().numpy()
            basics.write_residual(self._number, self._group, name, grouped, (layout, numbers))

    def take_along(self) -> None:
        """The world is about to end, and the next one is to go on with these."""
        self.waiting = self.read()

"""What lossy codecs hold back of the gradients of one DistributedDataParallel.

It outlives the wrapper, and must therefore not know it: what is held goes on in the next wrapper of
the module. Belongs to the thread that trains.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from perseus.errors import HorovodInternalError
from perseus.gradients.residuals import Held, mark
from perseus.torch.distributed.world import World

_WHOLE_WORLD = 0  # the number of the core's group


class ModelResiduals:
    """The residuals of a model's gradients in one world; a residuals.Source.

    number: the model's in this world. names: of the reductions, by the parameters' names.
    """

    def __init__(self, world: World, number: int, names: Mapping[str, str]) -> None:
        self._world = world
        self._number = number
        self._names = dict(names)

    def residuals(self) -> dict[str, Held]:
        """Return copies of all residuals, by the parameters' names.

        There are none once the world is closed, and in a forked process.
        """
        found: dict[str, Held] = {}
        read = self._world.context.read_residual
        with contextlib.suppress(HorovodInternalError):
            for key, name in self._names.items():
                residual = read(self._number, _WHOLE_WORLD, name, False)
                if residual is not None:
                    found[key] = residual[0] ^ mark(key, name), residual[1]
        return found

    def go_on_with(self, residuals: Mapping[str, Held], owner: int | None = None) -> None:
        """Replace all residuals by a result of residuals().

        owner: the rank that saved them, if they come from a file; other ranks begin without any.

        Raises HorovodInternalError once the world is closed, and in a forked process.
        """
        context = self._world.context
        context.forget_gradients(self._number)
        if owner not in (None, self._world.rank):
            return
        for key in residuals.keys() & self._names.keys():
            name, (layout, data) = self._names[key], residuals[key]
            held = layout ^ mark(key, name), data
            context.write_residual(self._number, _WHOLE_WORLD, name, False, *held)

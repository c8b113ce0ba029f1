"""Saves the residuals of lossy codecs together with a Keras optimizer.

Belongs to the thread that trains.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from perseus import basics
from perseus.gradients.residuals import Held, checked_entry
from perseus.keras.library import keras
from perseus.keras.reducer import GradientReducer

# The entry with JSON {"rank": the owner, "held": [[name, layout], …]}; the data are in 0, 1, …
_INDEX = "index"


class SavedResiduals(keras.losses.Loss):
    """An attribute of an optimizer, saved in a separate group if there are residuals.

    So .keras and .weights.h5 files contain it, and a plain optimizer that loads them ignores it.
    Keras saves attributes of its own kinds only, of which a loss adds nothing else to the file. It
    has no name, because Keras would create the group for the name alone. It is also a Source.
    """

    def __init__(self, reducer: GradientReducer) -> None:
        self._reducer = reducer

    def residuals(self) -> dict[str, Held]:
        """See Source."""
        return self._reducer.residuals()

    def go_on_with(self, residuals: Mapping[str, Held], owner: int | None = None) -> None:
        """See Source."""
        self._reducer.go_on_with(residuals, owner)

    def save_own_variables(self, store: Any) -> None:
        """Write this rank's residuals, each as float32 of shape (2, elements)."""
        held = self._reducer.residuals() if basics.is_initialized() else {}
        if not held:
            return
        names = [[name, layout] for name, (layout, _) in held.items()]
        index = {"rank": basics.rank(), "held": names}
        store[_INDEX] = np.frombuffer(json.dumps(index).encode(), dtype=np.uint8)
        for number, (_, data) in enumerate(held.values()):
            store[str(number)] = np.frombuffer(data, dtype=np.float32).reshape(2, -1)

    def load_own_variables(self, store: Any) -> None:
        """Continue with the stored values if this rank has saved them, else with none.

        Raises ValueError if they are damaged.
        """
        held: dict[str, Held] = {}
        owner: int | None = None
        if _INDEX in store.keys():  # noqa: SIM118 - stores are not dictionaries
            try:
                index = json.loads(np.asarray(store[_INDEX]).tobytes())
                owner = int(index["rank"])
                for number, (name, layout) in enumerate(index["held"]):
                    checked_entry(name, layout)
                    data = np.asarray(store[str(number)], dtype=np.float32)
                    held[name] = layout, np.ascontiguousarray(data).tobytes()
            except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
                raise ValueError("[residuals] this is not what Perseus has saved") from error
        self._reducer.go_on_with(held, owner)

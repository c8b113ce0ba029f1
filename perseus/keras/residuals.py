"""What lossy codecs hold back of a Keras optimizer, as a part of what Keras saves of it.

Belongs to the thread that trains.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from perseus import basics
from perseus.gradients.residuals import Held
from perseus.keras.backend import keras
from perseus.keras.reducer import GradientReducer

_INDEX = "index"  # JSON: {"rank": who held these, "held": [[name, layout], …]}; beside them 0, 1 …


class SavedResiduals(keras.losses.Loss):
    """An optimizer's attribute, which is saved in a group of its own, if there is anything to save.

    So it is in .keras files and in .weights.h5, and where a plain optimizer loads those it is not
    looked at. Keras saves attributes of its own kinds only; of these a loss brings nothing along.
    It has no name, since for that alone Keras would make the group. It is a Source, too.
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
        """Write this rank's; float32 of shape (2, elements) each."""
        held = self._reducer.residuals() if basics.is_initialized() else {}
        if not held:
            return
        names = [[name, layout] for name, (layout, _) in held.items()]
        index = {"rank": basics.rank(), "held": names}
        store[_INDEX] = np.frombuffer(json.dumps(index).encode(), dtype=np.uint8)
        for number, (_, data) in enumerate(held.values()):
            store[str(number)] = np.frombuffer(data, dtype=np.float32).reshape(2, -1)

    def load_own_variables(self, store: Any) -> None:
        """Continue with the stored values if this rank has saved them, else with none."""
        held: dict[str, Held] = {}
        owner: int | None = None
        if _INDEX in store.keys():  # noqa: SIM118 - stores are no dictionaries
            index = json.loads(np.asarray(store[_INDEX]).tobytes())
            owner = index["rank"]
            for number, (name, layout) in enumerate(index["held"]):
                data = np.asarray(store[str(number)], dtype=np.float32)
                held[name] = layout, np.ascontiguousarray(data).tobytes()
        self._reducer.go_on_with(held, owner)

"""The base of callbacks that read or change the model between two batches.

Belongs to the thread that calls fit.
"""

from __future__ import annotations

import threading
from typing import Any

from perseus.keras.library import keras


class InTrainingThread(keras.callbacks.Callback):
    """Notices where Keras would run on_batch_end() beside the next batch.

    Keras 3 on PyTorch has threads for that, and looks only into lists for callbacks that may not
    run there.
    """

    _thread: int | None = None  # that which called fit

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Remember the thread."""
        self._thread = threading.get_ident()

    def on_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Raise ValueError in another thread than on_train_begin()."""
        if self._thread not in (None, threading.get_ident()):
            raise ValueError(
                "[keras] pass callbacks as a list: callbacks=[...]; Keras runs a lone one in "
                "another thread, beside the next batch"
            )

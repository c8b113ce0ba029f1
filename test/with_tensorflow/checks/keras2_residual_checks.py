"""What lossy codecs hold back of Keras 2's gradients is a part of elastic states."""

from __future__ import annotations

import gradient_settings as settings
import numpy as np
from keras2_checks import KINDS, _fit, _model

import perseus.tensorflow.horovod as hvd_tf
import perseus.tensorflow.horovod.keras as hvd


def check_states_bring_back_what_was_held() -> None:
    with settings.apart():
        for kind in KINDS:
            _check(kind)


def _check(kind) -> None:
    model = _model(seed=hvd_tf.rank())
    optimizer = hvd.DistributedOptimizer(
        kind.SGD(0.05, momentum=0.9), compression=hvd.Compression.topk(0.1)
    )
    model.compile(optimizer, "mse")

    def held(optimizer=optimizer) -> dict[str, bytes]:
        found = optimizer.perseus_residuals.read()
        return {name: bytes(data) for name, (_, data) in found.items()}

    state = hvd.elastic.KerasState(model)
    state.sync()
    _fit(model, epochs=1)
    before = held()
    assert len(before) == 4 and any(any(data) for data in before.values())
    state.commit()
    _fit(model, epochs=1)
    after, weights = held(), model.get_weights()
    assert after != before
    state.restore()
    assert held() == before
    _fit(model, epochs=1)
    assert held() == after
    assert all(map(np.array_equal, model.get_weights(), weights))

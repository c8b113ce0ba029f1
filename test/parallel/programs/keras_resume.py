"""`keras_resume.py FOLDER`: trains with error feedback; the second time it goes on where it saved.

What the second process gets must be, bit for bit, what the first one got after it had saved.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "torch" if find_spec("torch") else "tensorflow")
# Every rank is a host of its own.
os.environ |= {"LIGHT_2D_ALLREDUCE": "1", "LIGHT_INTRA_SIZE": "1"}

import keras
import numpy as np

import perseus.keras as hvd


def _fit(model: keras.Model) -> list[np.ndarray]:
    random = np.random.default_rng(hvd.rank())
    x = random.normal(size=(32, 6)).astype("float32")
    model.fit(x, x[:, :3] * x[:, 3:], batch_size=8, shuffle=False, verbose=0)
    return model.get_weights()


def main(folder: str) -> None:
    hvd.init()
    path = Path(folder) / f"{hvd.rank()}.keras"
    results = path.with_suffix(".npz")
    if path.exists():
        model = hvd.load_model(path, compression=hvd.Compression.topk(0.1))
        assert model.optimizer.perseus_residuals.residuals()
        with np.load(results) as expected:
            for weight, right in zip(_fit(model), expected.values(), strict=True):
                assert np.array_equal(weight, right)
        print("went on")
        return
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential([layers.Input((6,)), layers.Dense(512, "tanh"), layers.Dense(3)])
    optimizer = keras.optimizers.Adam(0.01)
    model.compile(hvd.DistributedOptimizer(optimizer, compression=hvd.Compression.topk(0.1)), "mse")
    _fit(model)
    model.save(path)
    np.savez(results, *_fit(model))


main(sys.argv[1])

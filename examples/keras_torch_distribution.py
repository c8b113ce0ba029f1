"""Trains a small Keras model with Keras' own DataParallel distribution on PyTorch.

    torchrun --nproc-per-node 2 keras_torch_distribution.py

Only the first import is new. Needs Keras 3.16, whose PyTorch backend is the first to have this.
"""

import os

os.environ["KERAS_BACKEND"] = "torch"  # before Keras is imported

import perseus  # isort: skip  # noqa: F401 - process groups run on Perseus from here on
import keras
import numpy as np
import torch
import torch.distributed as dist


def main():
    keras.distribution.initialize()
    keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
    rank, size = dist.get_rank(), dist.get_world_size()
    keras.utils.set_random_seed(42)
    model = keras.Sequential(
        [
            keras.layers.Input((16,)),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dense(2),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.SGD(0.1, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    numbers = np.random.default_rng(0).standard_normal((1024, 16), dtype="float32")
    labels = (numbers.sum(1) > 0).astype("int64")
    share = len(numbers) // size  # a rank with more batches would wait for the others
    mine = numbers[rank::size][:share], labels[rank::size][:share]
    history = model.fit(*mine, batch_size=max(1, 64 // size), epochs=3, verbose=0, shuffle=False)

    weights = torch.from_numpy(np.concatenate([array.ravel() for array in model.get_weights()]))
    everywhere = [torch.empty_like(weights) for _ in range(size)]
    dist.all_gather(everywhere, weights)
    if rank == 0:
        alike = all(torch.equal(other, weights) for other in everywhere)
        print(f"backend {dist.get_backend()}, loss {history.history['loss'][-1]:.6f}")
        print(f"the ranks' weights are {'equal' if alike else 'different'}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""All ranks' replicas where each step averages an N-th of the weights, one step late.

Gradients and rates are fractions with few bits, so that on two hosts every float32 is exact: the
checks compare bits.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import count

import mxnet as mx
import numpy as np
from mxnet import gluon

import perseus.mxnet as hvd
from perseus import control

# With fewer rows than parts, and with more.
SHAPES = {"w": (40, 30), "few": (2, 5), "b": (7,)}
RATE = 0.125
# With "by_hand", gradients are reduced and applied by two calls. With it and with "pushpull", it is
# not known when steps end.
WAYS = ("trainer", "groups", "optimizer", "store", "by_hand", "pushpull")
BEFORE = ("by_hand", "pushpull")

_numbers = count()

Arrays = list[np.ndarray]


def slope(name: str, rank: int, step: int) -> np.ndarray:
    """A gradient, which differs per rank, step and index."""
    numbers = np.arange(int(np.prod(SHAPES[name]))) * 7 + rank * 5 + step * 3 + len(name)
    return (numbers % 9 - 4).reshape(SHAPES[name]).astype(np.float32) / 8


class Simulation:
    """The replicas of all ranks, in one process. way: one of the WAYS to train.

    local: the ranks of a host, which share gradients. dtype: of the weights. wide: what an
    optimizer computes in.
    """

    def __init__(
        self,
        parts: int,
        way: str = "trainer",
        local: int = 1,
        dtype: str = "float32",
        wide: str = "",
    ) -> None:
        self.parts, self.local, self.taken = parts, local, 0
        self.after = way not in BEFORE
        self.dtype, self.wide = dtype, wide or dtype
        self.replicas = [
            {name: np.zeros(shape, self.wide) for name, shape in SHAPES.items()}
            for _ in range(hvd.size())
        ]
        self.pending: list[dict[str, np.ndarray]] = []

    def step(self, skipping: Collection[int] = ()) -> None:
        """skipping: ranks that do not apply their gradients."""
        if not self.after:
            self._take_turn()
        for rank, replica in enumerate(self.replicas):
            if rank in skipping:
                continue
            host = range(rank - rank % self.local, rank - rank % self.local + self.local)
            for name in SHAPES:
                mean = np.mean([self.gradient(name, other) for other in host], axis=0)
                replica[name] -= (RATE * mean).astype(self.wide)
        if self.after:
            self._take_turn()
        self.taken += 1

    def _take_turn(self) -> None:
        pending, self.pending = self.pending, self._differences(self.taken % self.parts)
        for replica, differences in zip(self.replicas, pending, strict=False):
            for name, difference in differences.items():
                replica[name][:] = (replica[name].astype(difference.dtype) + difference).astype(
                    self.wide
                )

    def gradient(self, name: str, rank: int) -> np.ndarray:
        """Return a rank's gradient in the present step."""
        return slope(name, rank, self.taken)

    def corrected_mean(self) -> Arrays:
        """What all ranks get by synchronize_parameters()."""
        means = []
        for name in SHAPES:
            values = [replica[name] for replica in self.replicas]
            if self.pending:
                values = [v + p[name] for v, p in zip(values, self.pending, strict=True)]
            means.append(_mean(values).astype(self.wide).astype(self.dtype))
        return means

    def mine(self) -> Arrays:
        """Return this rank's weights."""
        return [value.astype(self.dtype) for value in self.replicas[hvd.rank()].values()]

    def _differences(self, part: int) -> list[dict[str, np.ndarray]]:
        """Return what each rank will add, for all of its weights; 0 outside the part."""
        found: list[dict[str, np.ndarray]] = [{} for _ in self.replicas]
        for name, shape in SHAPES.items():
            rows = slice(shape[0] * part // self.parts, shape[0] * (part + 1) // self.parts)
            mean = _mean([replica[name] for replica in self.replicas])
            for replica, differences in zip(self.replicas, found, strict=True):
                differences[name] = np.zeros(shape, mean.dtype)
                differences[name][rows] = (mean - replica[name].astype(mean.dtype))[rows]
        return found


def _mean(values: Arrays) -> np.ndarray:
    """Return the average as Perseus makes it, in float32 at least."""
    wide = np.result_type(np.float32, values[0].dtype)
    return np.sum([value.astype(wide) for value in values], axis=0, dtype=wide) / wide.type(
        len(values)
    )


class Training:
    """Weights from zero, trained in one of the WAYS; their gradients are those of slope().

    compression: of hvd.Compression for trainers, or a dictionary for stores; None = the settings.
    """

    def __init__(
        self, way: str, compression: object = None, dtype: str = "float32", **optimizer: object
    ) -> None:
        self.parameters = [
            gluon.Parameter(name, shape=shape, dtype=dtype) for name, shape in SHAPES.items()
        ]
        for parameter in self.parameters:
            parameter.initialize(mx.init.Zero())
        self.way, self.taken = way, 0
        self.trainer = self._trainer(compression, {"learning_rate": RATE, **optimizer})

    def _trainer(self, compression: object, options: dict[str, object]) -> gluon.Trainer:
        if self.way in ("trainer", "groups", "by_hand"):
            # Trainers that work at the same time need different prefixes.
            more = {"prefix": f"training{next(_numbers)}."}
            if compression is not None:
                more["compression"] = compression
            if self.way == "groups":
                more["num_groups"] = 2
            return hvd.DistributedTrainer(self.parameters, "sgd", options, **more)
        if self.way == "optimizer":
            optimizer = hvd.DistributedOptimizer(mx.optimizer.create("sgd", **options))
            return gluon.Trainer(self.parameters, optimizer, kvstore=None)
        return gluon.Trainer(
            self.parameters, "sgd", options, kvstore="dist_sync_perseus",
            update_on_kvstore=self.way == "store", compression_params=compression,
        )  # fmt: skip

    def backward(self) -> None:
        with mx.autograd.record():
            loss = mx.nd.add_n(*(
                (parameter.data().astype("float32") * mx.nd.array(given)).sum()
                for parameter, given in zip(self.parameters, self.given(), strict=True)
            ))  # fmt: skip
        loss.backward()

    def given(self) -> Arrays:
        return [slope(name, hvd.rank(), self.taken) for name in SHAPES]

    def step(self) -> None:
        self.backward()
        if self.way == "by_hand":
            self.trainer.allreduce_grads()
            self.trainer.update(1)
        else:  # stores sum over ranks, and the others average
            self.trainer.step(hvd.size() if self.way in ("store", "pushpull") else 1)
        self.taken += 1

    def values(self) -> Arrays:
        return [parameter.data().asnumpy() for parameter in self.parameters]

    def fill(self, value: float) -> None:
        for parameter in self.parameters:
            parameter.data()[:] = value

    def equal_everywhere(self) -> bool:
        return equal_everywhere(self.values())


def equal_everywhere(values: Arrays) -> bool:
    """Whether all ranks have the same bits."""
    mine = b"".join(np.ascontiguousarray(value).tobytes() for value in values)
    return len(set(control.gather_bytes(mine, "replicas", 0))) == 1


def assert_same_bits(found: Arrays, expected: Arrays, what: object = None) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and np.array_equal(one, other), (
            what,
            np.abs(one.astype(np.float64) - other).max(),
        )

"""What all ranks' replicas become under local SGD and DiLoCo, simulated in one process."""

from __future__ import annotations

import torch
from turns import RATE, SHAPES, slope

import perseus.torch.horovod as hvd

Values = dict[str, torch.Tensor]


class Replicas:
    """outer: (learning rate, momentum) of DiLoCo; None: local SGD. summed: gradients per step."""

    def __init__(
        self,
        every: int,
        parts: int = 1,
        delay: int = 0,
        outer: tuple[float, float] | None = None,
        summed: int = 1,
    ) -> None:
        self._every, self._parts, self._delay = every, parts, delay
        self._outer, self._summed = outer, summed
        self.taken = self._turn = 0
        # The step after which it is due, the part, and what each rank has sent.
        self._under_way: list[tuple[int, int, list[Values]]] = []
        self.start([torch.zeros(shape) for shape in SHAPES.values()])

    def start(self, values: list[torch.Tensor]) -> None:
        """Begin with these parameters."""
        named = dict(zip(SHAPES, values, strict=True))
        self.replicas = [_copy(named) for _ in range(hvd.size())]
        self.everywhere = _copy(named)
        self.velocity = {name: torch.zeros_like(value) for name, value in named.items()}

    def mine(self) -> list[torch.Tensor]:
        """Return this rank's parameters."""
        return list(self.replicas[hvd.rank()].values())

    def average(self) -> list[torch.Tensor]:
        """Return the average of all replicas."""
        return [_mean([replica[name] for replica in self.replicas]) for name in SHAPES]

    def step(self) -> None:
        """Take a step on every rank."""
        for rank, replica in enumerate(self.replicas):
            for name, value in replica.items():
                for pass_ in range(self._summed):
                    value.sub_(RATE * slope(name, rank, self.taken + pass_))
        self.taken += self._summed
        self._turn += 1
        self.settle(self._turn)
        for part in range(self._parts):
            if self._turn % self._every == (part + 1) * self._every // self._parts % self._every:
                sent = [_copy(replica) for replica in self.replicas]
                self._under_way.append((self._turn + self._delay, part, sent))
        if self._delay == 0:
            self.settle(self._turn)

    def settle(self, turn: int | None = None) -> None:
        """Apply what is due after a step; None: everything."""
        while self._under_way and (turn is None or self._under_way[0][0] <= turn):
            _, part, sent = self._under_way.pop(0)
            for name in SHAPES:
                self._apply(name, part, [values[name] for values in sent])

    def _apply(self, name: str, part: int, sent: list[torch.Tensor]) -> None:
        rows = sent[0].shape[0] if sent[0].dim() else 1
        cut = slice(rows * part // self._parts, rows * (part + 1) // self._parts)
        target = _mean(sent)
        if self._outer is not None:
            rate, momentum = self._outer
            gradient = self.everywhere[name] - target
            velocity = momentum * self.velocity[name] + gradient
            target = self.everywhere[name] - rate * (gradient + momentum * velocity)
            _put(self.velocity[name], cut, velocity)
            _put(self.everywhere[name], cut, target)
        for replica, values in zip(self.replicas, sent, strict=True):
            _put(replica[name], cut, replica[name] + (target - values))


def _mean(values: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(values).sum(dim=0) / len(values)


def _copy(values: Values) -> Values:
    return {name: value.clone() for name, value in values.items()}


def _put(into: torch.Tensor, cut: slice, values: torch.Tensor) -> None:
    rows = into.shape[0] if into.dim() else 1
    into.view(rows, -1)[cut] = values.view(rows, -1)[cut]

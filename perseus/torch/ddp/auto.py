"""Measures exchanges on the first gradients, and keeps the fastest.

In the third step, when DDP has formed its final buckets, all ranks time every exchange on copies of
the gradients. They take the first that is within 5 % of the fastest, each with its slowest rank's
time, so all ranks make the same choice. Top-k is taken only if a step has 1 MiB of gradients, as in
the core. Until then the mean is exact.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from perseus.torch.ddp.gradients import Exact, Exchange, Gradients, Held

_MEASURED_STEP = 2
# What exchanges are told instead: they are past any warm-up then.
_LATE_STEP = 1 << 30
# More bytes of a step are not measured.
_MEASURED_BYTES = 16 << 20
_TOLERANCE = 1.05
_LEAST_TOP_K_BYTES = 1 << 20
_log = logging.getLogger("perseus")


class Auto(Exchange):
    """candidates: how to make the exchanges, the most accurate first."""

    def __init__(self, candidates: Mapping[str, Callable[[], Exchange]]) -> None:
        self._candidates = dict(candidates)
        self._seconds = dict.fromkeys(self._candidates, 0.0)
        self._measured_bytes = 0
        self._exact = Exact()
        self._chosen: Exchange | None = None
        self._name: str | None = None

    def average(self, gradients: Gradients, group: dist.ProcessGroup, step: int) -> None:
        """See the module."""
        if self._chosen is not None:
            self._chosen.average(gradients, group, step)
            return
        if step >= _MEASURED_STEP:
            if self._measured_bytes < _MEASURED_BYTES:
                self._measure(gradients, group)
            if gradients.last:
                self._decide(gradients, group)
        self._exact.average(gradients, group, step)

    def _measure(self, gradients: Gradients, group: dist.ProcessGroup) -> None:
        self._measured_bytes += gradients.flat.nbytes
        for name, make in self._candidates.items():
            exchange = make()
            for last in (False, True):
                trial = gradients.copy()
                dist.all_reduce(trial.flat[:1].clone(), group=group)  # they begin together
                begin = _now(trial.flat)
                exchange.average(trial, group, _LATE_STEP)
                if last:  # the first one allocates memory
                    self._seconds[name] += _now(trial.flat) - begin

    def _decide(self, gradients: Gradients, group: dist.ProcessGroup) -> None:
        seconds = gradients.flat.new_tensor(list(self._seconds.values()), dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
        slowest = dict(zip(self._seconds, seconds.tolist(), strict=True))
        if self._measured_bytes < _LEAST_TOP_K_BYTES and len(slowest) > 1:
            slowest.pop("topk", None)
        limit = min(slowest.values()) * _TOLERANCE
        self.choose(next(name for name, needed in slowest.items() if needed <= limit))
        if group.rank() == 0:
            times = ", ".join(f"{name} {needed:.6f} s" for name, needed in slowest.items())
            _log.info("[ddp] auto takes %s for all buckets: %s", self._name, times)

    def is_ready(self) -> bool:
        """Return whether the choice has been made."""
        return self._chosen is not None

    def choice(self) -> str | None:
        """Return the name of the candidate taken; None before the third step."""
        return self._name

    def choose(self, name: str | None) -> None:
        """Take a candidate; None = measure."""
        self._name = name
        self._chosen = None if name is None else self._candidates[name]()

    def held(self) -> dict[str, Held]:
        """Return what the chosen exchange holds back."""
        return {} if self._chosen is None else self._chosen.held()

    def restore(self, held: Mapping[str, Held]) -> None:
        """Hand it to the chosen exchange."""
        if self._chosen is not None:
            self._chosen.restore(held)


def _now(tensor: torch.Tensor) -> float:
    """Return the time in seconds at which everything on the tensor's device is done."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter()

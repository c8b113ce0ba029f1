"""DistributedOptimizer(op=Adasum): every rank takes a step of its own, and the steps are combined.

Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021; behaviour
of Horovod 0.28.1, horovod.torch.optimizer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

from perseus.compression import Compressor
from perseus.process_sets import ProcessSet
from perseus.torch.reductions import allreduce_async
from perseus.torch.session import Adasum, synchronize


class _AdasumOptimizer(torch.optim.Optimizer):
    """What adasum_optimizer puts in front of the wrapped optimizer's class."""

    _names: dict[torch.Tensor, str]
    _compression: type[Compressor]
    _process_set: ProcessSet
    backward_passes_per_step: int

    def set_backward_passes_per_step(self, passes: int) -> None:
        """How many backward passes the caller sums in p.grad before step(): up to the caller."""
        self.backward_passes_per_step = passes

    def synchronize(self) -> None:
        """Nothing: gradients are not reduced, steps are."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """AssertionError: there is nothing to skip."""
        raise AssertionError(
            "Skipping synchronization is not supported when using Adasum optimizer."
        )
        yield

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The wrapped optimizer's step from where all ranks stand, then the Adasum of all steps.

        A parameter that had no gradient here takes part with the step it has made, zeros mostly.
        HorovodInternalError when a reduction failed.
        """
        parameters = list(self._names)
        before = [parameter.clone() for parameter in parameters]
        loss = super().step(closure)
        started = []
        for parameter, start in zip(parameters, before, strict=True):
            sent, context = self._compression.compress(parameter - start)
            handle = allreduce_async(
                sent, name=self._names[parameter], op=Adasum, process_set=self._process_set
            )
            started.append((handle, context))
        for parameter, start, (handle, context) in zip(parameters, before, started, strict=True):
            parameter.copy_(start + self._compression.decompress(synchronize(handle), context))
        return loss


def adasum_optimizer(
    optimizer: torch.optim.Optimizer,
    names: dict[torch.Tensor, str],
    compression: type[Compressor],
    passes: int,
    process_set: ProcessSet,
) -> torch.optim.Optimizer:
    """An optimizer of the same class whose step is the Adasum of all ranks' steps.

    names: of every parameter that takes part, in the same order on all ranks.
    """
    wrapped = type(optimizer)
    made_class = type(
        wrapped.__name__, (_AdasumOptimizer, wrapped), {"__module__": wrapped.__module__}
    )
    made = cast(_AdasumOptimizer, cast(Any, made_class).__new__(made_class))
    made.__dict__.update(optimizer.__dict__)
    made.__dict__.pop("step", None)  # bound to the wrapped optimizer by a scheduler made before
    made.state = defaultdict(dict)
    made._names = names
    made._compression = compression
    made._process_set = process_set
    made.backward_passes_per_step = passes
    return made

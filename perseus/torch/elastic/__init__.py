"""Elastic training with PyTorch: `@hvd.elastic.run` around a function that trains a TorchState.

Source of behaviour: Horovod 0.28.1, horovod.torch.elastic.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from perseus.basics import init, shutdown
from perseus.elastic import ObjectState, State, reset, run_fn
from perseus.elastic.loop import looped
from perseus.errors import HorovodInternalError, HostsUpdatedInterrupt
from perseus.torch.elastic import sampler, state
from perseus.torch.elastic.sampler import ElasticSampler
from perseus.torch.elastic.state import TorchState

__all__ = [
    "ElasticSampler",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TorchState",
    "init",
    "run",
    "run_fn",
    "sampler",
    "shutdown",
    "state",
]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Make `func(state, *args, **kwargs)` elastic; used as a decorator.

        @hvd.elastic.run
        def train(state):
            for state.epoch in range(state.epoch, epochs):
                ...
                state.commit()

        train(hvd.elastic.TorchState(model, optimizer, epoch=0))

    The state is made equal on all ranks, then func runs. When it raises HorovodInternalError, or
    the error of a process group that has ended, on this rank or another, all ranks go back to the
    last commit, build a new world and call it again; HostsUpdatedInterrupt does the same but keeps
    the state. Other exceptions propagate. Returns func's result. InitializationError when ranks are
    missing from the new world.

    func may make process groups of torch.distributed on Perseus, which end with the world, so that
    it makes them anew: init_process_group() takes rank, size and store from the world.
    """
    return looped(func, reset, _reason_of)


def _reason_of(error: Exception) -> str | None:
    backend = sys.modules.get("perseus.torch.distributed.backend")
    return None if backend is None else backend.failure_of(error)

"""Measures what DistributedDataParallel's exchange of gradients takes on Perseus and on gloo.

Autograd hands over gradients that exist already, so a backward pass is DDP's own work, which a
contender without an exchange shows, and communication. One thread per rank.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from perseus.bench.codecs import DEFAULT, PLAIN, Codec
from perseus.bench.gradients import NormalData
from perseus.bench.groups import BUCKETS, on_perseus, wrap
from perseus.bench.models import MODELS
from perseus.bench.plan import DDP, LEAST_COPIES, NO_EXCHANGE, PERSEUS
from perseus.bench.sampling import Contender
from perseus.bench.session import Session, Subject
from perseus.bench.sizes import show_bytes

_EXACT = Codec(PLAIN)


def sweep(session: Session) -> Iterator[Subject]:
    """Yield the subject of every model and bucket size."""
    group = on_perseus()
    for model in session.plan.models or ["resnet50"]:
        given = Given(session, [shape for _, shape in MODELS[model]()])
        for bucket in session.sizes(BUCKETS):
            yield given.subject(group, model, bucket)


class Given:
    """The gradients of this rank, which all contenders reduce in turn."""

    def __init__(self, session: Session, shapes: list[tuple[int, ...]]) -> None:
        self._session = session
        self.gradients = [torch.empty(shape) for shape in shapes]
        self._count = sum(math.prod(shape) for shape in shapes)
        self._data = NormalData(self._count, session.size)

    def subject(self, group: dist.ProcessGroup, model: str, bucket: int) -> Subject:
        """Return DDP on Perseus' group, on gloo, and with no exchange. bucket: in bytes."""

        def wrapped(group: dist.ProcessGroup | None = None) -> DistributedDataParallel:
            return wrap(Handing(self.gradients), bucket, group)

        alone = wrapped()
        alone.register_comm_hook(None, return_the_bucket)
        codec = self._session.acting(Codec(DEFAULT))
        contenders = [
            replace(self.contender(wrapped(group), codec), codec=DEFAULT),
            replace(self.contender(wrapped()), name=DDP),
            replace(self.contender(alone, None), name=NO_EXCHANGE, operation="copy"),
        ]
        if self._session.hosts == 1:
            copying = wrapped()
            copying.register_comm_hook(LeastCopies(self._session.size), copy_the_bucket)
            least = self.contender(copying, None)
            contenders.append(replace(least, name=LEAST_COPIES, operation="copy"))
        settings = {"model": model, "bucket": show_bytes(bucket)}
        return Subject("ddp", 4 * self._count, contenders, len(self.gradients), settings)

    def contender(self, model: DistributedDataParallel, codec: Codec | None = _EXACT) -> Contender:
        """Return a contender that runs backward passes.

        codec: its gradients are averages within the codec's bounds; None = they are not checked.
        """
        step = -1

        def prepare() -> None:
            nonlocal step
            step += 1
            for start, gradient in self._placed(self.gradients):
                count = gradient.numel()
                gradient.view(-1).copy_(self._data.piece(self._session.rank, step, start, count))
            model.zero_grad()

        def run(_: int) -> None:
            model().backward()

        def check() -> bool:
            return codec is None or self._holds_averages(model, step, codec)

        return Contender(PERSEUS, "allreduce", run, prepare, check)

    def _holds_averages(self, model: DistributedDataParallel, step: int, codec: Codec) -> bool:
        found: list[torch.Tensor] = [p.grad for p in model.parameters() if p.grad is not None]
        same = self._session.same(gradient.numpy() for gradient in found)
        flat = ((start, gradient.view(-1)) for start, gradient in self._placed(found))
        return (
            same and len(found) == len(self.gradients) and self._data.is_average(step, flat, codec)
        )

    @staticmethod
    def _placed(tensors: list[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
        start = 0
        for tensor in tensors:
            yield start, tensor
            start += tensor.numel()


class Handing(nn.Module):
    """Has a backward pass that hands given gradients to the parameters."""

    def __init__(self, gradients: list[torch.Tensor]) -> None:
        super().__init__()
        self._gradients = gradients
        self._own = nn.ParameterList(nn.Parameter(torch.empty_like(g)) for g in gradients)

    def forward(self) -> torch.Tensor:
        apply: Any = _Hand.apply
        result: torch.Tensor = apply(self._gradients, *self._own)
        return result


class _Hand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor], *parameters: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[Any, ...]:
        return (None, *ctx.gradients)


class LeastCopies:
    """Copies as much as an allreduce of a bucket must that passes it through shared memory.

    A rank lays what the others sum where they can read it, sums its own share, and fetches the
    rest. Private memory stands in for the others'.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._shared = torch.empty(0)

    def copy(self, bucket: torch.Tensor) -> None:
        own = bucket.numel() // self._ranks
        others = bucket.numel() - own
        if self._shared.numel() < others:
            self._shared = torch.zeros(others)
        mine, theirs, shared = bucket[:own], bucket[own:], self._shared[:others]
        _copy(shared, theirs)
        for rank in range(self._ranks - 1):
            mine.add_(shared[rank * own : (rank + 1) * own])
        _copy(theirs, shared)


def _copy(to: torch.Tensor, source: torch.Tensor) -> None:
    ctypes.memmove(to.data_ptr(), source.data_ptr(), source.nbytes)


def copy_the_bucket(copies, bucket):  # type: ignore[no-untyped-def] # DDP wants classes as annotations
    """The communication hook of a model that copies instead of an exchange."""
    copies.copy(bucket.buffer())
    return _unchanged(bucket)


def return_the_bucket(_, bucket):  # type: ignore[no-untyped-def] # DDP wants classes as annotations
    """The communication hook of a model that exchanges nothing."""
    return _unchanged(bucket)


def _unchanged(bucket: Any) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future

"""Measures training steps of real networks on synthetic images, with Perseus and native DDP.

All contenders take turns at training the same parameters. Each of them has its own modules and
gradients, but they share the storage of the parameters to save memory, and all ranks have the same
bits after every turn. One thread per rank.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import perseus.torch.horovod as hvd
from perseus.bench import codecs
from perseus.bench.codecs import Codec
from perseus.bench.models import BATCH, CLASSES
from perseus.bench.nets import NETS, Net
from perseus.bench.plan import DDP, PERSEUS
from perseus.bench.sampling import Contender
from perseus.bench.session import Session, Subject

_BATCHES = 8  # used in turn
_LEARNING_RATE = 0.01
_CALLS, _WARM = 2, 1  # steps of a turn: timed, and before these
_SEED = 50


def sweep(session: Session) -> Iterator[Subject]:
    """Yield the subject of each network: Perseus without and with codecs, DDP, and no reduction."""
    for name in session.plan.models or NETS:
        yield subject_of(session, name, NETS[name])


class Trainee:
    """A contender's module, whose parameters share their storage with other contenders' modules."""

    def __init__(self, shared: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> None:
        """Copy the module `shared`, but not the storage of its parameters.

        images: float32 of shape (batches, batch, 3, pixels, pixels). labels: int64 of shape
        (batches, batch).
        """
        self.module = copy.deepcopy(shared)
        for own, original in zip(self.module.parameters(), shared.parameters(), strict=True):
            own.data = original.data
        self._images, self._labels = images, labels
        self._steps = 0
        self.loss = 0.0

    def backward(self) -> None:
        """Compute the gradients of the next batch, with equal dropout for all contenders."""
        batch = self._steps % len(self._images)
        torch.manual_seed(self._steps)
        self.module.zero_grad()
        loss = cross_entropy(self.module(self._images[batch]), self._labels[batch])
        self._steps += 1
        loss.backward()  # type: ignore[no-untyped-call]
        self.loss = loss.item()

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients of all parameters."""
        return [p.grad for p in self.module.parameters() if p.grad is not None]


def subject_of(session: Session, model: str, net: Net) -> Subject:
    """Return the contenders for one network, after verifying the first step of each.

    A collective.
    """
    torch.manual_seed(_SEED)
    shared = net.make()
    generator = torch.Generator().manual_seed(_SEED + 1 + session.rank)
    images = torch.randn(_BATCHES, BATCH, 3, net.pixels, net.pixels, generator=generator)
    labels = torch.randint(CLASSES, (_BATCHES, BATCH), generator=generator)
    size = 4 * sum(p.numel() for p in shared.parameters())
    make = partial(Trainee, shared, images, labels)
    plain = Codec(codecs.PLAIN)

    def ours(codec: Codec) -> Contender:
        trainee = make()
        named = [(f"{codec.label}.{n}", p) for n, p in trainee.module.named_parameters()]
        inner = torch.optim.SGD(trainee.module.parameters(), lr=_LEARNING_RATE)
        optimizer: Any = hvd.DistributedOptimizer(inner, named, **codec.arguments())
        exact = _exact_gradients(make())
        trainee.backward()
        optimizer.synchronize()
        proven = _near(exact, trainee.gradients(), codec.relative_error)
        with optimizer.skip_synchronize():
            optimizer.step()
        turns = _turns(session, trainee, shared, optimizer, proven)
        return replace(turns, codec=codec.label, **session.payloads(codec, size))

    def native() -> Contender:
        trainee = make()
        trainee.module = DistributedDataParallel(trainee.module)
        optimizer = torch.optim.SGD(trainee.module.parameters(), lr=_LEARNING_RATE)
        exact = _exact_gradients(make())
        trainee.backward()
        proven = _near(exact, trainee.gradients(), plain.relative_error)
        turns = _turns(session, trainee, shared, optimizer, proven)
        return replace(turns, name=DDP, **session.payloads(plain, size))

    def alone() -> Contender:
        """Return a contender that does not communicate, which bounds the speed of the others.

        Its learning rate is 0, so that the parameters stay equal on all ranks.
        """
        trainee = make()
        optimizer = torch.optim.SGD(trainee.module.parameters(), lr=0.0)
        turns = _turns(session, trainee, shared, optimizer, True)
        return replace(turns, name="compute-only", operation="compute")

    wanted = codecs.parse(",".join(session.plan.codecs)) or [Codec(codecs.DEFAULT)]
    contenders = [ours(plain)]
    contenders += [ours(codec) for codec in wanted if codec != plain]
    if any(peer.name == "torch-gloo" for peer in session.peers):
        contenders.append(native())
    contenders.append(alone())
    settings = {"model": model, "batch": str(BATCH), "pixels": str(net.pixels)}
    tensors = len(list(shared.parameters()))
    return Subject("training", size, contenders, tensors, settings, images=BATCH)


def _turns(
    session: Session,
    trainee: Trainee,
    shared: nn.Module,
    optimizer: torch.optim.Optimizer,
    proven: bool,
) -> Contender:
    """Return a contender that takes steps and checks that parameters are equal on all ranks.

    proven: whether the gradients of the first step were right.
    """
    parameters = list(shared.parameters())

    def run(_: int) -> None:
        trainee.backward()
        optimizer.step()

    def check() -> bool:
        return (
            session.same(p.detach().numpy() for p in parameters)
            and proven
            and math.isfinite(trainee.loss)
        )

    return Contender(PERSEUS, "training", run, check=check, calls=_CALLS, warm=_WARM, warm_ups=1)


def _exact_gradients(trainee: Trainee) -> list[torch.Tensor]:
    """Return the first batch's gradients, averaged over ranks by allreduce(), which is exact."""
    trainee.backward()
    return [
        hvd.allreduce(gradient, name=f"bench.exact.{i}")
        for i, gradient in enumerate(trainee.gradients())
    ]


def _near(exact: list[torch.Tensor], found: list[torch.Tensor], limit: float) -> bool:
    """Return whether |found - exact| < limit · |exact| over all tensors together, on this rank."""
    error = norm = 0.0
    for a, b in zip(exact, found, strict=True):
        error += float((a - b).square().sum())
        norm += float(a.square().sum())
    return error < limit * limit * norm

"""Measures training steps of real networks on synthetic images, with Perseus and native DDP.

All contenders take turns at training the same parameters. Each of them has its own modules and
gradients, but they share the storage of the parameters to save memory, and all ranks have the same
bits after every turn. One thread per rank.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
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
from perseus.bench.plan import ALONE, DDP, PERSEUS
from perseus.bench.sampling import Contender
from perseus.bench.session import Session, Subject
from perseus.torch.distributed import synchronize_parameters

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


class Course:
    """What the contenders of one network share: parameters, images and how a turn is checked."""

    def __init__(self, session: Session, model: str, net: Net) -> None:
        torch.manual_seed(_SEED)
        self._session = session
        self._shared = net.make()
        generator = torch.Generator().manual_seed(_SEED + 1 + session.rank)
        self._images = torch.randn(_BATCHES, BATCH, 3, net.pixels, net.pixels, generator=generator)
        self._labels = torch.randint(CLASSES, (_BATCHES, BATCH), generator=generator)
        self.size = 4 * sum(p.numel() for p in self._shared.parameters())
        self._settings = {"model": model, "batch": str(BATCH), "pixels": str(net.pixels)}

    def trainee(self) -> Trainee:
        """Return a module of a contender's own."""
        return Trainee(self._shared, self._images, self._labels)

    def exact_gradients(self) -> list[torch.Tensor]:
        """Return the first batch's gradients, averaged over ranks by allreduce(), which is exact.

        A collective.
        """
        trainee = self.trainee()
        trainee.backward()
        return [
            hvd.allreduce(gradient, name=f"bench.exact.{i}")
            for i, gradient in enumerate(trainee.gradients())
        ]

    def native(
        self,
        wrap: Callable[[nn.Module], DistributedDataParallel],
        codec: Codec,
        exact: list[torch.Tensor],
    ) -> Contender:
        """Return a contender whose module wrap() makes of a plain one, as DDP does. A collective.

        codec: bounds the error of the first step's gradients, compared with the exact ones.
        """
        trainee = self.trainee()
        trainee.module = wrapped = wrap(trainee.module)
        optimizer = torch.optim.SGD(trainee.module.parameters(), lr=_LEARNING_RATE)
        trainee.backward()
        proven = near(exact, trainee.gradients(), codec)
        return self.turns(trainee, optimizer, proven, lambda: synchronize_parameters(wrapped))

    def alone(self) -> Contender:
        """Return a contender that does not communicate, which bounds the speed of the others.

        Its learning rate is 0, so that the parameters stay equal on all ranks.
        """
        trainee = self.trainee()
        optimizer = torch.optim.SGD(trainee.module.parameters(), lr=0.0)
        return replace(self.turns(trainee, optimizer, True), name=ALONE, operation="compute")

    def turns(
        self,
        trainee: Trainee,
        optimizer: torch.optim.Optimizer,
        proven: bool,
        make_equal: Callable[[], None] | None = None,
    ) -> Contender:
        """Return a contender that takes steps and checks that parameters are equal on all ranks.

        proven: whether the gradients of the first step were right. make_equal: is called before the
        check, because ranks that average a rotating part of the parameters have different ones.
        """
        parameters = list(self._shared.parameters())

        def run(_: int) -> None:
            trainee.backward()
            optimizer.step()

        def check() -> bool:
            if make_equal:
                make_equal()
            return (
                self._session.same(p.detach().numpy() for p in parameters)
                and proven
                and math.isfinite(trainee.loss)
            )

        return Contender(
            PERSEUS, "training", run, check=check, calls=_CALLS, warm=_WARM, warm_ups=1
        )

    def subject(self, case: str, contenders: list[Contender], **settings: str) -> Subject:
        """Return the subject of these contenders, the first of which others are compared with."""
        tensors = len(list(self._shared.parameters()))
        known = {**self._settings, **settings}
        return Subject(case, self.size, contenders, tensors, known, images=BATCH)


def near(exact: list[torch.Tensor], found: list[torch.Tensor], codec: Codec) -> bool:
    """Return whether |found - exact| < the codec's bound · |exact|, over all tensors together, on
    this rank."""
    error = norm = 0.0
    for a, b in zip(exact, found, strict=True):
        error += float((a - b).square().sum())
        norm += float(a.square().sum())
    return error < codec.relative_error**2 * norm


def subject_of(session: Session, model: str, net: Net) -> Subject:
    """Return the contenders for one network, after verifying the first step of each.

    A collective.
    """
    course = Course(session, model, net)
    plain = Codec(codecs.PLAIN)

    def ours(codec: Codec) -> Contender:
        trainee = course.trainee()
        named = [(f"{codec.label}.{n}", p) for n, p in trainee.module.named_parameters()]
        inner = torch.optim.SGD(trainee.module.parameters(), lr=_LEARNING_RATE)
        optimizer: Any = hvd.DistributedOptimizer(inner, named, **codec.arguments())
        exact = course.exact_gradients()
        trainee.backward()
        optimizer.synchronize()
        proven = near(exact, trainee.gradients(), codec)
        with optimizer.skip_synchronize():
            optimizer.step()
        make_equal = hvd.synchronize_parameters if codec.name == "rotate" else None
        if make_equal:
            make_equal()
        turns = course.turns(trainee, optimizer, proven, make_equal)
        return replace(turns, codec=codec.label, **session.payloads(codec, course.size))

    wanted = codecs.parse(",".join(session.plan.codecs)) or [Codec(codecs.DEFAULT)]
    contenders = [ours(plain)]
    contenders += [ours(codec) for codec in wanted if codec != plain]
    if any(peer.name == "torch-gloo" for peer in session.peers):
        native = course.native(DistributedDataParallel, plain, course.exact_gradients())
        contenders.append(replace(native, name=DDP, **session.payloads(plain, course.size)))
    contenders.append(course.alone())
    return course.subject("training", contenders)

"""Measures training steps of real networks under DistributedDataParallel, on Perseus and on gloo.

Between hosts Perseus has the plan's codecs, and gloo torch's own hooks as well. See training.py
for what the contenders share. One thread per rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from perseus.bench import codecs
from perseus.bench.codecs import Codec
from perseus.bench.groups import BUCKETS, USUAL_BUCKET, on_perseus, wrap
from perseus.bench.nets import NETS, Net
from perseus.bench.plan import DDP, FP16_HOOK, POWERSGD_HOOK
from perseus.bench.sampling import Contender
from perseus.bench.session import Session, Subject
from perseus.bench.sizes import show_bytes
from perseus.bench.training import Course

_ONE_BUCKET = 4 << 30


def sweep(session: Session) -> Iterator[Subject]:
    """Yield the subject of every network and bucket size."""
    wanted = codecs.parse(",".join(session.plan.codecs)) or [Codec(codecs.DEFAULT)]
    groups = {codec: on_perseus(codec) for codec in wanted}
    for model in session.plan.models or NETS:
        for bucket in session.sizes(BUCKETS if session.hosts == 1 else [USUAL_BUCKET]):
            yield subject_of(session, groups, model, NETS[model], bucket)


def subject_of(
    session: Session, groups: dict[Codec, dist.ProcessGroup], model: str, net: Net, bucket: int
) -> Subject:
    """Return the contenders for one network, after verifying the first step of each.

    groups: on Perseus, by the codec of their gradients. bucket: in bytes. A collective.
    """
    course = Course(session, model, net)
    trainings = _Trainings(session, course, bucket)
    contenders = [trainings.on_perseus(codec, group) for codec, group in groups.items()]
    contenders.append(trainings.on_gloo())
    if session.hosts > 1:
        contenders += [trainings.with_fp16(), trainings.with_powersgd()]
    contenders.append(course.alone())
    return course.subject("ddp-training", contenders, bucket=show_bytes(bucket))


class _Trainings:
    """Makes the contenders that train one network with buckets of one size. All are collectives."""

    def __init__(self, session: Session, course: Course, bucket: int) -> None:
        self._session = session
        self._course = course
        self._bucket = bucket
        self._exact = course.exact_gradients()

    def on_perseus(self, codec: Codec, group: dist.ProcessGroup) -> Contender:
        """Return DDP on a group of Perseus."""
        made = self._contender(partial(wrap, bucket=self._bucket, group=group), codec)
        return replace(made, codec=codec.label)

    def on_gloo(self) -> Contender:
        """Return DDP on gloo."""
        made = self._contender(partial(wrap, bucket=self._bucket), Codec(codecs.PLAIN))
        return replace(made, name=DDP)

    def with_fp16(self) -> Contender:
        """Return DDP on gloo with torch's hook that sends float16."""

        def wrapped(module: nn.Module) -> DistributedDataParallel:
            model = wrap(module, self._bucket)
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
            return model

        return replace(self._contender(wrapped, Codec("fp16")), name=DDP, codec=FP16_HOOK)

    def with_powersgd(self) -> Contender:
        """Return DDP on gloo with torch's PowerSGD of rank 1 (Vogels et al., 2019).

        It has one bucket: with several, its callbacks start collectives in another order on each
        rank. The first two steps are exact.
        """

        def wrapped(module: nn.Module) -> DistributedDataParallel:
            model = wrap(module, _ONE_BUCKET)
            state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            return model

        made = self._contender(wrapped, Codec(codecs.PLAIN))
        return replace(made, name=DDP, codec=POWERSGD_HOOK, payload=None, payload_most=None)

    def _contender(
        self, wrapped: Callable[[nn.Module], DistributedDataParallel], codec: Codec
    ) -> Contender:
        made = self._course.native(wrapped, codec, self._exact)
        return replace(made, **self._session.payloads(codec, self._course.size))

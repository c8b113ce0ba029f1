"""perseus-bench's training and gradients on a network small enough for a test."""

from __future__ import annotations

import torch
from patterns import apart
from torch import nn

import perseus.torch.horovod as hvd
from perseus.bench import ddp_training, gradients, training
from perseus.bench.codecs import Codec
from perseus.bench.ddp import Given, Handing, return_the_bucket
from perseus.bench.gradients import Entrant, NormalData
from perseus.bench.groups import on_perseus, wrap
from perseus.bench.models import CLASSES
from perseus.bench.nets import Net
from perseus.bench.peers import disband
from perseus.bench.plan import Plan
from perseus.bench.session import Session
from perseus.compression import Compressor


class _Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(), nn.Flatten()
        )
        self.head = nn.Linear(4 * 4 * 4, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.layers(images))
        return result


def check_training_takes_turns_with_native_ddp() -> None:
    plan = Plan(["training"], ["torch-gloo"], codecs=["default", "fp16"], seconds=1e-3)
    session = Session(plan)
    records = session.records(training.subject_of(session, "tiny", Net(_Tiny, 6)))
    disband()
    contenders = [record.contender for record in records]
    assert contenders == [
        "perseus", "perseus default", "perseus fp16", "torch-ddp-gloo", "compute-only",
    ]  # fmt: skip
    for record in records:
        assert record.verified, record
        assert record.images_per_s == session.size * 16 / record.median_s


def check_ddp_takes_turns_on_perseus_and_on_gloo() -> None:
    session = Session(Plan(["ddp-training"], ["torch-gloo"], seconds=1e-3))
    wanted = [Codec("default"), Codec("int8")]
    groups = {codec: on_perseus(codec) for codec in wanted}
    subject = ddp_training.subject_of(session, groups, "tiny", Net(_Tiny, 6), 1 << 20)
    records = session.records(subject)
    disband()
    contenders = [record.contender for record in records]
    assert contenders == ["perseus default", "perseus int8", "torch-ddp-gloo", "compute-only"]
    for record in records:
        assert record.verified, record
        assert record.settings["bucket"] == "1 MiB"


def check_ranks_that_average_a_rotating_part_are_right() -> None:
    with apart():
        plan = Plan(["training"], codecs=["rotate:2"], seconds=1e-3)
        session = Session(plan)
        records = session.records(training.subject_of(session, "tiny", Net(_Tiny, 6)))
        assert [record.codec for record in records] == ["none", "rotate:2", "none"]
        assert all(record.verified for record in records)


def check_ddp_that_averages_a_rotating_part_is_right() -> None:
    with apart():
        session = Session(Plan(["ddp-training"], ["torch-gloo"], seconds=1e-3))
        codec = Codec("rotate", 2)
        groups = {codec: on_perseus(codec)}
        subject = ddp_training.subject_of(session, groups, "tiny", Net(_Tiny, 6), 1 << 20)
        records = session.records(subject)
        disband()
        assert [record.codec for record in records] == ["rotate:2", "none", "none"]
        assert all(record.verified for record in records)


def check_ddp_is_held_to_the_bounds_of_float16_between_hosts() -> None:
    with apart():
        session = Session(Plan(["ddp"], ["torch-gloo"], seconds=1e-3))
        session.hosts = session.size
        given = Given(session, [(300, 7), (5,)])
        group = on_perseus()
        ours, gloo, alone = session.records(given.subject(group, "tiny", 4096))
        assert ours.verified and gloo.verified and alone.verified
        # Gradients without a codec are exact, which these are not.
        exact = given.contender(wrap(Handing(given.gradients), 4096, group))
        exact.prepare()
        exact.run(0)
        assert not exact.check()
        disband()


def check_an_exchange_that_is_wrong_is_noticed() -> None:
    session = Session(Plan(["ddp"], ["torch-gloo"], seconds=1e-3))
    given = Given(session, [(300, 7), (5,)])
    subject = given.subject(on_perseus(), "tiny", 4096)
    ours, gloo, alone, least = session.records(subject)
    assert (ours.contender, gloo.contender) == ("perseus default", "torch-ddp-gloo")
    assert (alone.contender, least.contender) == ("no-exchange", "least-copies")
    assert ours.verified and gloo.verified and alone.verified and least.verified
    # What is not exchanged is no average, whoever says so.
    model = wrap(Handing(given.gradients), 4096)
    model.register_comm_hook(None, return_the_bucket)
    lying = given.contender(model)
    lying.prepare()
    lying.run(0)
    assert not lying.check()
    disband()


def check_training_notices_gradients_that_are_wrong() -> None:
    session = Session(Plan(["training"], codecs=["fp16"], seconds=1e-3))
    right = hvd.Compression.fp16

    class Wrong(Compressor):
        @staticmethod
        def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, object]:
            return tensor, None

        @staticmethod
        def decompress(tensor: torch.Tensor, ctx: object) -> torch.Tensor:
            return tensor * 1.01 if tensor.ndim == 2 else tensor

    hvd.Compression.fp16 = Wrong
    try:
        plain, coded, alone = session.records(training.subject_of(session, "tiny", Net(_Tiny, 6)))
    finally:
        hvd.Compression.fp16 = right
    assert plain.verified and alone.verified
    assert (coded.verified, coded.note) == (False, "wrong result")


def check_gradients_that_differ_between_ranks_are_noticed() -> None:
    session = Session(Plan(["gradients"]))
    work = [torch.zeros(300)]
    data = NormalData(300, session.size)
    entrant = Entrant(session, data, work, Codec("int8"), 1)
    for last_is_off in (False, True):
        entrant.fill()
        hvd.allreduce_(work[0], name="entrant")
        off = last_is_off and session.rank == session.size - 1
        work[0] += 1e-4 if off else 0  # well within the bound
        assert entrant.check() is not last_is_off


def check_a_models_gradients_are_right_through_codecs() -> None:
    session = Session(Plan(["gradients"], sizes=[4000], codecs=["fp16"], seconds=1e-3))
    for subject in gradients.sweep(session):
        records = session.records(subject)
        assert [record.contender for record in records] == ["perseus", "perseus fp16"]
        assert all(record.verified for record in records)

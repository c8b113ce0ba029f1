"""perseus-bench's training with TensorFlow, on a network small enough for a test."""

from __future__ import annotations

import keras
from worlds import world_with

import perseus.tensorflow.horovod as hvd
from perseus.bench import tensorflow_training
from perseus.bench.models import CLASSES
from perseus.bench.plan import TENSORFLOW, Plan
from perseus.bench.session import Session
from perseus.bench.tensorflow_training import Net
from perseus.compression import Compressor


def tiny_network():
    """Images of 6 x 6 pixels to scores."""
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((6, 6, 3)),
            layers.Conv2D(4, 3),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dense(CLASSES),
        ]
    )


def records_of(codec: str) -> list:
    """Of the tiny network, plain, through the codec, and alone."""
    plan = Plan(["training"], codecs=[codec], seconds=1e-3, framework=TENSORFLOW)
    session = Session(plan)
    return session.records(tensorflow_training.subject_of(session, "tiny", Net(tiny_network, 6)))


def check_training_with_tensorflow_is_verified() -> None:
    records = records_of("default")
    contenders = [record.contender for record in records]
    assert contenders == ["perseus", "perseus default", "compute-only"]
    for record in records:
        assert record.verified, record
        assert record.images_per_s == hvd.size() * 16 / record.median_s


def check_ranks_that_average_a_rotating_part_are_right() -> None:
    with world_with(LIGHT_2D_ALLREDUCE=1, LIGHT_INTRA_SIZE=1):  # each rank is a host
        records = records_of("rotate:2")
        assert [record.codec for record in records] == ["none", "rotate:2", "none"]
        assert all(record.verified for record in records)


def check_gradients_of_tensorflow_that_are_wrong_are_noticed() -> None:
    right = hvd.Compression.fp16

    class Wrong(Compressor):
        @staticmethod
        def compress(tensor):
            return tensor, None

        @staticmethod
        def decompress(tensor, ctx):
            return tensor * 1.01 if tensor.shape.rank == 2 else tensor

    hvd.Compression.fp16 = Wrong
    try:
        plain, coded, alone = records_of("fp16")
    finally:
        hvd.Compression.fp16 = right
    assert plain.verified
    assert alone.verified
    assert (coded.verified, coded.note) == (False, "wrong result")

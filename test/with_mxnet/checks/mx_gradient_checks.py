"""Gradients through the reducer that optimizers, trainers and stores share."""

from __future__ import annotations

import gradient_settings as settings
import mxnet as mx
import numpy as np
from mx_values import assert_equal, everyone, mine, raised
from worlds import world_with

import perseus.mxnet as hvd
from perseus.compression import Compressor, Int8Compressor
from perseus.gradients.plan import Plan
from perseus.mxnet.reducer import GradientReducer

SHAPES = [(3,), (4, 5), (1031,), (2, 3, 4)]
NAMES = [f"gradient{i}" for i in range(len(SHAPES))]


def _gradients(step: int = 0) -> list[mx.nd.NDArray]:
    return [mine(shape, salt=salt + step) for salt, shape in enumerate(SHAPES)]


def check_gradients_are_reduced_in_place() -> None:
    reducer = GradientReducer(Plan())
    summed = GradientReducer(Plan(op=hvd.Sum, predivide_factor=1.0))
    divided = GradientReducer(Plan(predivide_factor=2.0))
    for step in range(3):
        for given, bundles in (
            (reducer, None),
            (reducer, [(0, 2), (1, 3)]),
            (divided, None),
            (summed, [(3,), (0, 1, 2)]),
        ):
            gradients = _gradients(step)
            outcomes = given(gradients, NAMES, [-i for i in range(len(NAMES))], bundles)
            for salt, gradient in enumerate(gradients):
                total = everyone(SHAPES[salt], salt + step).sum(axis=0)
                assert_equal(gradient, total if given is summed else total / 2)
            assert outcomes.applies()


def check_other_compressors_act_around_it() -> None:
    class Halved(Compressor):
        @staticmethod
        def compress(tensor):
            return tensor * 0.5, 4.0

        @staticmethod
        def decompress(tensor, ctx):
            return tensor * ctx

    gradients = _gradients()
    GradientReducer(Plan(op=hvd.Sum, compression=Halved))(gradients, NAMES)
    for salt, gradient in enumerate(gradients):
        assert_equal(gradient, 2 * everyone(SHAPES[salt], salt).sum(axis=0))


def check_gradients_are_held_and_summed_in_the_core() -> None:
    with world_with(PERSEUS_ACCUMULATE_N_STEPS=2):
        reducer = GradientReducer(Plan())
        for step in range(4):
            gradients = _gradients(step)
            outcomes = reducer(gradients, NAMES, None, [(0, 1), (2,), (3,)])
            assert outcomes.applies() is (step % 2 == 1)
            if step % 2 == 1:
                for salt, gradient in enumerate(gradients):
                    both = [everyone(SHAPES[salt], salt + s).mean(axis=0) for s in (step - 1, step)]
                    assert_equal(gradient, both[0] + both[1])
            if step == 1:
                reducer(_gradients(), NAMES)
                reducer.forget()


def check_a_nan_keeps_all_ranks_from_stepping() -> None:
    nan = {"PERSEUS_ALLREDUCE_NANCHECK": 1, "PERSEUS_ALLREDUCE_NANCHECK_ACTION": "skip"}
    with world_with(**nan):
        reducer = GradientReducer(Plan())
        for step in range(3):
            gradients = _gradients()
            if step == 1 and hvd.rank() == 1:
                gradients[2][7] = np.nan
            assert reducer(gradients, NAMES).applies() is (step != 1)
    nan["PERSEUS_ALLREDUCE_NANCHECK_ACTION"] = "raise"
    with world_with(**nan):
        gradients = _gradients()
        if hvd.rank() == 1:
            gradients[2][7] = np.nan
        GradientReducer(Plan())(gradients, NAMES)
        message = raised(mx.base.MXNetError, gradients[2].wait_to_read)
        assert "gradient2" in message, message
        assert_equal(gradients[0], everyone(SHAPES[0], 0).mean(axis=0))


def _reduce(given: list[settings.Arrays]) -> list[settings.Arrays]:
    reducer = GradientReducer(Plan(op=hvd.Sum))
    results = []
    for arrays in given:
        gradients = [mx.nd.array(array) for array in arrays]
        reducer(gradients, ["large", "small"])
        results.append([gradient.asnumpy() for gradient in gradients])
    return results


def check_dtype_and_scale() -> None:
    settings.dtype_and_scale(_reduce)


def check_int8() -> None:
    settings.int8(_reduce)


def check_top_k() -> None:
    settings.top_k(_reduce)


def check_powersgd() -> None:
    settings.powersgd(_reduce)


def check_the_shape_of_the_allreduce_changes_nothing() -> None:
    settings.shape_of_the_allreduce(_reduce)


def check_codecs_and_what_they_hold_back() -> None:
    """The core rounds; what it held back is in the next sum, or in that of who goes on with it."""
    with settings.apart():
        reducer = GradientReducer(Plan(op=hvd.Sum, compression=Int8Compressor))
        first, second, third = ([array / 7 for array in _gradients()] for _ in range(3))
        reducer(first, NAMES)
        reducer.wait()
        held = reducer.residuals.read()
        assert set(held) == set(NAMES)
        other = GradientReducer(reducer.plan)
        other.residuals.replace(held)
        reducer(second, NAMES)
        reducer.wait()
        other(third, NAMES)
        for left, right in zip(second, third, strict=True):
            assert_equal(left, right.asnumpy())
        assert not all(
            np.array_equal(one.asnumpy(), two.asnumpy())
            for one, two in zip(first, second, strict=True)
        )


def check_only_one_rank_in_the_set() -> None:
    with world_with(HOROVOD_DYNAMIC_PROCESS_SETS=1):
        last = hvd.add_process_set([1])
        reducer = GradientReducer(Plan(process_set=last, compression=Int8Compressor))
        assert not reducer.takes_part()
        gradients = _gradients()
        assert reducer(gradients, NAMES).applies()
        for salt, gradient in enumerate(gradients):
            assert_equal(gradient, everyone(SHAPES[salt], salt)[hvd.rank()])

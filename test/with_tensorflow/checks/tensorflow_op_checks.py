"""Every collective's values: dtypes, shapes, arguments, groups; in all ways to run an op."""

from __future__ import annotations

import ctypes
from functools import partial
from resource import RUSAGE_THREAD, getrusage

import numpy as np
import tensorflow as tf
from tensorflow_values import (
    REDUCED,
    SHAPES,
    WAYS,
    another_world,
    assert_equal,
    everyone,
    in_function,
    mine,
    numbers,
    raised,
)

from perseus.tensorflow import mpi_ops as hvd
from perseus.tensorflow import ops


def check_nothing_of_tensorflow_was_started_by_init() -> None:
    """First of all: this is refused once TensorFlow runs."""
    tf.config.threading.set_inter_op_parallelism_threads(3)


def check_freed_memory_is_there_for_the_next_step() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    size = 30 << 20
    faults = []
    for _ in range(2):
        before = getrusage(RUSAGE_THREAD).ru_minflt
        block = libc.malloc(size)
        ctypes.memset(block, 1, size)
        libc.free(block)
        faults.append(getrusage(RUSAGE_THREAD).ru_minflt - before)
    assert faults[1] < 10, faults  # 15 even of huge pages


def check_allreduce_of_every_dtype_and_shape() -> None:
    for way in WAYS.values():
        inputs = [(dtype, shape) for dtype in REDUCED for shape in SHAPES]

        def reduce(inputs=inputs):
            return [
                hvd._allreduce(
                    mine(shape, dtype, salt), op=hvd.Max if dtype == tf.bool else hvd.Sum
                )
                for salt, (dtype, shape) in enumerate(inputs)
            ]

        for salt, ((dtype, shape), got) in enumerate(zip(inputs, way(reduce), strict=True)):
            assert got.dtype == dtype
            all_ranks = everyone(shape, salt)
            either = np.any(all_ranks != 0, axis=0)
            assert_equal(got, either if dtype == tf.bool else all_ranks.sum(axis=0))


def check_a_list_of_numbers_is_a_tensor() -> None:
    """As in hvd._allreduce([0], name="Barrier")."""
    for way, run in WAYS.items():
        total = run(lambda way=way: hvd._allreduce([hvd.rank(), 7], name=f"Barrier.{way}"))
        assert total.dtype == tf.int32
        assert_equal(total, [sum(range(hvd.size())), 7 * hvd.size()])


def check_operations_and_factors() -> None:
    all_ranks = everyone((31,))
    for op, expected in {
        hvd.Average: all_ranks.mean(axis=0),
        hvd.Min: all_ranks.min(axis=0),
        hvd.Max: all_ranks.max(axis=0),
        hvd.Product: all_ranks.prod(axis=0),
    }.items():
        assert_equal(hvd._allreduce(mine((31,), tf.float64), op=op), expected)
    # Factors keep their double precision.
    third = hvd._allreduce(
        mine((31,), tf.float64), op=hvd.Sum, prescale_factor=2.0, postscale_factor=1 / 3
    )
    assert_equal(third, (2 * all_ranks).sum(axis=0) * (1 / 3))
    halved = hvd._allreduce(mine((31,), tf.int32), op=hvd.Average)
    assert_equal(halved, np.trunc(all_ranks.mean(axis=0)))


def check_large_tensors() -> None:
    shape = (1_100_003,)
    for way in (WAYS["eager"], WAYS["function"]):
        assert_equal(
            way(lambda: hvd._allreduce(mine(shape, tf.float32))), everyone(shape).sum(axis=0)
        )


def check_groups_of_mixed_dtypes() -> None:
    kinds = [(tf.float32, (5,)), (tf.int64, (2, 3)), (tf.float16, (1031,)), (tf.float32, ())]

    def run():
        tensors = [mine(shape, dtype, salt) for salt, (dtype, shape) in enumerate(kinds)]
        return (
            hvd._grouped_allreduce(tensors),
            hvd.grouped_allgather(tensors[:3]),
            hvd._grouped_reducescatter(tensors[:3]),
        )

    for way in WAYS.values():
        reduced, gathered, scattered = way(run)
        for salt, (_, shape) in enumerate(kinds):
            all_ranks = everyone(shape, salt)
            total = all_ranks.sum(axis=0)
            assert_equal(reduced[salt], total)
            if shape:
                assert_equal(gathered[salt], np.concatenate(all_ranks))
                assert_equal(scattered[salt], np.array_split(total, hvd.size())[hvd.rank()])
    assert hvd._grouped_allreduce([]) == []


def check_what_is_moved_may_be_of_more_dtypes() -> None:
    for way in WAYS.values():

        def run():
            found = []
            for salt, dtype in enumerate([*REDUCED, tf.uint16]):
                tensor = mine((4, 3), dtype, salt)
                found.append(
                    (hvd.allgather(tensor), hvd.broadcast(tensor, 1), hvd.alltoall(tensor))
                )
            return found

        for salt, (gathered, copied, exchanged) in enumerate(way(run)):
            dtype = [*REDUCED, tf.uint16][salt]
            all_ranks = everyone((4, 3), salt)
            if dtype == tf.bool:
                all_ranks = all_ranks != 0
            assert gathered.dtype == copied.dtype == exchanged.dtype == dtype
            assert_equal(gathered, np.concatenate(all_ranks))
            assert_equal(copied, all_ranks[1])
            begin = hvd.rank() * 2
            assert_equal(exchanged, np.concatenate([rows[begin : begin + 2] for rows in all_ranks]))


def check_uneven_rows() -> None:
    rank, size = hvd.rank(), hvd.size()
    rows = [(r * 3, 2) for r in range(size)]  # none on rank 0
    splits = [[r + to for to in range(size)] for r in range(size)]
    # One row more than is sent.
    sent = [numbers((sum(splits[r]) + 1, 2), r) for r in range(size)]
    for way in WAYS.values():
        gathered = way(lambda: hvd.allgather(mine(rows[rank], tf.float32)))
        assert_equal(gathered, np.concatenate([numbers(rows[r], r) for r in range(size)]))

        output, received = way(lambda: hvd.alltoall(sent[rank], splits[rank]))
        parts = [np.split(sent[r], np.cumsum(splits[r]))[rank] for r in range(size)]
        assert_equal(output, np.concatenate(parts))
        assert_equal(received, [len(part) for part in parts])
        assert received.dtype == tf.int32

        scattered = way(lambda: hvd._reducescatter(mine((5, 3), tf.int64), op=hvd.Sum))
        assert_equal(scattered, np.array_split(everyone((5, 3)).sum(axis=0), size)[rank])


def check_broadcast_into_variables() -> None:
    rank = hvd.rank()
    variables = [tf.Variable(numbers((3, 2), rank), dtype=tf.float32), tf.Variable(rank + 5)]
    hvd.broadcast_(variables, 1)
    assert_equal(variables[0].value(), numbers((3, 2), 1))
    assert_equal(variables[1].value(), 6)

    for resource in (True, False):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            variable = tf.compat.v1.Variable(numbers((3, 2), rank), use_resource=resource)
            session.run(tf.compat.v1.global_variables_initializer())
            session.run(hvd.broadcast_([variable], 1))
            assert_equal(session.run(variable), numbers((3, 2), 1))

    @tf.function
    def overwrite():
        hvd.broadcast_(variables, 0, name="back")

    variables[0].assign(numbers((3, 2), rank, salt=1))
    overwrite()
    assert_equal(variables[0].value(), numbers((3, 2), 0, salt=1))


def check_facts_about_the_world() -> None:
    def facts():
        return (
            hvd.size_op(),
            hvd.rank_op(),
            hvd.local_size_op(),
            hvd.local_rank_op(),
            hvd.process_set_included_op(),
        )

    for way in WAYS.values():
        for got, expected in zip(way(facts), (2, hvd.rank(), 2, hvd.rank(), 1), strict=True):
            assert got.shape == ()
            assert got.dtype == tf.int32
            assert_equal(got, expected)


def check_process_sets() -> None:
    with another_world(HOROVOD_DYNAMIC_PROCESS_SETS="1"):
        last = hvd.add_process_set([1])
        group = last.process_set_id
        facts = in_function(partial(hvd.process_set_included_op, group))
        assert_equal(facts, hvd.rank())
        assert_equal(hvd.size_op(group), 1)
        if last.included():
            alone = in_function(
                lambda: hvd._allreduce(mine((4,), tf.float32), "alone", process_set=last)
            )
            assert_equal(alone, numbers((4,), 1))
            assert_equal(hvd._reducescatter(mine((4,), tf.float32), process_set=last), alone)
        assert hvd.remove_process_set(last)


def check_ranks_may_do_different_numbers_of_steps() -> None:
    joined = []
    if hvd.rank() == 0:
        for step in range(3):
            total = hvd._allreduce(tf.fill([3], step + 1.0), f"step{step}")
            joined.append(total.numpy().tolist())
        assert joined == [[1.0] * 3, [2.0] * 3, [3.0] * 3]
    last = in_function(hvd.join) if hvd.rank() == 0 else hvd.join()
    assert last.numpy() == 0


def check_gradients_are_held_and_summed_in_the_core() -> None:
    with another_world(PERSEUS_ACCUMULATE_N_STEPS="2"):

        @tf.function
        def step(tensor):
            reduced, outcomes = ops.allreduce([tensor], ["weight"], op=ops.Average, gradient_of=5)
            return reduced[0], outcomes[0]

        expected = 0
        for salt in range(4):
            expected = expected + everyone((9,), salt).mean(axis=0)
            reduced, outcome = step(mine((9,), tf.float32, salt))
            assert outcome.numpy() == (salt + 1) % 2, salt
            if salt % 2 == 1:
                assert_equal(reduced, expected)
                expected = 0


def check_codecs_reach_the_core() -> None:
    def reduce():
        return ops.allreduce([mine((9,), tf.int32)], op=ops.Sum, codec=4, codec_argument=0.5)

    assert "int8, int4, int2, top-k, rotate and PowerSGD compress floating-point" in raised(
        tf.errors.InvalidArgumentError, reduce
    )

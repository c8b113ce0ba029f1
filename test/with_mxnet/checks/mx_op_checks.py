"""Every collective's values: dtypes, shapes, arguments, groups; the order of MXNet's engine."""

from __future__ import annotations

import warnings

import mxnet as mx
import numpy as np
from mx_values import ALL, SHAPES, as_array, assert_equal, everyone, mine, numbers, raised
from worlds import world_with

import perseus.mxnet as hvd
from perseus.mxnet import ops
from perseus.mxnet.library import Batch


def check_allreduce_of_every_dtype_and_shape() -> None:
    inputs = [(dtype, shape) for dtype in ALL for shape in SHAPES]
    tensors = [mine(shape, dtype, salt) for salt, (dtype, shape) in enumerate(inputs)]
    op_of = {"bool": hvd.Max}
    results = [
        hvd.allreduce(tensor, op=op_of.get(dtype, hvd.Sum))
        for tensor, (dtype, _) in zip(tensors, inputs, strict=True)
    ]
    for salt, ((dtype, shape), got) in enumerate(zip(inputs, results, strict=True)):
        assert got.dtype == np.dtype(dtype)
        all_ranks = everyone(shape, salt)
        either = np.any(all_ranks != 0, axis=0)
        assert_equal(got, either if dtype == "bool" else all_ranks.sum(axis=0))
        own = numbers(shape, hvd.rank(), salt)
        assert_equal(tensors[salt], own != 0 if dtype == "bool" else own)
        assert hvd.allreduce_(tensors[salt], op=op_of.get(dtype, hvd.Sum)) is tensors[salt]
        assert_equal(tensors[salt], either if dtype == "bool" else all_ranks.sum(axis=0))


def check_operations_and_factors() -> None:
    all_ranks = everyone((31,))
    for op, expected in {
        hvd.Average: all_ranks.mean(axis=0),
        hvd.Min: all_ranks.min(axis=0),
        hvd.Max: all_ranks.max(axis=0),
        hvd.Product: all_ranks.prod(axis=0),
    }.items():
        assert_equal(hvd.allreduce(mine((31,), "float64"), op=op), expected)
    # Factors keep their double precision.
    third = hvd.allreduce(
        mine((31,), "float64"), op=hvd.Sum, prescale_factor=2.0, postscale_factor=1 / 3
    )
    assert_equal(third, (2 * all_ranks).sum(axis=0) * (1 / 3))
    assert_equal(hvd.allreduce(mine((31,), "int32")), np.trunc(all_ranks.mean(axis=0)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_equal(hvd.allreduce(mine((31,)), False), all_ranks.sum(axis=0))
    assert any("`average` has been replaced" in str(warning.message) for warning in caught)


def check_large_arrays() -> None:
    shape = (1_100_003,)
    assert_equal(hvd.allreduce(mine(shape), op=hvd.Sum), everyone(shape).sum(axis=0))


def check_groups_of_mixed_dtypes() -> None:
    kinds = [("float32", (5,)), ("int64", (2, 3)), ("float16", (1031,))]
    tensors = [mine(shape, dtype, salt) for salt, (dtype, shape) in enumerate(kinds)]
    reduced = hvd.grouped_allreduce(tensors, op=hvd.Sum, name="group")
    gathered = hvd.grouped_allgather(tensors)
    scattered = hvd.grouped_reducescatter(tensors, op=hvd.Sum)
    assert hvd.grouped_allreduce_(tensors, op=hvd.Max) is tensors
    for salt, (_, shape) in enumerate(kinds):
        all_ranks = everyone(shape, salt)
        total = all_ranks.sum(axis=0)
        assert_equal(reduced[salt], total)
        assert_equal(gathered[salt], np.concatenate(all_ranks))
        assert_equal(scattered[salt], np.array_split(total, hvd.size())[hvd.rank()])
        assert_equal(tensors[salt], all_ranks.max(axis=0))
    for function in (hvd.grouped_allreduce, hvd.grouped_allreduce_, hvd.grouped_allgather):
        assert function([]) == []
    assert hvd.grouped_reducescatter([]) == []


def check_parts_of_one_array_in_a_group() -> None:
    """They share a variable of the engine, which wants it once."""
    whole = mine((6, 2))
    hvd.grouped_allreduce_([whole[0:2], whole[2:3], whole[4:6]], op=hvd.Sum)
    expected = everyone((6, 2)).sum(axis=0)
    expected[3] = numbers((6, 2), hvd.rank())[3]
    assert_equal(whole, expected)
    copies = hvd.grouped_allreduce([whole[0:2], whole[0:2]], op=hvd.Average)
    assert_equal(copies[0], expected[0:2])
    assert_equal(copies[1], expected[0:2])


def check_ops_that_are_pushed_together_see_earlier_results() -> None:
    """Those that share no memory start together."""
    total = everyone((1031,)).sum(axis=0)
    size = hvd.size()
    for outputs, expected in (
        ("aa", [total * size, 0, 0]),
        ("ab", [total, total * size, 0]),
        ("ba", [total, total, 0]),
        ("bac", [total, total, total * size]),
        ("bcaa", [total * size, total, total]),
    ):
        arrays = {name: mine((1031,)) for name in "abc"}
        made = [
            ops.reduction([arrays["a"]], [arrays[output]], f"{place}", op=hvd.Sum)
            for place, output in enumerate(outputs)
        ]
        Batch(made).push()
        for name, right in zip("abc", expected, strict=True):
            if name in outputs:
                assert_equal(arrays[name], right)


def check_a_group_has_each_array_once() -> None:
    array = mine((5,))
    result = hvd.grouped_allreduce_([array, array])[0]
    message = raised(mx.base.MXNetError, result.wait_to_read)
    assert "would overlap in memory: pass every tensor once" in message


def check_what_is_moved_may_be_of_every_dtype() -> None:
    for salt, dtype in enumerate(ALL):
        tensor = mine((4, 3), dtype, salt)
        gathered, copied = hvd.allgather(tensor), hvd.broadcast(tensor, 1)
        exchanged = hvd.alltoall(tensor)
        all_ranks = everyone((4, 3), salt)
        if dtype == "bool":
            all_ranks = all_ranks != 0
        assert gathered.dtype == copied.dtype == exchanged.dtype == tensor.dtype
        assert_equal(gathered, np.concatenate(all_ranks))
        assert_equal(copied, all_ranks[1])
        begin = hvd.rank() * 2
        assert_equal(exchanged, np.concatenate([rows[begin : begin + 2] for rows in all_ranks]))
        assert hvd.broadcast_(tensor, 0) is tensor
        assert_equal(tensor, all_ranks[0])


def check_uneven_rows() -> None:
    rank, size = hvd.rank(), hvd.size()
    rows = [(r * 3 + 1, 2) for r in range(size)]
    gathered = hvd.allgather(mine(rows[rank]))
    assert_equal(gathered, np.concatenate([numbers(rows[r], r) for r in range(size)]))

    splits = [[r + to for to in range(size)] for r in range(size)]
    # One row more than is sent.
    sent = [numbers((sum(splits[r]) + 1, 2), r) for r in range(size)]
    for given in (splits[rank], mx.nd.array(splits[rank], dtype="int32"), np.array(splits[rank])):
        output, received = hvd.alltoall(as_array(sent[rank]), given)
        parts = [np.split(sent[r], np.cumsum(splits[r]))[rank] for r in range(size)]
        assert_equal(output, np.concatenate(parts))
        assert_equal(received, [len(part) for part in parts])
        assert received.dtype == np.int32

    scattered = hvd.reducescatter(mine((5, 3), "int64"), op=hvd.Sum)
    assert_equal(scattered, np.array_split(everyone((5, 3)).sum(axis=0), size)[rank])
    halved = hvd.reducescatter(mine((4,)), prescale_factor=0.5, postscale_factor=4.0)
    assert_equal(halved, np.array_split(everyone((4,)).sum(axis=0), size)[rank])


def check_numpy_arrays_with_scalars_and_empty_ones() -> None:
    rank = hvd.rank()
    with mx.util.np_shape(True):
        scalar = mx.np.array(3.0 + rank)
        total = hvd.allreduce(scalar, op=hvd.Sum)
        assert type(total) is mx.np.ndarray
        assert_equal(total, 7.0)
        rows = mx.np.ones((2 * rank, 3))  # none on rank 0
        assert_equal(hvd.allgather(rows), np.ones((2, 3)))
        assert_equal(hvd.allgather(mx.np.zeros((0, 3))), np.zeros((0, 3)))
        assert_equal(hvd.allreduce_(mx.np.zeros((0,))), np.zeros((0,)))
        assert_equal(hvd.reducescatter(mx.np.ones((1, 2)), op=hvd.Sum), 2 * np.ones((1 - rank, 2)))
        output, received = hvd.alltoall(mx.np.array([5.0, 6.0]) + 2 * rank, [2, 0])
        assert_equal(output, [] if rank else [5, 6, 7, 8])
        assert type(output) is type(received) is mx.np.ndarray


def check_allgather_may_stack() -> None:
    with world_with(PERSEUS_CHANGE_HVD_ALLGATHER=0):
        assert_equal(hvd.allgather(mine((2, 3))), everyone((2, 3)))
        assert_equal(hvd.grouped_allgather([mine((2, 3)), mine((1,), salt=1)])[0], everyone((2, 3)))


def check_ranks_may_run_ops_in_different_orders() -> None:
    names = [f"tensor{i}" for i in range(20)]
    tensors = {name: mine((50,), salt=salt) for salt, name in enumerate(names)}
    for name in names if hvd.rank() == 0 else reversed(names):
        hvd.allreduce_(tensors[name], op=hvd.Sum, name=name, priority=len(name))
    for salt, name in enumerate(names):
        assert_equal(tensors[name], everyone((50,), salt).sum(axis=0))


def check_the_engine_keeps_the_order_of_reads_and_writes() -> None:
    """Without a wait in between, and with arrays that Python forgets at once."""
    tensor = mine((1000,))
    expected = everyone((1000,))
    mean = expected[hvd.rank()]
    for step in range(50):
        tensor += step
        copy = hvd.allreduce(tensor)
        hvd.allreduce_(tensor)
        tensor = tensor + copy - hvd.broadcast(copy, step % 2)
        expected = expected + step
        mean = expected.mean(axis=0)
        expected = np.stack([mean, mean])
    assert_equal(tensor, mean)


def check_arrays_in_a_layout_of_onednn() -> None:
    """An inference-mode forward leaves weights in one; layers' outputs have one, too."""
    rank = hvd.rank()

    def layer() -> mx.gluon.nn.Block:
        made = mx.gluon.nn.Conv2D(16, 3, in_channels=16)
        made.initialize()
        made.weight.set_data(as_array(numbers((16, 16, 3, 3), rank)))
        made.bias.set_data(mx.nd.zeros((16,)))
        return made

    images = mx.nd.ones((2, 16, 8, 8))
    for function in (
        lambda weight: hvd.broadcast_(weight, 1),
        lambda weight: hvd.broadcast(weight, 1),
        lambda weight: hvd.allgather(weight)[16:],
    ):
        made = layer()
        output = made(images)
        assert_equal(function(made.weight.data()), numbers((16, 16, 3, 3), 1))
        local = hvd.allreduce(output, op=hvd.Sum).asnumpy()
        expected = sum(numbers((16, 16, 3, 3), r).sum(axis=(1, 2, 3)) for r in range(2))
        assert_equal(local, np.broadcast_to(expected.reshape(1, 16, 1, 1), (2, 16, 6, 6)))


def check_process_sets() -> None:
    with world_with(HOROVOD_DYNAMIC_PROCESS_SETS=1):
        last = hvd.add_process_set([1])
        both = hvd.allreduce(mine((4,)), op=hvd.Sum, name="x")
        if last.included():
            assert_equal(
                hvd.allreduce(mine((4,)), op=hvd.Sum, name="x", process_set=last), numbers((4,), 1)
            )
            for function in (hvd.reducescatter, hvd.allgather, hvd.alltoall):
                assert_equal(function(mine((4,)), process_set=last), numbers((4,), 1))
            assert_equal(hvd.broadcast(mine((4,)), 1, process_set=last), numbers((4,), 1))
        assert_equal(both, everyone((4,)).sum(axis=0))
        assert hvd.remove_process_set(last)


def check_adasum() -> None:
    """Of orthogonal vectors it is the sum."""
    vector = np.eye(2)[hvd.rank()] * 3
    assert_equal(hvd.allreduce(as_array(vector), op=hvd.Adasum), [3, 3])
    assert ops.Adasum == hvd.Adasum == 2

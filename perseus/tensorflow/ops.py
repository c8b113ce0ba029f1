"""The collectives as ops, on which everything else in perseus.tensorflow is built.

All work eagerly, in tf.function and in v1 graphs, on the CPU. They may run in any order and at the
same time: ranks match them by name. Common arguments:

tensors: a list of tensors, variables or arrays.
name: None makes one. In a graph it is the name of the node, which TensorFlow makes unique there
    (`ignore_name_scope` leaves its scopes out), so ranks must build equal graphs. Eagerly it is
    used as it is; without one, ops are numbered, and all ranks must issue the same ones.
grouped: one op for all tensors, which are ready, executed and finished together.
process_set: the ranks that take part.

dtypes: float16, bfloat16, float32, float64, (u)int8, int16, int32, int64, bool; ops that do not
    reduce also take uint16, of which TensorFlow allows no reductions.
Gradients are registered by perseus.tensorflow.autodiff.
Errors, raised where the result is used: FailedPreconditionError on every rank where ranks disagree
about a tensor (the job goes on), and before init(); UnknownError when the world has broken;
InvalidArgumentError for a name in flight, a foreign process set, bad splits.
Source of behaviour: Horovod 0.28.1, horovod.tensorflow.mpi_ops.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from perseus.arguments import checked_op, checked_root
from perseus.gradients import parameter_check
from perseus.gradients.rotation import restart_turns
from perseus.operations import ReduceOp
from perseus.process_sets import ProcessSet, global_process_set, group_id
from perseus.tensorflow.library import native

Average = ReduceOp.Average
Sum = ReduceOp.Sum
Adasum = ReduceOp.Adasum
Min = ReduceOp.Min
Max = ReduceOp.Max
Product = ReduceOp.Product


def bits(value: float) -> int:
    """A float64 as the integer that represents it in an op's attributes."""
    number: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return number


def real(number: int) -> float:
    """The float64 that bits() made into an integer."""
    value: float = struct.unpack("<d", struct.pack("<q", number))[0]
    return value


def normalize_name(name: str) -> str:
    """The name with everything but letters, digits and underscores made an underscore."""
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)


def naming(word: str, name: str | None, tensors: Sequence[Any], ignore: bool) -> dict[str, Any]:
    """The attributes that decide the name of an op in the core."""
    if tf.executing_eagerly():
        return {"eager": True, "tensor_name": name or ""}
    if name:
        # The characters that a node's name may have.
        node = re.sub(r"[^A-Za-z0-9_.\\/>-]", "_", name).rstrip("/")
        if not re.match("[A-Za-z0-9.]", node):
            node = f"tensor{node}"
    else:
        node = word + "".join(f"_{normalize_name(tensor.name)}" for tensor in tensors[:1])
    return {"name": node, "ignore_name_scope": ignore}


def keep_shapes(results: Iterable[Any], tensors: Iterable[Any]) -> None:
    """Set the results' shapes in a graph; eager results have theirs."""
    if not tf.executing_eagerly():
        for result, tensor in zip(results, tensors, strict=True):
            result.set_shape(tensor.shape)


def _keep_rows(results: Iterable[Any], tensors: Iterable[Any]) -> None:
    """The same for results with another number of rows than the tensors."""
    if not tf.executing_eagerly():
        for result, tensor in zip(results, tensors, strict=True):
            if tensor.shape.rank:
                result.set_shape([None, *tensor.shape[1:]])


def _as_tensors(tensors: Iterable[Any]) -> list[Any]:
    return [tf.convert_to_tensor(tensor) for tensor in tensors]


def _in_parts(
    tensors: list[Any], names: Sequence[str | None] | str | None, grouped: bool
) -> list[tuple[list[Any], str | None]]:
    """(tensors, name) of each op to build."""
    if grouped:
        if names is not None and not isinstance(names, str):
            raise ValueError(f"[tensorflow] a grouped operation has one name, got {names!r}")
        return [(tensors, names)] if tensors else []
    if names is None or isinstance(names, str):
        names = [names] * len(tensors)
    if len(names) != len(tensors) or (len(tensors) > 1 and len({*names}) == 1 and names[0]):
        raise ValueError(f"[tensorflow] {len(tensors)} tensors need a name each, got {names!r}")
    return [([tensor], name) for tensor, name in zip(tensors, names, strict=True)]


def allreduce(
    tensors: Iterable[Any],
    names: Sequence[str | None] | str | None = None,
    *,
    op: int,
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set: ProcessSet = global_process_set,
    gradient_of: int = 0,
    codec: int = 0,
    codec_argument: float = 0.0,
    priority: int = 0,
    learning_rate: Any = None,
    grouped: bool = False,
    ignore_name_scope: bool = False,
    fixed_name: str | None = None,
) -> tuple[list[Any], list[Any] | None]:
    """Reduce each tensor over all ranks: (results, outcomes). Differentiable.

    names: of each op: one for each tensor, or a string for a grouped op or a single tensor.
    op: Average, Sum, Min, Max, Product or Adasum; integers truncate towards zero.
    prescale, postscale: multiplied in before and after.
    gradient_of, codec, codec_argument, priority, learning_rate: as in perseus_request (perseus.h).
        The rate is a scalar, which is read when the op runs; None is not known.
    fixed_name: the name in the core of the only op, whatever the name of its node in a graph; it
        must not be in flight twice.

    outcomes: None unless gradient_of is given, else an int32 scalar of each op (one if grouped), a
    perseus_gradient: 0 reduced; 1 held back, the result means nothing; 2 skipped.
    """
    members = _as_tensors(tensors)
    rates = [] if learning_rate is None else [tf.cast(learning_rate, tf.float64)]
    fixed = {} if fixed_name is None else {"tensor_name": fixed_name}
    results: list[Any] = []
    outcomes: list[Any] = []
    for part, name in _in_parts(members, names, grouped):
        reduced, outcome = native.perseus_allreduce(
            part,
            rates,
            reduce_op=checked_op(op, "tensorflow"),
            outcomes=1 if gradient_of else 0,
            prescale=bits(prescale),
            postscale=bits(postscale),
            process_set_id=group_id(process_set),
            gradient_of=gradient_of,
            codec=codec,
            codec_argument=bits(codec_argument),
            priority=priority,
            grouped=grouped,
            **{**naming("HorovodAllreduce", name, part, ignore_name_scope), **fixed},
        )
        keep_shapes(reduced, part)
        if not tf.executing_eagerly():
            for number in outcome:
                number.set_shape(())
        results += reduced
        outcomes += outcome
    return results, outcomes if gradient_of else None


def allgather(
    tensors: Iterable[Any],
    names: Sequence[str | None] | str | None = None,
    *,
    process_set: ProcessSet = global_process_set,
    gradient_of: int = 0,
    grouped: bool = False,
    ignore_name_scope: bool = False,
) -> list[Any]:
    """Join the tensors of all ranks along dimension 0, in rank order. Differentiable.

    Only the first dimension may differ across ranks, and be 0.
    """
    results: list[Any] = []
    for part, name in _in_parts(_as_tensors(tensors), names, grouped):
        gathered = native.perseus_allgather(
            part,
            process_set_id=group_id(process_set),
            gradient_of=gradient_of,
            grouped=grouped,
            **naming("HorovodAllgather", name, part, ignore_name_scope),
        )
        _keep_rows(gathered, part)
        results += gathered
    return results


def broadcast(
    tensors: Iterable[Any],
    root_rank: int,
    names: Sequence[str | None] | str | None = None,
    *,
    process_set: ProcessSet = global_process_set,
    grouped: bool = False,
    ignore_name_scope: bool = False,
) -> list[Any]:
    """Copies of the root's tensors, whose shapes are equal on all ranks. Differentiable.

    root_rank: a global rank, also inside a process set.
    """
    results: list[Any] = []
    for part, name in _in_parts(_as_tensors(tensors), names, grouped):
        copied = native.perseus_broadcast(
            part,
            root_rank=checked_root(root_rank, "tensorflow"),
            process_set_id=group_id(process_set),
            grouped=grouped,
            **naming("HorovodBroadcast", name, part, ignore_name_scope),
        )
        keep_shapes(copied, part)
        results += copied
    return results


def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    *,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Overwrite variables with the root's, as one operation; returns the assignments' results.

    variables: of one or several kinds (resource, reference, Keras'), all with `assign`.
    """
    values = broadcast(variables, root_rank, name, process_set=process_set, grouped=True)
    return [variable.assign(value) for variable, value in zip(variables, values, strict=True)]


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    *,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> tuple[Any, Any]:
    """Send each rank a part of the rows and join what comes: (output, received_splits).

    splits: int32 rows for each rank of the set; their sum may be less than the first dimension, the
    tail is not sent. None: equal parts. received_splits: int32, the rows that came from each rank.
    Differentiable in `tensor`.
    """
    tensor = tf.convert_to_tensor(tensor)
    rows = tf.convert_to_tensor([] if splits is None else splits, dtype=_splits_dtype(splits))
    output, received = native.perseus_alltoall(
        tensor,
        rows,
        with_splits=splits is not None,
        process_set_id=group_id(process_set),
        **naming("HorovodAlltoall", name, [tensor], ignore_name_scope),
    )
    _keep_rows([output], [tensor])
    if not tf.executing_eagerly():
        received.set_shape([None])
    return output, received


def _splits_dtype(splits: Any) -> Any:
    """int32 for a list or array, whose width means nothing; a tensor's own dtype."""
    if tf.is_tensor(splits) and splits.dtype != tf.int32:
        raise ValueError("alltoall expects splits to contain 32-bit integer elements")
    return tf.int32


def reducescatter(
    tensors: Iterable[Any],
    names: Sequence[str | None] | str | None = None,
    *,
    op: int,
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set: ProcessSet = global_process_set,
    grouped: bool = False,
    ignore_name_scope: bool = False,
) -> list[Any]:
    """Reduce each tensor and give each rank a part of its rows. Differentiable.

    Of the d rows rank r of n gets d // n, plus one if r < d % n. op: Average or Sum.
    """
    results: list[Any] = []
    for part, name in _in_parts(_as_tensors(tensors), names, grouped):
        scattered = native.perseus_reducescatter(
            part,
            reduce_op=checked_op(op, "tensorflow"),
            prescale=bits(prescale),
            postscale=bits(postscale),
            process_set_id=group_id(process_set),
            grouped=grouped,
            **naming("HorovodReducescatter", name, part, ignore_name_scope),
        )
        _keep_rows(scattered, part)
        results += scattered
    return results


def join() -> Any:
    """Announce that this rank has no more data; the result is the rank that joined last, an int32.

    Runs until all ranks have done so. Meanwhile this rank contributes zeros to the others'
    allreduces; their other collectives fail. Members of other process sets wait for this rank.
    """
    last = _scalar(native.perseus_join(eager=tf.executing_eagerly()))
    if tf.executing_eagerly():
        parameter_check.restart_all()
        restart_turns()
    return last


def _scalar(number: Any) -> Any:
    if not tf.executing_eagerly():
        number.set_shape(())
    return number


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """The number of ranks in a process set when the op runs, an int32 scalar like those below."""
    return _scalar(native.perseus_size(process_set_id=process_set_id, name=name))


def rank_op(name: str | None = None) -> Any:
    """This process's number, 0 … size - 1."""
    return index_op(0, name)


def index_op(process_set_id: int, name: str | None = None) -> Any:
    """This process's index in a process set; the set's size if it is not a member."""
    return _scalar(native.perseus_rank(process_set_id=process_set_id, name=name))


def local_size_op(name: str | None = None) -> Any:
    """The number of ranks on this host."""
    return _scalar(native.perseus_local_size(name=name))


def local_rank_op(name: str | None = None) -> Any:
    """This process's number among the ranks of its host."""
    return _scalar(native.perseus_local_rank(name=name))


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """1 if this process is in the process set, else 0."""
    return _scalar(native.perseus_process_set_included(process_set_id=process_set_id, name=name))

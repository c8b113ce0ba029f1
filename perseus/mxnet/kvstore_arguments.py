"""The arguments of a KVStore's methods: keys and arrays, single or in lists. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from numbers import Integral
from typing import Any

import mxnet as mx
import numpy as np

Key = int | str


class PerseusOp(IntEnum):
    """How `push` combines the ranks' values; the numbers are Horovod's."""

    Sum = 1
    Min = 3
    Max = 4


def pairs(key: Any, value: Any) -> list[tuple[Key, list[Any]]]:
    """Each key with its arrays, the caller's own objects; those of a repeated key are joined.

    key: int, str or a list of them. value: an array or a list of arrays; with a list of keys a list
    of these. TypeError for anything else, ValueError for lists of different lengths.
    """
    if not isinstance(key, list | tuple):
        return [(_checked(key), _arrays(key, value))]
    _check_length(key, value, "values")
    found: dict[Key, list[Any]] = {}
    for each, given in zip(key, value, strict=True):
        found.setdefault(_checked(each), []).extend(_arrays(each, given))
    return list(found.items())


def single_pairs(key: Any, value: Any) -> Iterator[tuple[Key, Any]]:
    """Each key with its only array; ValueError if it has several. The rest as in pairs()."""
    for each, given in pairs(key, value):
        if len(given) != 1:
            raise ValueError(f"[kvstore] init of {each!r}: expected one array, got {len(given)}")
        yield each, given[0]


def share_arrays(given: Sequence[tuple[Key, Sequence[Any]]]) -> bool:
    """Whether several of these keys have an array in common, as the same object."""
    arrays = [each for _, of_key in given for each in {id(array) for array in of_key}]
    return len(set(arrays)) < len(arrays)


def with_rows(key: Any, out: Any, row_ids: Any) -> Iterator[tuple[Key, Any, Any]]:
    """(key, array, its row numbers) for every array of `out`; row numbers may serve a whole list.

    A list of one key, too, may have its row numbers without a list. The rest as in pairs().
    """
    if isinstance(key, list | tuple):
        if len(key) == 1 and isinstance(row_ids, mx.nd.NDArray):
            row_ids = [row_ids]
        _check_length(key, out, "values")
        _check_length(key, row_ids, "row_ids")
        for each in zip(key, out, row_ids, strict=True):
            yield from with_rows(*each)
        return
    outs, rows = _arrays(key, out), _arrays(key, row_ids)
    if len(rows) == 1:
        rows *= len(outs)
    if len(rows) != len(outs):
        raise ValueError(
            f"[kvstore] {len(rows)} row_ids for {len(outs)} arrays of {key!r}: give one for each, "
            f"or one for all"
        )
    for array, numbers in zip(outs, rows, strict=True):
        yield _checked(key), array, numbers


def checked_op(op: int) -> PerseusOp:
    """The op as a PerseusOp; ValueError if there is none."""
    try:
        return PerseusOp(op)
    except ValueError:
        given = int(op) if isinstance(op, int) else op  # the number, not the repr of an IntEnum
        raise ValueError(
            f"[kvstore] push with op={given!r}: expected PerseusOp.Sum, PerseusOp.Max or "
            "PerseusOp.Min"
        ) from None


def check_shape(key: Key, array: Any, held: Any, what: str) -> None:
    """ValueError if an array does not match the stored value; what: the method."""
    if array.shape != held.shape:
        raise ValueError(
            f"[kvstore] {what} of {key!r}: an array of shape {array.shape}, but it was initialised "
            f"with {held.shape}"
        )


def check_pushed(key: Key, given: Sequence[Any], held: Any, op: PerseusOp) -> None:
    """ValueError if the arrays of a push cannot be combined into the stored value."""
    for array in given:
        check_shape(key, array, held, "push")
        if array.dtype != held.dtype:
            raise ValueError(
                f"[kvstore] push of {key!r}: {np.dtype(array.dtype)}, but it was initialised as "
                f"{np.dtype(held.dtype)}"
            )
    kinds = {array.stype for array in given}
    if kinds != {"default"} and (kinds != {"row_sparse"} or op != PerseusOp.Sum):
        raise ValueError(
            f"[kvstore] push of {key!r}: sparse arrays are row-sparse on all devices and can only "
            f"be summed; others become dense by tostype('default')"
        )


def alike(array: Any, held: Any) -> bool:
    """Whether one array can take the place of the other as an output."""
    return bool(array.stype == held.stype == "default" and array.context == held.context)


def _checked(key: Any) -> Key:
    if isinstance(key, str):
        return key
    if isinstance(key, Integral) and not isinstance(key, bool):
        return int(key)
    raise TypeError(f"[kvstore] a key is an int or a string, not {key!r}")


def _check_length(keys: Sequence[Any], given: Any, what: str) -> None:
    got = len(given) if isinstance(given, list | tuple) else type(given).__name__
    if got != len(keys):
        raise ValueError(
            f"[kvstore] {len(keys)} keys: expected a list of as many {what}, got {got}"
        )


def _arrays(key: Any, value: Any) -> list[Any]:
    given = value if isinstance(value, list | tuple) else [value]
    if not given or not all(isinstance(array, mx.nd.NDArray) for array in given):
        raise TypeError(
            f"[kvstore] key {key!r}: expected an NDArray or a list of them, not {value!r}"
        )
    return list(given)

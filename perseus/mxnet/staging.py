"""Arrays on GPUs, which the core gets as copies in host memory.

MXNet's engine makes the copies and knows their order, so nobody waits for a GPU here. An array that
is on a CPU is its own copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perseus.mxnet.library import mxnet


def is_elsewhere(array: Any) -> bool:
    """Whether the core cannot reach an array's memory."""
    return bool(array.ctx.device_type == "gpu")


def host_context(array: Any) -> Any:
    """Where an array's copy lies: in memory that is page-locked for its GPU, and for no other."""
    return mxnet.Context("cpu_pinned", array.ctx.device_id)


def empty(like: Any, shape: tuple[int, ...] | None = None, context: Any = None) -> Any:
    """A new array of the class, dtype and (unless given) shape and context of another one."""
    handle = mxnet.nd.ndarray._new_alloc_handle(
        like.shape if shape is None else shape,
        like.ctx if context is None else context,
        False,
        like.dtype,
    )
    return type(like)(handle)


class Staging:
    """The copies of an op's inputs and outputs. An output that is an input has the same copy."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        self.inputs = [self._copy_of(array) for array in inputs]
        self._loads = _differing(inputs, self.inputs)
        self._given = list(inputs)
        self._stores: list[tuple[Any, Any]] = []

    def outputs(self, outputs: Sequence[Any]) -> list[Any]:
        """The copies of the outputs, which store() writes back."""
        same = {id(given): here for given, here in zip(self._given, self.inputs, strict=True)}
        copies = [
            same[id(array)] if id(array) in same else self._copy_of(array) for array in outputs
        ]
        self._stores = _differing(copies, outputs)
        return copies

    def loaded(self) -> set[int]:
        """The arrays that load() copies, by id()."""
        return {id(array) for array, _ in self._loads}

    def stored(self) -> set[int]:
        """The arrays that store() copies to, by id()."""
        return {id(array) for _, array in self._stores}

    def load(self) -> None:
        """Copy the inputs, before the op is pushed."""
        _copy(self._loads)

    def store(self) -> None:
        """Copy the outputs back, once the op has been pushed."""
        _copy(self._stores)

    @staticmethod
    def _copy_of(array: Any) -> Any:
        return empty(array, context=host_context(array)) if is_elsewhere(array) else array


def _differing(sources: Sequence[Any], targets: Sequence[Any]) -> list[tuple[Any, Any]]:
    pairs = zip(sources, targets, strict=True)
    return [(source, target) for source, target in pairs if source is not target]


def _copy(pairs: Sequence[tuple[Any, Any]]) -> None:
    if pairs:
        with mxnet.autograd.pause():  # an op on the CPU is not recorded either
            for source, target in pairs:
                source.copyto(target)


def moved(array: Any, like: Any) -> Any:
    """Return an array, or its copy where another one is."""
    if array.ctx == like.ctx:
        return array
    with mxnet.autograd.pause():
        return array.as_in_context(like.ctx)

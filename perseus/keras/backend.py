"""Serves the framework on which Keras runs; the module of each framework holds what differs.

It is chosen at import, as Keras does it. Stateless.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from perseus.compression import Compressor
from perseus.gradients.parameter_check import ParameterCheck
from perseus.gradients.plan import Plan
from perseus.gradients.scopes import Scope
from perseus.keras.library import KERAS_2, keras
from perseus.process_sets import ProcessSet

F = TypeVar("F", bound=Callable[..., Any])


class BackendReducer(Protocol):
    """Reduces the gradients of one optimizer. It is also a Reducer.

    residuals: keyed by the variable's number, which precedes the slash in a bundle's first name: a
    loaded model may name its variables differently.
    """

    def before_backward(
        self, variables: Sequence[Any], names: Sequence[str], rate_of: Callable[[], Any]
    ) -> None:
        """Backward comes next, then reduce(); reductions may begin during backward.

        variables: the optimizer's, always the same; each gradient is reduced alone, under its name.
        rate_of: returns the `learning_rate` of reduce().
        """

    def reduce(
        self,
        gradients: Sequence[Any],
        names: Sequence[str],
        bundles: Sequence[Sequence[int]],
        learning_rate: Any,
    ) -> tuple[list[Any], Any]:
        """Reduce gradients over all ranks; none of them is None.

        names: match gradients across ranks. bundles: the positions that form one operation; every
        position occurs once. learning_rate: a scalar tensor, or None if it is not known; see
        perseus_request. Returns the reductions, and whether they may be applied: None means always,
        else it is a bool or a boolean tensor, equal on all ranks.
        """

    def take_turn(self, name: str, variables: Sequence[Any]) -> None:
        """Average parameters if the compression does that: see perseus.gradients.turns.

        A collective, once per step that is applied. name: of the first variable's gradient.
        variables: those that have gradients.
        """


class Backend(Protocol):
    """What every framework's module has. Tensors are the framework's, variables are Keras's."""

    Compression: Any
    Average: int
    Sum: int
    Adasum: int

    def uncompiled(self, function: F) -> F:
        """Return a function that the framework runs as it is within what it compiles."""

    def make_reducer(self, scope: Scope, plan: Plan) -> BackendReducer:
        """scope: its prefix begins all names."""

    def compared(
        self,
        check: ParameterCheck,
        names: Sequence[str],
        variables: Sequence[Any],
        gradients: Sequence[Any],
    ) -> list[Any]:
        """The gradients, after a comparison of their variables over all ranks, if due."""

    def dense(self, gradient: Any) -> Any:
        """A gradient as a dense tensor."""

    def zeros_like(self, variable: Any) -> Any:
        """A gradient of zeros."""

    def outside_functions(self) -> AbstractContextManager[Any]:
        """A context in which variables are created at once, not in the function being traced."""

    def divided_by_size(self, gradient: Any, process_set: ProcessSet) -> Any:
        """Return a gradient, dense or sparse, divided by the number of ranks."""

    def everywhere(self, flag: Any, name: str, process_set: ProcessSet) -> Any:
        """Whether a scalar boolean tensor is true on all ranks that have not joined."""

    def maximum(self, values: Any, name: str, process_set: ProcessSet) -> Any:
        """The maxima of a float32 vector over all ranks."""

    def average(self, values: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
        """The mean of a float64 vector over all ranks."""

    def broadcast_variables(self, variables: Sequence[Any], root_rank: int, prefix: str) -> None:
        """Give variables the root's values; prefix: their names begin with it."""

    def broadcast_global_variables(self, root_rank: int) -> Any:
        """Give all of TensorFlow 1's global variables the root's values."""

    def broadcast_object(self, obj: Any, root_rank: int, name: str) -> Any:
        """The root's object on every rank."""

    def run(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """The decorator of elastic training."""

    def allreduce(  # noqa: PLR0917 - all are given
        self,
        value: Any,
        name: str | None,
        op: int,
        prescale_factor: float,
        postscale_factor: float,
        compression: type[Compressor],
    ) -> Any:
        """Return the reduction of a tensor-like value."""

    def allgather(self, value: Any, name: str | None) -> Any:
        """All ranks' values, concatenated along the first axis."""

    def broadcast(self, value: Any, root_rank: int, name: str | None) -> Any:
        """The root's value."""

    def reducescatter(self, value: Any, name: str | None, op: int) -> Any:
        """This rank's part of the reduction, along the first axis."""


def _choose() -> Backend:
    name = "tensorflow" if KERAS_2 else keras.backend.backend()
    if name == "torch":
        from perseus.keras import torch_backend

        return cast(Backend, torch_backend)
    if name == "tensorflow":
        from perseus.keras import tensorflow_backend

        return cast(Backend, tensorflow_backend)
    raise ImportError(
        f"[keras] Keras runs on {name}; Perseus serves its backends tensorflow and torch: set "
        f"KERAS_BACKEND to one of them"
    )


backend = _choose()

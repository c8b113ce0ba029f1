"""Keras on PyTorch: reductions by perseus.torch. Stateless; see perseus.keras.backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from perseus import basics
from perseus.compression import SETTINGS, Compressor, inside
from perseus.failures import Failures
from perseus.gradients.handle_reducer import HandleReducer, Reduction
from perseus.gradients.parameter_check import ParameterCheck
from perseus.gradients.plan import Plan
from perseus.gradients.rotation import parts_of
from perseus.gradients.scopes import Scope
from perseus.keras.torch_overlap import Overlap, uncompiled
from perseus.process_sets import ProcessSet
from perseus.torch import data_movement, functions, gather, reductions, scatter
from perseus.torch.compression import Compression
from perseus.torch.elastic import run
from perseus.torch.gradient_memory import is_shared
from perseus.torch.rotation import TorchRotation
from perseus.torch.session import Adasum, Average, Max, Sum, session

__all__ = ["Adasum", "Average", "Compression", "Sum", "run", "uncompiled"]

_WITHOUT_RESIDUALS = (0, 5)  # of PERSEUS_ALLREDUCE_CODEC: dtype and lossless


class _Reducer(HandleReducer):
    """See BackendReducer. Sparse gradients are made dense; dense ones are reduced in place."""

    def __init__(self, scope: Scope, plan: Plan) -> None:
        self._parts = parts_of(plan)
        if self._parts > 1:
            plan = replace(plan, compression=inside(self._parts))
        super().__init__(plan, session)
        self._scope = scope
        self._rate = 0.0  # of the step that is being taken; see perseus_request
        self._rotations: dict[tuple[Any, ...], TorchRotation] = {}
        self._overlap = Overlap(self._begin)

    def before_backward(
        self, variables: Sequence[Any], names: Sequence[str], rate_of: Callable[[], Any]
    ) -> None:
        """See BackendReducer."""
        # A gradient that the script changes afterwards is reduced again, as its optimizer expects,
        # unless it is changed through `.data`; see Overlap. That is not possible where the core has
        # already added the first one to what it keeps.
        keeps = basics.may_withhold_gradients() or _keeps_residuals(self.plan.compression)
        if self.plan.compression.in_core and not keeps:
            self._rate = _number(rate_of())
            self._overlap.announce([variable.value for variable in variables], names)

    def reduce(
        self,
        gradients: Sequence[Any],
        names: Sequence[str],
        bundles: Sequence[Sequence[int]],
        learning_rate: Any,
    ) -> tuple[list[torch.Tensor], bool]:
        """See BackendReducer."""
        self._rate = _number(learning_rate)
        gradients = [_tensor(gradient) for gradient in gradients]
        tensors = [_reducible(gradient) for gradient in gradients]
        reductions: list[Reduction] = []
        failures = Failures()
        try:
            for bundle in bundles:
                name, first = names[bundle[0]], gradients[bundle[0]]
                reducible = [tensors[index] for index in bundle]
                reductions.append(self._overlap.take(name, first, reducible))
        except Exception as error:
            failures.add(error)
        applies = self.finish(reductions, failures)
        failures.raise_first()
        for bundle, reduction in zip(bundles, reductions, strict=True):
            for index, result in zip(bundle, reduction.gradients, strict=True):
                tensors[index] = result
        return tensors, applies

    def take_turn(self, name: str, variables: Sequence[Any]) -> None:
        """See BackendReducer."""
        if self._parts == 1:
            return
        whole = f"{self._scope.prefix()}/{name}"
        values = [variable.value for variable in variables]
        key = whole, *map(id, values)  # calls may train parts of a model in turn, as in a GAN
        if key not in self._rotations:
            made = TorchRotation(values, whole, self.plan.process_set, self._parts)
            self._rotations[key] = made
        self._rotations[key].take_turn()

    def begin_world(self) -> None:
        """See HandleReducer."""
        self._overlap.forget()

    def _begin(self, name: str, tensors: list[torch.Tensor]) -> Reduction:
        reduction = Reduction(f"{self._scope.prefix()}/{name}", key=name.partition("/")[0])
        self.residuals.know(reduction.key, reduction.name, len(tensors) > 1)
        self.begin(reduction, tensors, self._rate)
        return reduction


def _keeps_residuals(compression: type[Compressor]) -> bool:
    """Return whether the core may add a part of each gradient to the next one."""
    if compression.codec != SETTINGS:
        return compression.stateful
    codec = basics.setting("PERSEUS_ALLREDUCE_CODEC")
    return codec not in _WITHOUT_RESIDUALS or basics.setting("LIGHT_TOPK_ALLREDUCE") > 0


def _number(rate: torch.Tensor | None) -> float:
    """Return a learning rate as perseus_request takes it."""
    return 0.0 if rate is None else float(rate)


def make_reducer(scope: Scope, plan: Plan) -> _Reducer:
    """See Backend."""
    return _Reducer(scope, plan)


def compared(
    check: ParameterCheck,
    names: Sequence[str],
    variables: Sequence[Any],
    gradients: Sequence[Any],
) -> list[Any]:
    """See Backend."""
    if check.due():
        values = [functions.buffer_of(variable.value) for variable in variables]
        check.compare(zip(names, values, strict=True))
    return list(gradients)


def dense(gradient: Any) -> torch.Tensor:
    """See Backend."""
    tensor = _tensor(gradient)
    return tensor.to_dense() if tensor.layout != torch.strided else tensor


def _tensor(gradient: Any) -> torch.Tensor:
    """Return a gradient; if a script gives an array, as some optimizers take it, return a copy."""
    return gradient if isinstance(gradient, torch.Tensor) else torch.tensor(gradient)


def _reducible(gradient: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor that can be reduced in place: a copy if others use the memory."""
    if gradient.layout != torch.strided:
        return gradient.to_dense()
    return (gradient.clone() if is_shared(gradient) else gradient).detach().contiguous()


def zeros_like(variable: Any) -> torch.Tensor:
    """See Backend."""
    return torch.zeros_like(variable.value, requires_grad=False)


def outside_functions() -> AbstractContextManager[None]:
    """See Backend."""
    return nullcontext()


def divided_by_size(gradient: torch.Tensor, process_set: ProcessSet) -> torch.Tensor:
    """See Backend."""
    return gradient / (process_set.size() or 1)


def everywhere(flag: torch.Tensor, name: str, process_set: ProcessSet) -> torch.Tensor:
    """See Backend."""
    # The maximum of the opposite, since a rank that has joined gives zeros.
    number = flag.logical_not().to(torch.int32).cpu()
    return reductions.allreduce(number, name=name, op=Max, process_set=process_set) == 0


def maximum(values: torch.Tensor, name: str, process_set: ProcessSet) -> torch.Tensor:
    """See Backend."""
    return reductions.allreduce(values.detach(), name=name, op=Max, process_set=process_set)


def average(values: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
    """See Backend."""
    mean = reductions.allreduce(torch.from_numpy(values), name=name, op=Average)
    return np.asarray(mean)


def broadcast_variables(variables: Sequence[Any], root_rank: int, prefix: str) -> None:
    """See Backend."""
    named = [(f"{prefix}.{i}", variable.value.detach()) for i, variable in enumerate(variables)]
    functions.broadcast_parameters(named, root_rank)


def broadcast_global_variables(root_rank: int) -> None:
    """Raise RuntimeError, because only TensorFlow has a list of all variables."""
    raise RuntimeError(
        "[keras] the torch backend knows no global variables: use "
        "hvd.callbacks.BroadcastGlobalVariablesCallback"
    )


def broadcast_object(obj: Any, root_rank: int, name: str) -> Any:
    """See Backend."""
    return functions.broadcast_object(obj, root_rank, name)


def allreduce(  # noqa: PLR0917 - the caller passes all of them
    value: Any,
    name: str | None,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    compression: type[Compressor],
) -> torch.Tensor:
    """See Backend."""
    tensor = torch.as_tensor(value)
    return reductions.allreduce(
        tensor, None, name, compression, op, prescale_factor, postscale_factor
    )


def allgather(value: Any, name: str | None) -> torch.Tensor:
    """See Backend."""
    return gather.allgather(torch.as_tensor(value), name)


def broadcast(value: Any, root_rank: int, name: str | None) -> torch.Tensor:
    """See Backend."""
    return data_movement.broadcast(torch.as_tensor(value), root_rank, name)


def reducescatter(value: Any, name: str | None, op: int) -> torch.Tensor:
    """See Backend."""
    return scatter.reducescatter(torch.as_tensor(value), name=name, op=op)

"""Gradients on their way: hooks start reductions during backward, one wait ends all of them.

Belongs to the thread that steps the optimizer; hooks may run in autograd's threads, one at a time
for each parameter.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from perseus import basics
from perseus.failures import Failures
from perseus.gradients.arguments import check_sparse
from perseus.gradients.bundles import bundles
from perseus.gradients.plan import Plan
from perseus.gradients.reducer import Reducer
from perseus.memory import keep_freed_memory
from perseus.torch.functions import broadcast_object
from perseus.torch.session import ALLREDUCE, session, synchronize
from perseus.torch.sparse import empty_like, start_sparse_allreduce

_TOO_MANY = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). "
    "Increase backward_passes_per_step to accumulate gradients locally."
)


_POLL_SECONDS = 0.001


class _Bundle:
    """Gradients that are reduced by one operation: one parameter, or a group of them."""

    __slots__ = (
        "contexts", "dense", "grouped", "handle", "name", "parameters", "passes_left", "sent",
        "sparse", "waiting",
    )  # fmt: skip

    def __init__(self, name: str, parameters: list[torch.Tensor]) -> None:
        self.name = name
        self.parameters = parameters
        self.grouped = len(parameters) > 1
        self.passes_left: list[int] = []  # of each parameter, until its gradient is complete
        self.waiting = 0  # parameters whose gradient is not complete
        self.handle = 0  # of the dense gradients; 0 = not started
        # Under way; the function waits, and returns None for what is not to be applied.
        self.sparse: list[tuple[torch.Tensor, Callable[[], torch.Tensor | None]]] = []
        self.dense: list[torch.Tensor] = []  # gradients that are reduced in place
        self.sent: list[torch.Tensor] = []
        self.contexts: list[Any] = []

    def started(self) -> bool:
        return self.handle != 0 or bool(self.sparse)


class GradientReducer(Reducer):
    """Reduces the gradients of some parameters, once per step.

    parameters: those that take part; none at all makes every method a no-op.
    names: of these at least, equal on all ranks.
    passes: backward passes that complete a gradient.
    """

    def __init__(
        self,
        parameters: list[torch.Tensor],
        names: dict[torch.Tensor, str],
        plan: Plan,
        passes: int,
    ) -> None:
        super().__init__(plan)
        self.names = names
        self.passes = passes
        self._bundles = _make_bundles(parameters, names, plan)
        self._plain = plan.compression.in_core
        self._prescale = plan.prescale
        self._postscale = plan.postscale
        self._sparse_dims: dict[torch.Tensor, int] = {}  # of parameters with sparse gradients
        for bundle in self._bundles:
            self.residuals.know(bundle.name, bundle.name, bundle.grouped)
        # Whether what was waited for last may be applied: it is neither part of a sum nor a NaN.
        self.applies = True
        self.reset()
        for bundle in self._bundles:
            for index, parameter in enumerate(bundle.parameters):
                _attach(self, bundle, index, parameter)
        _living.add(self)
        if parameters:
            keep_freed_memory()

    def reset(self) -> None:
        """Count backward passes from the start again."""
        for bundle in self._bundles:
            bundle.passes_left = [self.passes] * len(bundle.parameters)
            bundle.waiting = len(bundle.parameters)

    def wait(self) -> None:
        """Return once all that was started has ended; it is still to be finished."""
        for bundle in self._bundles:
            while bundle.handle != 0 and not session.poll(bundle.handle):
                time.sleep(_POLL_SECONDS)

    def busy(self) -> bool:
        """Whether a reduction was started and not waited for."""
        return any(bundle.started() for bundle in self._bundles)

    def forget_started(self) -> None:
        """Drop reductions without waiting: they belong to a world that is gone."""
        for bundle in self._bundles:
            bundle.handle = 0
            bundle.sent = bundle.contexts = []
        self.reset()

    def on_gradient(self, bundle: _Bundle, index: int) -> None:
        """A backward pass has added to a gradient."""
        left = bundle.passes_left[index] - 1
        if left < 0:
            raise AssertionError(_TOO_MANY)
        bundle.passes_left[index] = left
        if left == 0:
            bundle.waiting -= 1
            if bundle.waiting == 0:
                self._start(bundle)

    def synchronize(self) -> None:
        """Start what is missing, wait for all, write the results into p.grad."""
        for bundle in self._bundles:
            if not bundle.started():
                self._start(bundle)
        self.finish_started()

    def finish_started(self) -> None:
        """Wait for what was started; raise what failed after all have ended; see Failures."""
        failures = Failures()
        self.applies = True
        for bundle in self._bundles:
            try:
                if bundle.handle != 0:
                    if synchronize(bundle.handle) is None:
                        self.applies = False
                    elif not self._plain:
                        self._write_back(bundle)
            except Exception as error:
                failures.add(error)
            for parameter, finish in bundle.sparse:
                try:
                    result = finish()
                    if result is None:
                        self.applies = False
                    elif parameter.grad is not None:
                        parameter.grad.data = result
                except Exception as error:
                    failures.add(error)
            bundle.handle = 0
            bundle.dense = bundle.sent = bundle.contexts = []
            bundle.sparse = []
        self.reset()
        failures.raise_first()

    def _start(self, bundle: _Bundle) -> None:
        gradients = [self._gradient(bundle, parameter) for parameter in bundle.parameters]
        for gradient in gradients:  # any() over a generator costs 0.3 µs
            if gradient.is_sparse:
                gradients = self._start_sparse(bundle, gradients)
                break
        bundle.dense = gradients
        if not self._plain:
            pairs = [self.plan.compression.compress(gradient) for gradient in gradients]
            gradients = bundle.sent = [tensor for tensor, _ in pairs]
            bundle.contexts = [context for _, context in pairs]
        if not gradients:
            return
        tensors = gradients[0] if len(gradients) == 1 else tuple(gradients)
        if self.residuals.waiting:
            self.residuals.hand_over(bundle.name)
        bundle.handle = session.submit(
            ALLREDUCE, bundle.name, tensors, tensors, op=self.plan.op, prescale=self._prescale,
            postscale=self._postscale, group=self.plan.process_set.process_set_id,
            gradient_of=self.number, codec=self.plan.compression.codec,
            codec_argument=self.plan.compression.argument,
        )  # fmt: skip

    def _gradient(self, bundle: _Bundle, parameter: torch.Tensor) -> torch.Tensor:
        gradient = parameter.grad
        if gradient is None:
            if parameter in self._sparse_dims:
                gradient = empty_like(parameter, self._sparse_dims[parameter])
            else:
                gradient = torch.zeros_like(parameter)
            parameter.grad = gradient
        if gradient.is_sparse and self.plan.sparse_as_dense:
            dims = self._sparse_dims[parameter] = gradient.sparse_dim()
            dense = gradient.to_dense()
            # Sparse again afterwards: some optimizers take nothing else.
            bundle.sparse.append((parameter, lambda: dense.to_sparse(dims)))
            gradient = dense
        return gradient

    def _start_sparse(self, bundle: _Bundle, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Start the sparse ones, each by itself; returns the others."""
        plan = self.plan
        for parameter, gradient in zip(bundle.parameters, gradients, strict=True):
            if gradient.is_sparse:
                check_sparse(self.names[parameter], "torch")
                self._sparse_dims[parameter] = gradient.sparse_dim()
                finish = start_sparse_allreduce(
                    gradient, self.names[parameter], plan.op, plan.process_set, plan.compression,
                    gradient_of=self.number,
                )  # fmt: skip
                bundle.sparse.append((parameter, finish))
        return [gradient for gradient in gradients if not gradient.is_sparse]

    def _write_back(self, bundle: _Bundle) -> None:
        for gradient, tensor, context in zip(
            bundle.dense, bundle.sent, bundle.contexts, strict=True
        ):
            result = self.plan.compression.decompress(tensor, context)
            if result is not gradient:
                gradient.copy_(result)


_living: weakref.WeakSet[GradientReducer] = weakref.WeakSet()


def _begin_world() -> None:
    # Handles are numbered anew in every world.
    for reducer in _living:
        reducer.forget_started()


basics.at_init(_begin_world)


def _attach(reducer: GradientReducer, bundle: _Bundle, index: int, parameter: torch.Tensor) -> None:
    """Set a hook that does not keep the reducer alive: models outlive their optimizers."""
    reference = weakref.ref(reducer)

    def hook(_: torch.Tensor) -> None:
        living = reference()
        if living is not None:
            living.on_gradient(bundle, index)

    registration = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    weakref.finalize(reducer, registration.remove).atexit = False


def _make_bundles(
    parameters: list[torch.Tensor], names: dict[torch.Tensor, str], plan: Plan
) -> list[_Bundle]:
    if plan.groups is None or not parameters:
        return [_Bundle(names[p], [p]) for p in parameters]
    ordered = _in_root_order(parameters, names, plan)
    groups = plan.groups
    if not isinstance(groups, int):
        groups = [[id(p) for p in group] for group in groups]
    found = bundles([id(p) for p in ordered], groups)
    return [_Bundle(names[ordered[b[0]]], [ordered[i] for i in b]) for b in found]


def _in_root_order(
    parameters: list[torch.Tensor], names: dict[torch.Tensor, str], plan: Plan
) -> list[torch.Tensor]:
    """The parameters in the order of the set's first rank: groups must be equal everywhere."""
    by_name = {names[p]: p for p in parameters}
    ranks = plan.process_set.ranks
    of_root = broadcast_object(
        list(by_name), ranks[0] if ranks else 0, "parameter_names", plan.process_set
    )
    if set(of_root) != set(by_name):
        different = sorted(set(of_root) ^ set(by_name))
        raise ValueError(
            f"[torch] groups need the same parameters on all ranks; not everywhere: "
            f"{', '.join(different[:5])}"
        )
    return [by_name[name] for name in of_root]

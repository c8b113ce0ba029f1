"""DistributedOptimizer: averages gradients over all ranks while backward is still running.

Source of behaviour: Horovod 0.28.1, horovod.torch.optimizer.
"""
# ruff: noqa: PLR0917 - the signatures are Horovod's

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch

from perseus import basics
from perseus.compression import Compressor
from perseus.errors import HorovodInternalError, MismatchError
from perseus.gradients.arguments import (
    check_adasum_of_steps,
    checked_groups,
    checked_passes,
    checked_reduction,
    not_an_optimizer,
    wrapped_twice,
)
from perseus.gradients.parameter_check import ParameterCheck
from perseus.gradients.participation import alone
from perseus.gradients.plan import Plan
from perseus.process_sets import ProcessSet, global_process_set
from perseus.torch.adasum import AdasumOptimizer, adasum_optimizer
from perseus.torch.compression import Compression
from perseus.torch.functions import buffer_of, parameters_of
from perseus.torch.reducer import GradientReducer
from perseus.torch.residuals import as_buffers, as_tensors
from perseus.torch.session import Adasum, Average

_RESIDUALS = "perseus_residuals"  # the key in state_dict()

_RACE = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
    "optimizer.synchronize(). This is prohibited as it can cause a race condition."
)


class _DistributedOptimizer(torch.optim.Optimizer):
    """What DistributedOptimizer puts in front of the wrapped optimizer's class."""

    _check: ParameterCheck
    _reducer: GradientReducer
    _should_synchronize: bool
    _synchronized: bool

    @property
    def backward_passes_per_step(self) -> int:
        """How many backward passes are summed before gradients are reduced."""
        return self._reducer.passes

    @property
    def op(self) -> int:
        """The reduction applied to gradients."""
        return self._reducer.plan.op

    @property
    def gradient_predivide_factor(self) -> float:
        """What gradients are divided by before they are summed; the rest follows afterwards."""
        return self._reducer.plan.predivide_factor

    @property
    def sparse_as_dense(self) -> bool:
        """Whether sparse gradients are made dense."""
        return self._reducer.plan.sparse_as_dense

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that take part."""
        return self._reducer.plan.process_set

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        """Horovod's own tests look at these."""
        return self._reducer.names

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes belong to a step; counting starts anew."""
        self._reducer.passes = passes
        self._reducer.reset()

    def state_dict(self) -> dict[str, Any]:
        """As in the wrapped optimizer, and "perseus_residuals" where codecs hold something back.

        These are this rank's own, {name: (layout, float32 of shape (2, elements))}, to be loaded by
        the same rank; nothing is sent. Without a lossy codec in use there is no such key.
        """
        state = super().state_dict()
        self._reducer.wait()
        residuals = as_tensors(self._reducer.residuals.read())
        return {**state, _RESIDUALS: residuals} if residuals else state

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """As in the wrapped optimizer; what was started is finished, and counting starts anew.

        What codecs held back is replaced by the state's "perseus_residuals", or by nothing.
        """
        try:
            self._reducer.finish_begun()
        except MismatchError:
            raise
        except HorovodInternalError:
            pass  # the world has ended, and what is loaded replaces what that step was to change
        self._synchronized = False
        self._reducer.forget()
        super().load_state_dict(*args, **kwargs)
        state = args[0] if args else kwargs["state_dict"]
        self._reducer.residuals.replace(as_buffers(state.get(_RESIDUALS, {})))

    def synchronize(self) -> None:
        """Wait until every p.grad is the reduction over all ranks.

        Starts what backward did not reach: a parameter without gradient takes part with zeros.
        Call it before clipping, then step inside skip_synchronize(). HorovodInternalError when a
        reduction failed; all of them have ended then.
        """
        self._reducer.synchronize()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it, step() uses p.grad as it is, after a synchronize() of one's own."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """synchronize(), then the wrapped optimizer's step; closure runs after the former.

        While PERSEUS_ACCUMULATE_N_STEPS sums up, and where a NaN is to be skipped, on all ranks
        alike, the wrapped optimizer is left alone: the closure still runs, if there is one.
        MismatchError where PERSEUS_PARAMETER_CHECK_N_STEPS finds that ranks' parameters differ.
        """
        if self._check.due():
            names = self._reducer.names
            self._check.compare((names[p], buffer_of(p)) for p in parameters_of(self))
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). This can cause training slowdown.",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        applies, self._reducer.applies = self._reducer.applies, True
        if applies:
            return super().step(closure)
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in the wrapped optimizer; AssertionError while gradients are being reduced."""
        if self._reducer.busy():
            raise AssertionError(_RACE)
        super().zero_grad(set_to_none)

    @staticmethod
    def find_duplicates(lst: Iterable[Any]) -> set[Any]:
        """The elements that occur more than once."""
        seen: set[Any] = set()
        duplicates: set[Any] = set()
        for item in lst:
            (duplicates if item in seen else seen).add(item)
        return duplicates


def DistributedOptimizer(  # noqa: N802 - the name is Horovod's
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.settings,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> _DistributedOptimizer | AdasumOptimizer:
    """An optimizer of the same class that reduces gradients over all ranks before each step.

    optimizer: any torch optimizer; its param_groups are shared, state it has already is not taken.
    named_parameters: `model.named_parameters()`, so that ranks pair gradients by name; it must name
        every parameter. Without it, all ranks must have them in the same order.
    compression: what a gradient looks like while it travels. Without it the settings decide, which
        are float16 between hosts; Compression.none is full precision everywhere.
    backward_passes_per_step: backward passes that add up locally before gradients are reduced.
    op: Average, Sum, Min, Max or Product: of gradients. Adasum: of the steps that every rank's own
        optimizer takes; synchronize() does nothing then, and there is nothing to skip.
    gradient_predivide_factor: f: gradients are divided by f before and by size / f after the sum;
        only with Average.
    groups: reduce several gradients as one operation: an int makes that many groups in order; lists
        of tensors are taken as they are, the rest goes one by one. num_groups is its old name.
    sparse_as_dense: send sparse gradients as dense ones; without it their indices and values are
        gathered, with op Average or Sum only. They stay sparse for the wrapped optimizer. Gathering
        needs a gradient on every rank in the first step; later a missing one counts as empty.
    process_set: the ranks that take part.

    Returns an object with synchronize(), skip_synchronize(), set_backward_passes_per_step(). Raises
    ValueError for arguments that do not fit.
    """
    _check_optimizer(optimizer)
    op = checked_reduction(op, gradient_predivide_factor, compression, process_set, "torch")
    checked_passes(backward_passes_per_step, "torch")
    parameters = parameters_of(optimizer)
    names = _names(optimizer, parameters, named_parameters)
    plan = Plan(
        groups=checked_groups(groups, num_groups, "tensor", _identity),
        compression=compression,
        op=op,
        predivide_factor=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )
    included = bool(process_set.included())
    if op == Adasum and included and not alone():
        check_adasum_of_steps("torch")
        trained = {p: names[p] for p in parameters if p.requires_grad}
        return adasum_optimizer(
            optimizer, trained, compression, backward_passes_per_step, process_set
        )
    active = included and (not alone() or basics.settings_act_on_gradients())
    wrapped = type(optimizer)
    made_class = type(
        wrapped.__name__, (_DistributedOptimizer, wrapped), {"__module__": wrapped.__module__}
    )
    made = cast(_DistributedOptimizer, cast(Any, made_class).__new__(made_class))
    made.__dict__.update(optimizer.__dict__)
    # A learning rate scheduler made before this leaves a step bound to the wrapped optimizer.
    made.__dict__.pop("step", None)
    made.state = defaultdict(dict)
    made._check = ParameterCheck(process_set)
    made._should_synchronize = True
    made._synchronized = False
    made._reducer = GradientReducer(
        [p for p in parameters if p.requires_grad] if active else [],
        names,
        plan,
        backward_passes_per_step,
    )
    return made


def _check_optimizer(optimizer: Any) -> None:
    """ValueError for what cannot be wrapped."""
    if isinstance(optimizer, (_DistributedOptimizer, AdasumOptimizer)):
        raise wrapped_twice("torch")
    if not hasattr(optimizer, "param_groups"):
        raise not_an_optimizer(
            optimizer,
            "torch",
            "an optimizer of torch.optim",
            "torch.optim.SGD(model.parameters(), lr=0.01)",
        )


def _names(
    optimizer: torch.optim.Optimizer,
    parameters: list[torch.Tensor],
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
) -> dict[torch.Tensor, str]:
    if named_parameters is None:
        return {
            p: f"allreduce.noname.{i}.{j}"
            for i, group in enumerate(optimizer.param_groups)
            for j, p in enumerate(group["params"])
        }
    named = list(named_parameters) if isinstance(named_parameters, Iterable) else [None]
    if not all(
        isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], torch.Tensor)
        for item in named
    ):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced "
            "by model.named_parameters()."
        )
    duplicates = _DistributedOptimizer.find_duplicates(name for name, _ in named)
    if duplicates:
        raise ValueError(
            f"Parameter names in named_parameters must be unique. Found duplicates: "
            f"{', '.join(sorted(duplicates))}"
        )
    names = {parameter: name for name, parameter in named}
    unnamed = sum(parameter not in names for parameter in parameters)
    if unnamed:
        raise ValueError(
            f"named_parameters was specified, but {unnamed} of the optimizer's {len(parameters)} "
            f"parameters were not named. Pass named_parameters of the whole model."
        )
    return names


def _identity(tensor: Any) -> int:
    if not isinstance(tensor, torch.Tensor):
        raise ValueError("groups must consist of tensors")
    return id(tensor)

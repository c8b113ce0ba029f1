"""DistributedOptimizer(op=Adasum): every rank takes its own step, and Adasum combines the steps.

Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021; behaviour
of Horovod 0.28.1, horovod.torch.optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from typing import Any, cast

import torch

from perseus import basics
from perseus.compression import Compressor, all_applied_here
from perseus.failures import Failures
from perseus.gradients.adasum import AdasumOfSteps
from perseus.gradients.handle_reducer import HandleReducer, Reduction
from perseus.gradients.parameter_check import ParameterCheck
from perseus.gradients.plan import Plan
from perseus.process_sets import ProcessSet
from perseus.torch.functions import buffer_of, initial_state, parameters_of
from perseus.torch.gradient_scaler import let_scalers_wait
from perseus.torch.hooks import calls_hooked_step
from perseus.torch.mpi_ops import Max, allreduce
from perseus.torch.parameters import Parameters, SharedGroups
from perseus.torch.session import Adasum, session
from perseus.torch.untraced import untraced

_OVERFLOW = "DistributedOptimizer.overflow"


class _StepReducer(HandleReducer, AdasumOfSteps):
    """Combines the steps of parameters.

    named: the parameters and their names. failures: the errors of the last step. applies: whether
    the last step was taken; if not, the parameters have been restored.
    """

    def __init__(self, plan: Plan, named: dict[torch.Tensor, str]) -> None:
        super().__init__(plan, session)
        self.take(named)
        self.failures = Failures()
        self.applies = True

    def take(self, named: dict[torch.Tensor, str]) -> None:
        """Combine the steps of these parameters from now on."""
        self.named = named
        self.reductions = [Reduction(name, name) for name in named.values()]

    def copies(self, variables: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See AdasumOfSteps."""
        return [parameter.clone() for parameter in variables]

    def after(self, done: Sequence[Any]) -> AbstractContextManager[Any]:
        """See AdasumOfSteps. Operations run at once, so their order needs no context."""
        del done
        return nullcontext()

    def value(self, variable: torch.Tensor) -> torch.Tensor:
        """See AdasumOfSteps."""
        return variable

    def reduce(self, steps: Iterable[torch.Tensor]) -> list[torch.Tensor] | None:
        """See AdasumOfSteps."""
        for reduction, step in zip(self.reductions, steps, strict=True):
            self.begin(reduction, [step])
        self.failures = Failures()
        applies = self.finish(self.reductions, self.failures)
        results = [reduction.gradients[0] for reduction in self.reductions]
        for reduction in self.reductions:
            reduction.gradients = []
        self.applies = applies and not self.failures
        return results if self.applies else None

    def write(self, variables: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """See AdasumOfSteps."""
        for parameter, value in zip(variables, values, strict=True):
            parameter.copy_(value)


class AdasumOptimizer(SharedGroups):
    """The mixin that adasum_optimizer puts in front of the wrapped optimizer's class."""

    _check: ParameterCheck
    _parameters: Parameters
    _reducer: _StepReducer
    backward_passes_per_step: int

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set how many backward passes the caller sums in p.grad before it calls step()."""
        self.backward_passes_per_step = passes

    def synchronize(self) -> None:
        """Does nothing: Adasum reduces steps, not gradients."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raises AssertionError: there is nothing to skip."""
        raise AssertionError(
            "Skipping synchronization is not supported when using Adasum optimizer."
        )
        yield

    @torch.no_grad()
    def agree_on_overflow(self, found: Collection[torch.Tensor]) -> None:
        """Let a GradScaler leave out a step where gradients of any rank overflow.

        The others would wait for that rank's step in vain.
        """
        process_set = self._reducer.plan.process_set
        if not process_set.included():
            return
        here = torch.tensor([float(any(each.item() for each in found))])
        anywhere = allreduce(here, op=Max, name=_OVERFLOW, process_set=process_set).item()
        for each in found:
            each.fill_(anywhere)

    @calls_hooked_step
    @torch.no_grad()
    @untraced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take the wrapped optimizer's step, then combine the steps of all ranks by Adasum.

        A parameter without a gradient contributes its step as well, usually zeros. Those that have
        joined the optimizer or become trainable since the last step must be the same on all ranks;
        their steps are combined from now on. Raises HorovodInternalError if a reduction failed.
        NaNs are looked for in the steps; if one is to be skipped or is an error, the parameters and
        the optimizer's state are restored. A rank outside of the process set takes its own step.
        """
        self._follow_parameters()
        reducer = self._reducer
        wrapped: Any = super()
        if not reducer.plan.process_set.included():
            return wrapped.step(closure)
        if self._check.due():
            self._check.compare((name, buffer_of(p)) for p, name in reducer.named.items())
        saved = _saved(self)
        loss, _ = reducer.around(list(reducer.named), lambda: wrapped.step(closure))
        if not reducer.applies:
            _restore(self, saved)
        reducer.failures.raise_first()
        return loss

    def _follow_parameters(self) -> None:
        """Combine the steps of those that have joined or become trainable; let go what is gone."""
        parameters, known = self._parameters, self._reducer.named
        if parameters.have_changed(self.param_groups):
            parameters.update(self.param_groups)
            present = parameters.named(self.param_groups)
            self._reducer.take({p: name for name, p in present if p.requires_grad or p in known})


_Saved = tuple[dict[Any, Any], list[dict[str, Any]]]


def _saved(optimizer: torch.optim.Optimizer) -> _Saved | None:
    """Copy the state that a step changes besides parameters; None if no NaN can undo the step."""
    if not basics.setting("PERSEUS_ALLREDUCE_NANCHECK"):
        return None
    if not basics.setting("PERSEUS_ALLREDUCE_NANCHECK_ACTION"):
        return None
    state = {parameter: deepcopy(value) for parameter, value in optimizer.state.items()}
    groups = [
        {key: deepcopy(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return state, groups


def _restore(optimizer: torch.optim.Optimizer, saved: _Saved | None) -> None:
    if saved is None:
        return
    optimizer.state.clear()
    optimizer.state.update(saved[0])
    for group, options in zip(optimizer.param_groups, saved[1], strict=True):
        group.update(options)


def adasum_optimizer(
    optimizer: torch.optim.Optimizer,
    names: dict[torch.Tensor, str],
    compression: type[Compressor],
    passes: int,
    process_set: ProcessSet,
) -> AdasumOptimizer:
    """Return an optimizer of the same class whose step is the Adasum of all ranks' steps.

    names: the names of all parameters, which are in the same order on all ranks.
    """
    made = cast(AdasumOptimizer, AdasumOptimizer.made_of(optimizer))
    made.state = initial_state(optimizer)
    made._check = ParameterCheck(process_set)
    plan = Plan(Adasum, all_applied_here(compression), process_set)
    made._parameters = Parameters(made.param_groups, names)
    trained = [p for p in parameters_of(made) if p.requires_grad]
    made._reducer = _StepReducer(plan, {p: names[p] for p in trained})
    made.backward_passes_per_step = passes
    let_scalers_wait()
    return made

"""DistributedOptimizer(op=Adasum): every rank takes its own step, and Adasum combines the steps.

Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021; behaviour
of Horovod 0.28.1, horovod.torch.optimizer.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, cast

import torch

from perseus import basics
from perseus.compression import EXACT, Compressor
from perseus.failures import Failures
from perseus.gradients.parameter_check import ParameterCheck
from perseus.process_sets import ProcessSet
from perseus.torch.functions import buffer_of
from perseus.torch.session import ALLREDUCE, Adasum, session, synchronize


class AdasumOptimizer(torch.optim.Optimizer):
    """The mixin that adasum_optimizer puts in front of the wrapped optimizer's class."""

    _check: ParameterCheck
    _names: dict[torch.Tensor, str]
    _compression: type[Compressor]
    _process_set: ProcessSet
    _number: int
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
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The wrapped optimizer's step from where all ranks stand, then the Adasum of all steps.

        A parameter that had no gradient here takes part with the step it has made, zeros mostly.
        HorovodInternalError when a reduction failed. NaN are searched for in steps: where one is
        to be skipped or is an error, parameters and the optimizer's state are as before.
        """
        if self._check.due():
            self._check.compare((name, buffer_of(p)) for p, name in self._names.items())
        parameters = list(self._names)
        before = [parameter.clone() for parameter in parameters]
        saved = _saved(self)
        loss = super().step(closure)
        started = []
        for parameter, start in zip(parameters, before, strict=True):
            sent, context = self._compression.compress(parameter - start)
            handle = session.submit(
                ALLREDUCE, self._names[parameter], sent, torch.empty_like(sent), op=Adasum,
                group=self._process_set.process_set_id, gradient_of=self._number, codec=EXACT,
            )  # fmt: skip
            started.append((handle, context))
        steps: list[Any] = []
        failures = Failures()
        for handle, context in started:
            try:
                result = synchronize(handle)
                steps.append(
                    None if result is None else self._compression.decompress(result, context)
                )
            except Exception as error:
                failures.add(error)
        if failures or any(step is None for step in steps):
            for parameter, start in zip(parameters, before, strict=True):
                parameter.copy_(start)
            _restore(self, saved)
        else:
            for parameter, start, step in zip(parameters, before, steps, strict=True):
                parameter.copy_(start + step)
        failures.raise_first()
        return loss


_Saved = tuple[dict[Any, Any], list[dict[str, Any]]]


def _saved(optimizer: torch.optim.Optimizer) -> _Saved | None:
    """What a step changes besides parameters, saved where a NaN may undo the step."""
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

    names: of every parameter that takes part, in the same order on all ranks.
    """
    wrapped = type(optimizer)
    made_class = type(
        wrapped.__name__, (AdasumOptimizer, wrapped), {"__module__": wrapped.__module__}
    )
    made = cast(AdasumOptimizer, cast(Any, made_class).__new__(made_class))
    made.__dict__.update(optimizer.__dict__)
    made.__dict__.pop("step", None)  # a scheduler bound it to the wrapped optimizer
    made.state = defaultdict(dict)
    made._check = ParameterCheck(process_set)
    made._names = names
    made._compression = compression
    made._process_set = process_set
    made._number = basics.new_gradients()
    weakref.finalize(made, basics.forget_gradients, made._number).atexit = False
    made.backward_passes_per_step = passes
    return made

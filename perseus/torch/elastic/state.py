"""Elastic state of PyTorch: a handler for each kind of value keeps it.

Belongs to the training thread. Source of behaviour: Horovod 0.28.1, horovod.torch.elastic.state.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from perseus import basics
from perseus.basics import rank
from perseus.elastic.handled_state import (
    HandledState,
    Registry,
    StateDictHandler,
    StateHandler,
)
from perseus.elastic.state import ObjectState
from perseus.gradients import rotation
from perseus.gradients.turns import SETTING
from perseus.torch.adasum import AdasumOptimizer
from perseus.torch.elastic.sampler import ElasticSampler
from perseus.torch.functions import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    parameters_of,
    plain_buffers,
)
from perseus.torch.gradient_scaler import GradScaler
from perseus.torch.local_exchanges import TorchLocalSteps
from perseus.torch.reducer import GradientReducer
from perseus.torch.residuals import OWNER
from perseus.torch.wrapped import wrapper_residuals

_PARAMETERS = "params", "param_names"  # what a parameter group has beside options


class ModelStateHandler(StateHandler):
    """Keeps a module's state_dict(), and what lossy codecs hold back in the wrapper around it."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.save()

    def save(self) -> None:
        """Copy all parameters, buffers and residuals."""
        residuals = wrapper_residuals(self.value)
        residuals.kept = True
        self._held = residuals.residuals()
        self._saved = copy.deepcopy(self.value.state_dict())

    def mark(self) -> None:
        """Do nothing: a step that fails does not change the module."""

    def keep(self) -> None:
        """Do nothing."""

    def restore(self) -> None:
        """Write the copies back, in place."""
        wrapper_residuals(self.value).go_on_with(self._held)
        self.value.load_state_dict(self._saved)

    def sync(self) -> None:
        """Overwrite parameters and buffers with rank 0's."""
        broadcast_parameters(self.value.state_dict(), root_rank=0)

    def contents(self) -> Iterator[memoryview]:
        """Yield the parameters and buffers that are contiguous in host memory."""
        return plain_buffers(self.value.state_dict().values())


class OptimizerStateHandler(StateHandler):
    """Keeps an optimizer's state_dict()."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self.save()

    def save(self) -> None:
        """Copy moments and options."""
        self._saved = copy.deepcopy(self.value.state_dict())
        self._saved.pop(OWNER, None)  # this process, which may have another rank by then
        self.mark()

    def mark(self) -> None:
        """Copy the options, such as the learning rate, which schedulers change between steps."""
        self._options = [
            {key: copy.deepcopy(value) for key, value in group.items() if key not in _PARAMETERS}
            for group in self.value.param_groups
        ]

    def keep(self) -> None:
        """Give the optimizer the options; a step that fails does not change the moments."""
        for group, options in zip(self.value.param_groups, self._options, strict=False):
            group.update(copy.deepcopy(options))

    def restore(self) -> None:
        """Give the optimizer the copies."""
        # It keeps the tensors it is given, and its steps change them.
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Take over rank 0's moments and options, and which gradients are sparse."""
        missing = [each for each in parameters_of(self.value) if each.grad is None]
        broadcast_optimizer_state(self.value, root_rank=0)
        for parameter in missing:
            parameter.grad = None  # zeros would let weight decay move unused parameters
        if isinstance(reducer := getattr(self.value, "_reducer", None), GradientReducer):
            reducer.share_sparse()
        if isinstance(local_steps := getattr(self.value, "_local_steps", None), TorchLocalSteps):
            local_steps.follow(basics.rank() == 0)

    def contents(self) -> Iterator[memoryview]:
        """Yield the moments that are contiguous in host memory."""
        entries = [list(entry.values()) for entry in list(self.value.state.values())]
        return plain_buffers(value for entry in entries for value in entry)


class _BroadcastHandler(StateDictHandler):
    """Keeps a state_dict() that is no tensor's, so that it is small."""

    def sync(self) -> None:
        """Load rank 0's state into this rank's object."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))


class SchedulerStateHandler(_BroadcastHandler):
    """Keeps a learning rate scheduler's state_dict(); its optimizer keeps the learning rates."""


class ScalerStateHandler(_BroadcastHandler):
    """Keeps a gradient scaler's state_dict(): the scale, and the steps since it has changed.

    A step that has failed may have been unscaled already. The next one is a new one.
    """

    def restore(self) -> None:
        """Give the scaler a copy, and let it forget the step."""
        super().restore()
        self._forget_step()

    def sync(self) -> None:
        """Load rank 0's state, and let the scaler forget the step."""
        super().sync()
        self._forget_step()

    def _forget_step(self) -> None:
        # As update() does, which would also change the scale.
        getattr(self.value, "_per_optimizer_states", {}).clear()


class SamplerStateHandler(_BroadcastHandler):
    """Keeps an ElasticSampler's epoch and progress; sync() shares the remaining samples."""

    def __init__(self, sampler: Any) -> None:
        super().__init__(sampler)


_registry: Registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (torch.optim.lr_scheduler.LRScheduler, SchedulerStateHandler),
    # Before torch 2.2 it is not derived from LRScheduler.
    (torch.optim.lr_scheduler.ReduceLROnPlateau, SchedulerStateHandler),
    (GradScaler, ScalerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> Registry:
    """The (type, handler class) pairs from which TorchState takes the first that fits.

    Appending to the list adds a kind of value.
    """
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Use another list from now on; states that exist keep their handlers."""
    global _registry
    _registry = registry


def _parameters_of(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.nn.Module):
        return value.parameters()
    return parameters_of(value) if isinstance(value, torch.optim.Optimizer) else ()


class TorchState(HandledState):
    """The state of elastic training with PyTorch, as attributes.

        state = TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0)

    model, optimizer: usually one each; more of them, samplers, gradient scalers, and learning rate
    schedulers of these optimizers go into kwargs under any name.
    Modules, optimizers, schedulers, scalers and ElasticSamplers are saved as copies and restored in
    place; other values as in ObjectState. Assigning another one to its attribute saves it.

    Save, commit and look for new hosts after a step or synchronize(), not after backward(): saving
    an optimizer waits for the reductions under way, which all ranks must have begun.

    `commit(copy=False)` copies neither parameters nor moments. After a failure, they stay as they
    are: a step changes them only once all of its gradients have been averaged. If some ranks have
    done the last step and others have not, these take over the values of one that has. So it must
    come after every step, before anything else that may fail, and is not for optimizers that
    communicate while they change parameters, such as ZeRO's. `restore()` has then no earlier values
    to go back to. It copies all the same without perseusrun, and where optimizers of Perseus
    communicate after their steps: Adasum, LocalSGD, DiLoCo, and those that average a part of the
    parameters.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        values = {**kwargs, "model": model, "optimizer": optimizer}
        self._is_marked = False
        super().__init__(broadcast_object, rank, get_handler_registry(), values)

    def save(self) -> None:
        """Copy what has a handler; remember the other values."""
        super().save()
        self._is_marked = False

    def _can_mark(self) -> bool:
        if basics.membership() is None or rotation.any_living() or basics.setting(SETTING) > 1:
            return False
        values = (handler.value for handler in self._handlers.values())
        return not any(isinstance(value, AdasumOptimizer) for value in values)

    def mark(self) -> None:
        """Take parameters and moments as they are for committed."""
        for handler in self._handlers.values():
            handler.mark()
        ObjectState.save(self)
        self._is_marked = True

    def reset(self) -> None:
        """Drop all gradients, which new ranks do not have; have samplers share their samples again.

        A script that clears gradients after its commits would apply those of its last step twice.
        """
        for handler in self._handlers.values():
            for parameter in _parameters_of(handler.value):
                parameter.grad = None
        super().reset()

    def restore(self) -> None:
        """Go back to the last commit: in place, where it has copies."""
        if not self._is_marked:
            super().restore()
            return
        for handler in self._handlers.values():
            handler.keep()
        ObjectState.restore(self)
        self.save()  # the next world may end while this rank takes over the values of another

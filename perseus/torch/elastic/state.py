"""Elastic state of PyTorch: modules, optimizers and samplers, each with a handler that keeps it.

Belongs to the training thread. Source of behaviour: Horovod 0.28.1, horovod.torch.elastic.state.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from perseus.basics import rank
from perseus.elastic import ObjectState
from perseus.torch.elastic.sampler import ElasticSampler
from perseus.torch.functions import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)


class StateHandler:
    """How one kind of value is saved, restored and made equal on all ranks."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Keep a copy of the value's state."""
        raise NotImplementedError

    def restore(self) -> None:
        """Give the value the state last saved."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give the value rank 0's state; the saved copy stays. Collective."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Handle another object from now on, and save it."""
        self.value = value
        self.save()


class ModelStateHandler(StateHandler):
    """Keeps a module's state_dict()."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.save()

    def save(self) -> None:
        """Copy all parameters and buffers."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Write the copies back, in place."""
        self.value.load_state_dict(self._saved)

    def sync(self) -> None:
        """Overwrite parameters and buffers with rank 0's."""
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(StateHandler):
    """Keeps an optimizer's state_dict()."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self.save()

    def save(self) -> None:
        """Copy moments and options."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Give the optimizer the copies."""
        # It keeps the tensors it is given, and its steps change them.
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Take over rank 0's moments and options."""
        broadcast_optimizer_state(self.value, root_rank=0)


class SamplerStateHandler(StateHandler):
    """Keeps an ElasticSampler's epoch and progress."""

    def __init__(self, sampler: ElasticSampler) -> None:
        super().__init__(sampler)
        self.save()

    def save(self) -> None:
        """Remember epoch and progress."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Roll back to the progress last saved, and share the remaining samples."""
        self.value.load_state_dict(self._saved)

    def sync(self) -> None:
        """Copy rank 0's progress, and share the remaining samples among the present ranks."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))


Registry = list[tuple[type, type[StateHandler]]]

_registry: Registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
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


def _handler_for(value: Any) -> StateHandler | None:
    return next((handler(value) for kind, handler in _registry if isinstance(value, kind)), None)


class TorchState(ObjectState):
    """The state of elastic training with PyTorch, as attributes.

        state = TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0)

    model, optimizer: usually one each; more of them, and samplers, go into kwargs under any name.
    Modules, optimizers and ElasticSamplers are saved as copies and restored in place; other values
    as in ObjectState. Assigning another module (optimizer, sampler) to its attribute saves it.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        self._handlers: dict[str, StateHandler] = {}
        values: dict[str, Any] = {}
        for name, value in {**kwargs, "model": model, "optimizer": optimizer}.items():
            handler = _handler_for(value)
            if handler is None:
                values[name] = value
            else:
                self._handlers[name] = handler
                super().__setattr__(name, value)
        super().__init__(broadcast_object, rank, **values)

    def save(self) -> None:
        """Copy the state of every module, optimizer and sampler; remember the other values."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Bring everything back to the last save, in place."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Take over rank 0's modules, optimizers and samplers, and its last save of other values.

        Collective; ranks must have the same attributes.
        """
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def reset(self) -> None:
        """Have samplers share their samples again, since the ranks may have changed."""
        for handler in self._handlers.values():
            if isinstance(handler.value, ElasticSampler):
                handler.value.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        handler = self.__dict__.get("_handlers", {}).get(name)
        if handler is not None:
            handler.set_value(value)
        super().__setattr__(name, value)

"""A state whose values are kept by handlers, which differ from framework to framework.

Belongs to the training thread. Source of behaviour: Horovod 0.28.1, horovod.torch.elastic.state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from perseus.elastic.sampler import ElasticSampler
from perseus.elastic.state import ObjectState


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

    def contents(self) -> Iterable[memoryview]:
        """Yield the arrays that sync() sends; see State.contents()."""
        return ()

    def mark(self) -> None:
        """Keep for keep() what a step that fails may change: by default, the value's state."""
        self.save()

    def keep(self) -> None:
        """Give the value what mark() has kept."""
        self.restore()

    def set_value(self, value: Any) -> None:
        """Handle another object from now on, and save it."""
        self.value = value
        self.save()


class StateDictHandler(StateHandler):
    """Keeps the state_dict() of a value, such as an ElasticSampler; adapters add sync()."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        """Copy the state."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Give the value a copy, which it may keep and change."""
        self.value.load_state_dict(copy.deepcopy(self._saved))


# Types, and the handlers of their instances; the first that fits is taken.
Registry = list[tuple[type, type[StateHandler]]]


class HandledState(ObjectState):
    """Values with handlers, as attributes, beside plain ones.

    registry: finds the handlers. values: the attributes; those that no handler is for are kept as
    in ObjectState. Assigning another value to an attribute with a handler saves it.
    """

    def __init__(
        self,
        bcast_object: Callable[[Any], Any],
        get_rank: Callable[[], int],
        registry: Registry,
        values: Mapping[str, Any],
    ) -> None:
        self._handlers: dict[str, StateHandler] = {}
        self._saved_commits = 0
        plain: dict[str, Any] = {}
        for name, value in values.items():
            fitting = (handler for kind, handler in registry if isinstance(value, kind))
            handler = next(fitting, None)
            if handler is None:
                plain[name] = value
            else:
                self._handlers[name] = handler(value)
                super().__setattr__(name, value)
        super().__init__(bcast_object, get_rank, **plain)

    def save(self) -> None:
        """Have every handler save its value; remember the other values."""
        for handler in self._handlers.values():
            handler.save()
        super().save()
        self._saved_commits = self._commits

    def restore(self) -> None:
        """Bring everything back to the last save, in place."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()
        self._commits = self._saved_commits

    def sync(self) -> None:
        """Take over rank 0's values: those with handlers as they are, others as last saved.

        Collective; ranks must have the same attributes.
        """
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def contents(self) -> Iterable[memoryview]:
        """Yield the arrays of all handlers."""
        for handler in self._handlers.values():
            yield from handler.contents()

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

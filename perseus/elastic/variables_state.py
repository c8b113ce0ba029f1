"""Elastic state of variables that have numpy() and assign(), as TensorFlow's and Keras's do.

Belongs to the training thread. Source of behaviour: Horovod 0.28.1, horovod.tensorflow.elastic.
"""
# ruff: noqa: PLR0917 - beside the adapters' classes, which have Horovod's signatures

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from perseus.elastic.state import ObjectState


class VariablesState(ObjectState):
    """Variables beside plain values.

    variables: those to keep, or a function that lists them. broadcast: gives variables rank 0's
    values. bcast_object, get_rank, kwargs: as for ObjectState.
    """

    def __init__(
        self,
        bcast_object: Callable[[Any], Any],
        get_rank: Callable[[], int],
        broadcast: Callable[[Sequence[Any]], Any],
        variables: Sequence[Any] | Callable[[], Sequence[Any]],
        **kwargs: Any,
    ) -> None:
        self._broadcast = broadcast
        self._variables = variables if callable(variables) else lambda: variables
        self._values = self._read(self._variables())
        super().__init__(bcast_object, get_rank, **kwargs)

    def save(self) -> None:
        """Copy all values into host memory."""
        self._values = self._read(self._variables())
        super().save()

    def restore(self) -> None:
        """Assign the copies."""
        self._write(self._variables(), self._values)
        super().restore()

    def sync(self) -> None:
        """Take over rank 0's variables and what it saved last, and save them. Collective."""
        self._broadcast(self._variables())
        super().sync()
        self.save()

    def _read(self, variables: Sequence[Any]) -> list[Any]:
        # What numpy() gives may be the variable's own memory.
        return [copy.copy(variable.numpy()) for variable in variables]

    def _write(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)


class ModelState(VariablesState):
    """A Keras model's weights and its optimizer's variables beside plain values.

    model: built, or ValueError. optimizer: None = the one it is compiled with. It is built at once,
    so that there is nothing to be added later. backend: kept as an attribute for Horovod's sake.
    """

    def __init__(
        self,
        bcast_object: Callable[[Any], Any],
        get_rank: Callable[[], int],
        broadcast: Callable[[Sequence[Any]], Any],
        model: Any,
        optimizer: Any = None,
        backend: Any = None,
        **kwargs: Any,
    ) -> None:
        if not model.built:
            raise ValueError(
                "[elastic] the model has no weights yet: build it, or give its first layer an "
                "input shape, before it becomes a state"
            )
        self.model = model
        self.optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        self.backend = backend
        super().__init__(bcast_object, get_rank, broadcast, self._listed, **kwargs)
        self._held = self._read_residuals()

    def save(self) -> None:
        """Copy all values into host memory, and what this rank's codecs hold back of gradients."""
        super().save()
        self._held = self._read_residuals()

    def restore(self) -> None:
        """Assign the copies; other ranks' residuals are never taken over."""
        super().restore()
        residuals = self._residuals()
        if residuals is not None:
            residuals.replace(self._held)

    def _residuals(self) -> Any:
        """Of a distributed optimizer, which may be inside one that scales losses; else None."""
        inner = getattr(self.optimizer, "inner_optimizer", self.optimizer)
        return getattr(inner, "perseus_residuals", None)

    def _read_residuals(self) -> dict[str, Any]:
        residuals = self._residuals()
        return {} if residuals is None else dict(residuals.read())

    def _listed(self) -> list[Any]:
        optimizer = self.optimizer
        if optimizer is None:
            return list(self.model.weights)
        variables = optimizer_variables(optimizer, self.model.trainable_weights)
        return [*self.model.weights, *variables]


def optimizer_variables(optimizer: Any, weights: Sequence[Any] | None = None) -> list[Any]:
    """All variables of an optimizer of Keras 2 or 3; with weights it is built for them first."""
    if weights is not None:
        if not hasattr(optimizer, "build"):  # a legacy one of Keras 2
            optimizer._create_all_weights(weights)
        elif not getattr(optimizer, "built", False):  # Keras 2 does not say so, but builds once
            optimizer.build(weights)
    variables = optimizer.variables
    return list(variables() if callable(variables) else variables)

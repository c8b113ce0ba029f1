"""Elastic state of variables that have numpy() and assign(), as TensorFlow's and Keras's do.

Belongs to the training thread. Source of behaviour: Horovod 0.28.1, horovod.tensorflow.elastic.
"""
# ruff: noqa: PLR0917 - beside the adapters' classes, which have Horovod's signatures

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat
from typing import Any

from perseus.elastic import known_blocks
from perseus.elastic.state import ObjectState
from perseus.gradients.aggregation import forget_passes
from perseus.gradients.residuals import Held, Source


class VariablesState(ObjectState):
    """Variables beside plain values.

    variables: those to keep, or a function that lists them. broadcast: gives variables rank 0's
    values. bcast_object, get_rank, kwargs: as for ObjectState; where one is a Source, what this
    rank's codecs hold back of gradients is kept, and other ranks' never taken over.
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
        sources = {name: value for name, value in kwargs.items() if isinstance(value, Source)}
        self._source_names = list(sources)
        for name, source in sources.items():
            setattr(self, name, source)
            del kwargs[name]
        self._copy()
        super().__init__(bcast_object, get_rank, **kwargs)

    def save(self) -> None:
        """Copy all values, and this rank's residuals of gradients, into host memory."""
        self._copy()
        super().save()

    def restore(self) -> None:
        """Assign the copies. Passes since the last step of any optimizer are dropped.

        Variables that the framework has created since the save, as for layers that are no longer
        frozen, keep their values until sync(). A new source of residuals loses what it holds back.
        """
        variables = list(self._variables())
        # By identity, as the order of a model's weights may change, too.
        copies = {id(each): value for each, value in zip(self._saved, self._values, strict=True)}
        saved = [each for each in variables if id(each) in copies]
        if saved:
            self._write(saved, [copies[id(each)] for each in saved])
        else:  # another model has taken the place of the saved one
            self._write(variables, self._values)
        self._forget_passes()
        for source, held in zip(self._sources(), chain(self._held, repeat({})), strict=False):
            source.go_on_with(held)
        super().restore()

    def sync(self) -> None:
        """Take over rank 0's variables and what it saved last, and save them. Collective."""
        variables = self._variables()
        if not self._take_over(variables):
            self._broadcast(variables)
        self._forget_passes()
        super().sync()
        self.save()

    def contents(self) -> Iterator[memoryview]:
        """Yield the values of variables in host memory; none in graphs."""
        for variable in list(self._variables()):
            if _is_on_host(variable):
                try:
                    value = variable.numpy()
                except (NotImplementedError, AttributeError):
                    return
                yield from _bytes_of([_array_of(value)])

    def _take_over(self, variables: Sequence[Any]) -> bool:
        """Give variables rank 0's values in an elastic job where most of them are known."""
        if not known_blocks.are_used():
            return False
        arrays = [_array_of(value) for value in self._read(variables)]
        views = _bytes_of(arrays)
        if not known_blocks.take_over(views, [(each.shape, each.dtype) for each in arrays]):
            return False
        self._write(variables, arrays)
        return True

    def _forget_passes(self) -> None:
        forget_passes()

    def _sources(self) -> list[Source]:
        return [getattr(self, name) for name in self._source_names]

    def _copy(self) -> None:
        self._saved = list(self._variables())
        self._values = self._read(self._saved)
        self._held: list[dict[str, Held]] = [source.residuals() for source in self._sources()]

    def _read(self, variables: Sequence[Any]) -> list[Any]:
        # What numpy() gives may be the variable's own memory.
        return [copy.copy(variable.numpy()) for variable in variables]

    def _write(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)


def _is_on_host(variable: Any) -> bool:
    """Whether a variable of TensorFlow or Keras is not on a GPU."""
    inner = variable if hasattr(variable, "device") else getattr(variable, "value", None)
    device = str(getattr(inner, "device", "")).lower()
    return "gpu" not in device and "cuda" not in device


def _array_of(value: Any) -> Any:
    """A copy that is contiguous and can be written."""
    import numpy as np

    return np.array(value, order="C")


def _bytes_of(arrays: Sequence[Any]) -> list[memoryview]:
    """The memory of arrays that own it."""
    import numpy as np

    return [memoryview(array.reshape(-1).view(np.uint8)) for array in arrays]


class ModelState(VariablesState):
    """A Keras model's weights and its optimizer's variables beside plain values.

    model: built, or ValueError. optimizer: None = the one it is compiled with. It is built at once,
    so that there is nothing to be added later. backend: kept as an attribute for Horovod's sake.
    NotImplementedError for Keras 2 without eager execution.
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
        try:
            super().__init__(bcast_object, get_rank, broadcast, self._listed, **kwargs)
        except NotImplementedError as error:  # by numpy()
            raise NotImplementedError(
                "[elastic] states of Keras models need eager execution; without it use "
                "hvd.elastic.TensorFlowState([*model.weights, *optimizer.variables()], "
                "session=tf.compat.v1.keras.backend.get_session()) after a first batch"
            ) from error

    def _sources(self) -> list[Source]:
        """Of a distributed optimizer, which may be inside one that scales losses, too."""
        inner = getattr(self.optimizer, "inner_optimizer", self.optimizer)
        found = getattr(inner, "perseus_residuals", None)
        return [*super()._sources(), *([] if found is None else [found])]

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

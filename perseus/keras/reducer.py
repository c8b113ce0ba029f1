"""The gradients of one Keras optimizer on their way: names, groups, local variables.

Belongs to the thread that applies gradients, or that traces the function which does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from perseus.gradients.bundles import bundles
from perseus.gradients.local_sources import LocalSources
from perseus.gradients.names import unnumbered
from perseus.gradients.parameter_check import ParameterCheck
from perseus.gradients.participation import takes_part
from perseus.gradients.plan import Plan
from perseus.gradients.reducer import LateReducer
from perseus.keras.backend import backend

_used_names: Counter[str] = Counter()


@dataclass(frozen=True)
class Options:
    """What DistributedOptimizer was asked for beside how to reduce; equal on all ranks."""

    name: str | None
    plan: Plan
    scale_local_gradients: bool
    passes: int
    average_passes: bool


class GradientReducer(LateReducer):
    """Reduces one optimizer's gradients. name: what theirs begin with unless the options say it."""

    def __init__(self, options: Options, name: str) -> None:
        super().__init__()
        self.options = options
        self.plan = options.plan
        divided = partial(backend.divided_by_size, process_set=options.plan.process_set)
        self.local = LocalSources(_key, divided if options.scale_local_gradients else None)
        self._name = options.name or name
        self._prefix = ""
        self._check = ParameterCheck(options.plan.process_set)

    def active(self) -> bool:
        """Whether there is anything to do; where the world may grow, it counts as grown."""
        return takes_part(self.plan.process_set)

    def before_backward(self, optimizer: Any) -> None:
        """Backward is next, and then reduce(); from the second step on reductions begin in it."""
        if self._reducer is None or self.plan.groups is not None:
            return
        wide = [v for v in optimizer._trainable_variables if not self.local.is_local(v)]
        self._reducer.before_backward(wide, [self._name_of(v, optimizer) for v in wide])

    def _name_of(self, variable: Any, optimizer: Any) -> str:
        return f"{optimizer._get_variable_index(variable)}/{readable(variable)}"

    def reduce(
        self, gradients: Sequence[Any], variables: Sequence[Any], optimizer: Any
    ) -> tuple[list[Any], Any]:
        """The gradients of an optimizer's variables, reduced over all ranks; None stays None.

        Gradients of local variables are left alone, or divided by the number of ranks. Returns them
        and whether they may be applied: None for yes, always; else as BackendReducer.reduce.
        """
        return self.local.around(
            lambda wide, sources: self._reduce(wide, sources, optimizer), gradients, variables
        )

    def _reduce(
        self, gradients: Sequence[Any], variables: Sequence[Any], optimizer: Any
    ) -> tuple[list[Any], Any]:
        results = list(gradients)
        sent = [index for index, gradient in enumerate(gradients) if gradient is not None]
        if not sent:
            return results, None
        names = [self._name_of(variables[index], optimizer) for index in sent]
        gradients = backend.compared(
            self._check,
            names,
            [variables[index] for index in sent],
            [gradients[index] for index in sent],
        )
        numbers = [optimizer._get_variable_index(variables[index]) for index in sent]
        if self._reducer is None:
            self._reducer = backend.make_reducer(self.prefix(), self.plan)
            self.go_on_with(*self._loaded)
        reduced, applies = self._reducer.reduce(gradients, names, self._bundles(numbers, optimizer))
        for index, gradient in zip(sent, reduced, strict=True):
            results[index] = gradient
        return results, applies

    def everywhere(self, flag: Any) -> Any:
        """Whether a scalar boolean tensor is true on all ranks."""
        return backend.everywhere(flag, f"{self.prefix()}/finite", self.plan.process_set)

    def prefix(self) -> str:
        """What names of this optimizer begin with.

        Numbered in the order of first use: an optimizer that some ranks make and never use, in a
        model they only look at, does not matter.
        """
        if not self._prefix:
            number = _used_names[self._name]
            _used_names[self._name] += 1
            self._prefix = f"{self._name}_{number}" if number else self._name
        return self._prefix

    def _bundles(self, numbers: list[int], optimizer: Any) -> tuple[tuple[int, ...], ...]:
        """Positions in `numbers`, which are variables' places in the optimizer, by operation."""
        groups = self.plan.groups
        if groups is None or isinstance(groups, int):
            return bundles(numbers, groups)
        known = optimizer._trainable_variables_indices
        keys = ([optimizer._var_key(variable) for variable in group] for group in groups)
        return bundles(numbers, [[known[key] for key in group if key in known] for group in keys])


class Reducing:
    """What is put in front of an optimizer's class, whichever Keras it is of."""

    _options: Options
    _reducer: GradientReducer

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._reducer = GradientReducer(self._options, f"Distributed{type(self).__name__}")

    @property
    def process_set(self) -> Any:
        """The ranks that take part."""
        return self._options.plan.process_set

    @property
    def scale_local_gradients(self) -> bool:
        """Whether gradients of local variables are divided by the number of ranks."""
        return self._options.scale_local_gradients

    def register_local_var(self, var: Any) -> None:
        """Leave a variable's gradients on this rank; before the first step."""
        self._reducer.local.register(var)


def _key(variable: Any) -> Any:
    """What a variable is known by: Keras 2 may wrap one in others, which share a number."""
    return getattr(variable, "_unique_id", None) or id(variable)


def readable(variable: Any) -> str:
    """Layer and variable; what is in front of them is another thing in models that were loaded."""
    path = getattr(variable, "path", None) or str(variable.name).replace(":", "_")
    return unnumbered("/".join(path.split("/")[-2:]))

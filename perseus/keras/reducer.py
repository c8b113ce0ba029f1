"""Reduces the gradients of one Keras optimizer: their names, groups and local variables.

Belongs to the thread that applies gradients, or that traces the function which applies them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from perseus.gradients.bundles import bundles
from perseus.gradients.local_sources import LocalSources
from perseus.gradients.names import unnumbered
from perseus.gradients.parameter_check import ParameterCheck
from perseus.gradients.participation import sums_over_steps, takes_part
from perseus.gradients.plan import Plan
from perseus.gradients.reducer import LateReducer
from perseus.gradients.rotation import parts_of
from perseus.gradients.scopes import Scope
from perseus.keras.backend import backend
from perseus.keras.learning_rate import learning_rate
from perseus.keras.library import keras
from perseus.keras.nesting import with_inner


@dataclass(frozen=True)
class Options:
    """The arguments of DistributedOptimizer, equal on all ranks.

    name: the prefix of gradients' names; None uses the optimizer's class.
    passes: backward_passes_per_step. average_passes: average_aggregated_gradients.
    """

    name: str | None
    plan: Plan
    scale_local_gradients: bool
    passes: int
    average_passes: bool


class GradientReducer(LateReducer):
    """Reduces one optimizer's gradients. name: the prefix of their names if options have none."""

    def __init__(self, options: Options, name: str) -> None:
        super().__init__()
        self.options = options
        self.plan = options.plan
        divided = partial(backend.divided_by_size, process_set=options.plan.process_set)
        scale = divided if options.scale_local_gradients else None
        self.local = LocalSources(_key, scale, "keras")
        self._scope = Scope(options.name or name, options.plan.process_set)
        self._check = ParameterCheck(options.plan.process_set)

    @backend.uncompiled
    def active(self) -> bool:
        """Return whether this rank has gradients to reduce; see takes_part()."""
        return takes_part(self.plan.process_set)

    def rotates(self) -> bool:
        """Return whether parameters are averaged in turn, for which take_turn() is called."""
        return self.active() and parts_of(self.plan) > 1

    @backend.uncompiled
    def before_backward(self, optimizer: Any, rate_of: Callable[[], Any]) -> None:
        """Announce that backward is next, followed by reduce().

        From the second step on, reductions begin during backward. rate_of: returns the
        `learning_rate` of reduce().
        """
        if self._reducer is None or self.plan.groups is not None:
            return
        shared = _once(v for v in optimizer._trainable_variables if self._is_reduced(v))
        names = [self._name_of(v, optimizer) for v in shared]
        self._reducer.before_backward(shared, names, rate_of)

    def _is_reduced(self, variable: Any) -> bool:
        return not (self.local.is_local(variable) or is_overwritten(variable))

    def _name_of(self, variable: Any, optimizer: Any) -> str:
        return f"{optimizer._get_variable_index(variable)}/{readable(variable)}"

    @backend.uncompiled
    def reduce(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        optimizer: Any,
        learning_rate: Any,
    ) -> tuple[list[Any], Any]:
        """Reduce the gradients of an optimizer's variables over all ranks.

        None stays None, but counts as zeros while PERSEUS_ACCUMULATE_N_STEPS sums gradients.

        learning_rate: of the step that applies them, a scalar tensor; None is not known.

        Gradients of local variables are left unchanged or divided by the number of ranks. Returns
        all gradients, and whether they may be applied: None means that they always may; other
        values are those of BackendReducer.reduce.

        Of variables that are overwritten with their gradients, every rank gets the maximum; codecs
        and sums over steps leave them out.
        """
        results = self._largest(gradients, variables)
        rest = [i for i, variable in enumerate(variables) if not is_overwritten(variable)]
        reduced, applies = self.local.around(
            lambda shared, sources: self._reduce(shared, sources, optimizer, learning_rate),
            [gradients[i] for i in rest],
            [variables[i] for i in rest],
        )
        for i, gradient in zip(rest, reduced, strict=True):
            results[i] = gradient
        return results, applies

    def _largest(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return gradients with maxima over all ranks for shared variables they overwrite."""
        results = list(gradients)
        chosen = [
            index
            for index, variable in enumerate(variables)
            if is_overwritten(variable)
            and not self.local.is_local(variable)
            and gradients[index] is not None
        ]
        if not chosen:
            return results
        flat = [keras.ops.reshape(keras.ops.cast(gradients[i], "float32"), [-1]) for i in chosen]
        name = f"{self._scope.prefix()}/overwriting"
        largest = backend.maximum(keras.ops.concatenate(flat), name, self.plan.process_set)
        begin = 0
        for index in chosen:
            shape = tuple(variables[index].shape)
            part = largest[begin : begin + prod(shape)]
            results[index] = keras.ops.cast(keras.ops.reshape(part, shape), variables[index].dtype)
            begin += prod(shape)
        return results

    @backend.uncompiled
    def take_turn(self, gradients: Sequence[Any], variables: Sequence[Any], optimizer: Any) -> None:
        """Average the variables that have gradients to reduce, if the compression does that.

        A collective, once per step whose gradients may be applied; see perseus.gradients.turns.
        """
        trained = _once(
            variable
            for gradient, variable in zip(gradients, variables, strict=True)
            if gradient is not None and self._is_reduced(variable)
        )
        if trained and self.rotates():
            self._reducer.take_turn(self._name_of(trained[0], optimizer), trained)

    def _reduce(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        optimizer: Any,
        learning_rate: Any,
    ) -> tuple[list[Any], Any]:
        results = gradients = _with_zeros(gradients, variables)
        # Of variables that are given twice, as tied weights of two models may be. What they have in
        # common is reduced once, in place.
        kinds = [(id(g), _key(v)) for g, v in zip(gradients, variables, strict=True)]
        first = {kind: index for index, kind in reversed(list(enumerate(kinds)))}
        sent = [i for i in sorted(first.values()) if gradients[i] is not None]
        if not sent:
            return results, None
        names = _apart(self._name_of(variables[index], optimizer) for index in sent)
        gradients = backend.compared(
            self._check,
            names,
            [variables[index] for index in sent],
            [gradients[index] for index in sent],
        )
        numbers = [optimizer._get_variable_index(variables[index]) for index in sent]
        if self._reducer is None:
            self._reducer = backend.make_reducer(self._scope, self.plan)
            self.go_on_with(*self._loaded)
        found = self._bundles(numbers, optimizer)
        reduced, applies = self._reducer.reduce(gradients, names, found, learning_rate)
        for index, gradient in zip(sent, reduced, strict=True):
            results[index] = gradient
        return [results[first[kind]] for kind in kinds], applies

    @backend.uncompiled
    def everywhere(self, flag: Any) -> Any:
        """Return whether a scalar boolean tensor is true on all ranks that have not joined."""
        return backend.everywhere(flag, f"{self._scope.prefix()}/finite", self.plan.process_set)

    def _bundles(self, numbers: list[int], optimizer: Any) -> tuple[tuple[int, ...], ...]:
        """Return bundles of positions in `numbers`, the variables' indices in the optimizer."""
        groups = self.plan.groups
        if groups is None or isinstance(groups, int):
            return bundles(numbers, groups)
        known = optimizer._trainable_variables_indices
        keys = ([optimizer._var_key(variable) for variable in group] for group in groups)
        return bundles(numbers, [[known[key] for key in group if key in known] for group in keys])


class Reducing:
    """The base of the mixins for optimizers of Keras 3 and Keras 2."""

    _kind: type  # the class of the wrapped optimizer
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

    def _check_clipping(self, variables: Sequence[Any]) -> None:
        """Raise ValueError if global_clipnorm sees a different norm on each rank.

        The norm is that of all gradients, so local ones would scale the reduced ones differently.
        """
        for optimizer in with_inner(self):
            if not getattr(optimizer, "global_clipnorm", None):
                continue
            local = [
                self._reducer.local.is_local(variable)
                for variable in variables
                if optimizer is self
                or optimizer._var_key(variable) in optimizer._trainable_variables_indices
            ]
            if any(local) and not all(local):
                raise ValueError(
                    "[keras] global_clipnorm with local variables lets ranks apply different "
                    "gradients of the variables that they share: use clipnorm or clipvalue"
                )

    def _rate(self) -> Any:
        """Return the `learning_rate` of GradientReducer.reduce() for the next step."""
        return learning_rate(self, self._kind)


def _with_zeros(gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Return gradients with zeros for missing ones while the core sums them over steps.

    A variable that is given twice has the same zeros in both places, as it has the same gradient.
    """
    if not sums_over_steps():
        return list(gradients)
    pairs = list(zip(gradients, variables, strict=True))
    missing = {_key(variable): variable for gradient, variable in pairs if gradient is None}
    zeros = {key: backend.zeros_like(variable) for key, variable in missing.items()}
    return [zeros[_key(variable)] if gradient is None else gradient for gradient, variable in pairs]


def _once(variables: Iterable[Any]) -> list[Any]:
    """Return variables without repetitions."""
    return list({_key(variable): variable for variable in variables}.values())


def _apart(names: Iterable[str]) -> list[str]:
    """Return names that differ: repetitions get a number, behind that of the variable."""
    seen: Counter[str] = Counter()
    made = []
    for name in names:
        index, _, rest = name.partition("/")
        made.append(f"{index}.{seen[name]}/{rest}" if seen[name] else name)
        seen[name] += 1
    return made


def is_overwritten(variable: Any) -> bool:
    """Return whether a variable's gradient is its new value, as of the scales of float8."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def _key(variable: Any) -> Any:
    """Return the identity of a variable. Wrappers of a Keras 2 variable share its _unique_id."""
    return getattr(variable, "_unique_id", None) or id(variable)


def readable(variable: Any) -> str:
    """Return the names of a variable and its layer.

    The rest of its path is left out, because it differs in models that were loaded.
    """
    path = getattr(variable, "path", None) or str(variable.name).replace(":", "_")
    return unnumbered("/".join(path.split("/")[-2:]))

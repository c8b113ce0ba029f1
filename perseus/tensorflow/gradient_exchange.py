"""Gradients on their way: one reduction for each, or for each group, in any kind of graph.

Used by the tape and the optimizers, which decide what happens with the results. Thread-safe.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from perseus import basics, config
from perseus.arguments import checked_compression, checked_op
from perseus.compat.common.extensions import split_list
from perseus.compression import Compressor, applied_here
from perseus.gradients.arguments import checked_predivide_factor
from perseus.gradients.names import unnumbered
from perseus.gradients.parameter_check import ParameterCheck
from perseus.gradients.residuals import Residuals
from perseus.process_sets import ProcessSet, checked
from perseus.tensorflow import ops
from perseus.tensorflow.modes import name_of, on_device, tf_variable
from perseus.tensorflow.ops import Average, Sum
from perseus.tensorflow.parameters import compared
from perseus.tensorflow.reductions import divided_by_size, reduce_slices


@dataclass(frozen=True)
class Plan:
    """How gradients are reduced; equal on all ranks.

    groups: an int makes that many groups, tuples of references of variables are taken as they are.
    """

    op: int
    compression: type[Compressor]
    process_set: ProcessSet
    predivide_factor: float = 1.0
    groups: int | tuple[tuple[Any, ...], ...] | None = None
    sparse_as_dense: bool = False
    device_dense: str = ""
    device_sparse: str = ""


def check_arguments(op: int, predivide_factor: float, compression: Any, process_set: Any) -> None:
    """ValueError for what is wrong or cannot be combined, TypeError for what is no process set."""
    number = checked_op(op, "tensorflow")
    checked_predivide_factor(predivide_factor, number, "tensorflow")
    checked_compression(compression, "tensorflow")
    checked(process_set)


def checked_groups(groups: Any, num_groups: int) -> int | tuple[tuple[Any, ...], ...] | None:
    """`groups=` as a Plan has it: None, a number, or references of variables; ValueError."""
    if num_groups != 0 and groups is None:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups`.",
            DeprecationWarning,
            stacklevel=3,
        )
        groups = num_groups
    if groups is None:
        return None
    if isinstance(groups, int):
        if groups <= 0:
            raise ValueError("groups should be a positive integer or a list of lists of variables")
        return groups
    if not (isinstance(groups, list) and all(isinstance(group, list) for group in groups)):
        raise ValueError("groups should be a positive integer or a list of lists of variables")
    references = tuple(tuple(tf_variable(variable).ref() for variable in group) for group in groups)
    members = [reference for group in references for reference in group]
    if len(set(members)) != len(members):
        raise ValueError("A variable can only appear once in groups")
    return references


def takes_part(process_set: ProcessSet) -> bool:
    """Whether this rank has anything to reduce in a set."""
    size = process_set.size()
    if size is None:
        raise ValueError("Process set provided does not exist, or has not been registered.")
    if not process_set.included():
        return False
    return size > 1 or config.elastic() or _accumulates() or _searches_nan()


def may_withhold() -> bool:
    """Whether settings let the core keep gradients of a step from being applied."""
    return basics.may_withhold_gradients()


def _accumulates() -> bool:
    return basics.setting("PERSEUS_ACCUMULATE_N_STEPS") > 1


def _searches_nan() -> bool:
    return basics.setting("PERSEUS_ALLREDUCE_NANCHECK") > 0


class GradientExchange:
    """Reduces lists of gradients by a plan.

    scope: what the names of its reductions begin with. lasting: dense ones are called in the core
    what they are called here, in whatever functions they are, so that `residuals` can be saved;
    the scope belongs to this exchange alone then. They are known there by what their names have in
    front of a slash.
    """

    def __init__(self, scope: str, plan: Plan, lasting: bool = False) -> None:
        self.plan = plan
        self._scope = scope
        self._number = basics.new_gradients()
        self.residuals = Residuals(self._number, plan.process_set.process_set_id)
        self._turns: weakref.WeakKeyDictionary[Any, int] | None = None
        if lasting:
            self._turns = weakref.WeakKeyDictionary()
        self._checks: dict[tuple[str, ...], ParameterCheck] = {}
        self._traced: dict[Any, Callable[..., tuple[list[Any], Any]]] = {}
        weakref.finalize(self, basics.forget_gradients, self._number).atexit = False

    def __call__(
        self, gradients: Sequence[Any], sources: Sequence[Any], generic_names: bool = False
    ) -> tuple[list[Any], Any]:
        """(reduced gradients, whether to apply them).

        gradients: tensors, tf.IndexedSlices or None, which stays None. sources: what they are the
        gradients of, variables mostly. generic_names: `grad_<i>` without the sources' names.
        The second is None where nothing is ever withheld, else a scalar bool tensor, equal on all
        ranks; where it is false the gradients must not be used.
        """
        gradients = list(gradients)
        if not takes_part(self.plan.process_set) or all(g is None for g in gradients):
            return gradients, None
        names = tuple(
            f"grad_{index}" if generic_names else _name(index, source)
            for index, source in enumerate(sources)
        )
        gradients = compared(self._check_of(names), names, sources, gradients)
        bundles = self._bundles(gradients, sources)
        return self.reduce(gradients, names, bundles)

    def reduce(
        self,
        gradients: list[Any],
        names: tuple[str, ...],
        bundles: tuple[tuple[int, ...], ...],
    ) -> tuple[list[Any], Any]:
        """The same with names and bundles, by index, that are given; sparse ones are in none."""
        if not tf.executing_eagerly():
            return self._reduce(gradients, names, bundles)
        reduced, applies = self._as_graph(names, bundles)(gradients)
        return list(reduced), applies

    def _check_of(self, names: tuple[str, ...]) -> ParameterCheck:
        """Of these sources: a tape that is made anew every step goes on counting."""
        if names not in self._checks:
            name = f"{self._scope}.{names[0]}"
            self._checks[names] = ParameterCheck(self.plan.process_set, name)
        return self._checks[names]

    def forget(self) -> None:
        """Drop what the core has summed up and held back."""
        basics.forget_gradients(self._number)

    def _as_graph(
        self, names: tuple[str, ...], bundles: tuple[tuple[int, ...], ...]
    ) -> Callable[..., tuple[list[Any], Any]]:
        """_reduce for eager tensors, whose reductions are to overlap too."""
        members = self.plan.process_set
        # What a trace is made for, beside dtypes and shapes.
        key = (names, bundles, members.process_set_id, members.size(), may_withhold())
        if key not in self._traced:
            self._traced[key] = tf.function(
                lambda gradients: self._reduce(gradients, names, bundles),
                autograph=False,
                reduce_retracing=True,
            )
        return self._traced[key]

    def _bundles(self, gradients: list[Any], sources: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
        """Which gradients are reduced by one operation, as indices."""
        groups = self.plan.groups
        dense = [i for i, gradient in enumerate(gradients) if self._is_dense(gradient)]
        if groups is None:
            return tuple((i,) for i in dense)
        if isinstance(groups, int):
            parts = split_list(dense, min(groups, len(dense))) if dense else []
            return tuple(tuple(part) for part in parts)
        index_of = {_reference(sources[i]): i for i in dense}
        grouped = [tuple(index_of[r] for r in group if r in index_of) for group in groups]
        taken = {i for bundle in grouped for i in bundle}
        return tuple(b for b in grouped if b) + tuple((i,) for i in dense if i not in taken)

    def _is_dense(self, gradient: Any) -> bool:
        if isinstance(gradient, tf.IndexedSlices):
            return self.plan.sparse_as_dense
        return gradient is not None

    def _reduce(
        self,
        gradients: Sequence[Any],
        names: tuple[str, ...],
        bundles: tuple[tuple[int, ...], ...],
    ) -> tuple[list[Any], Any]:
        results = list(gradients)
        outcomes: list[Any] = []
        turn = self._turn()
        with tf.name_scope(self._scope):
            for bundle in bundles:
                self._reduce_dense(bundle, results, names, outcomes, turn)
            for index, gradient in enumerate(results):
                if isinstance(gradient, tf.IndexedSlices):
                    results[index] = self._reduce_sparse(gradient, names[index])
                    outcomes.append(_outcome_of(results[index]))
        if not may_withhold():
            return results, None
        return results, tf.reduce_all(tf.equal(tf.stack(outcomes), 0))

    def _reduce_dense(
        self,
        bundle: tuple[int, ...],
        results: list[Any],
        names: tuple[str, ...],
        outcomes: list[Any],
        turn: str | None,
    ) -> None:
        plan = self.plan
        outer = applied_here(plan.compression)
        name, fixed_name = names[bundle[0]], None
        if turn is not None:
            fixed_name = f"{self._scope}/{name}{turn}"
            key = name.partition("/")[0] + turn
            self.residuals.know(key, fixed_name, len(bundle) > 1)
            self.residuals.hand_over(key)
        with on_device(plan.device_dense):
            pairs = [outer.compress(tf.convert_to_tensor(results[i])) for i in bundle]
            outputs, outcome = ops.allreduce(
                [sent for sent, _ in pairs], name, op=plan.op,
                prescale=1.0 / plan.predivide_factor, postscale=plan.predivide_factor,
                process_set=plan.process_set, gradient_of=self._number,
                codec=plan.compression.codec, codec_argument=plan.compression.argument,
                grouped=len(bundle) > 1, fixed_name=fixed_name,
            )  # fmt: skip
            outcomes += outcome or []
            for i, output, (_, context) in zip(bundle, outputs, pairs, strict=True):
                results[i] = outer.decompress(output, context)

    def _turn(self) -> str | None:
        """What makes fixed names unique in a graph; None where the nodes' names will do.

        A graph that applies gradients twice may have both in flight; its functions and branches run
        one after the other, since all change the same variables.
        """
        if self._turns is None:
            return None
        graph = tf.compat.v1.get_default_graph()
        turn = self._turns[graph] = self._turns.get(graph, 0) + 1
        return f"#{turn}" if turn > 1 else ""

    def _reduce_sparse(self, slices: Any, name: str) -> Any:
        plan = self.plan
        if plan.op not in (Average, Sum) or plan.predivide_factor != 1.0:
            raise NotImplementedError(
                f"[tensorflow] the gradient {name} is sparse, which needs op=Average or op=Sum and "
                "no gradient_predivide_factor: pass sparse_as_dense=True"
            )
        if _accumulates():
            raise ValueError(
                f"[tensorflow] the gradient {name} is sparse; PERSEUS_ACCUMULATE_N_STEPS sums "
                "dense ones: pass sparse_as_dense=True"
            )
        with on_device(plan.device_sparse):
            return reduce_slices(
                slices, name, plan.op, plan.process_set, plan.compression, self._number
            )


def _outcome_of(slices: Any) -> Any:
    """Of a sparse gradient, as the core's of a dense one: 2 where some rank had a NaN, else 0."""
    return tf.where(tf.reduce_any(tf.math.is_nan(slices.values)), 2, 0)


def _name(index: int, source: Any) -> str:
    name = "".join(c if c.isalnum() or c in "_./-" else "_" for c in unnumbered(name_of(source)))
    return f"grad_{index}_{name}" if name else f"grad_{index}"


def _reference(source: Any) -> Any:
    variable = tf_variable(source)
    return variable.ref() if isinstance(variable, tf.Variable) else None


class LocalSources:
    """Variables whose gradients stay on their rank: theirs are only scaled, if at all."""

    def __init__(self, process_set: ProcessSet, scale: bool) -> None:
        self._process_set = process_set
        self._scale = scale
        self._references: set[Any] = set()

    def register(self, source: Any) -> None:
        """Leave this one out from now on."""
        self._references.add(tf_variable(source).ref())

    def is_local(self, source: Any) -> bool:
        """Whether it was registered."""
        return bool(self._references) and _reference(source) in self._references

    def scaled(self, gradient: Any) -> Any:
        """A local gradient, over the number of ranks: the mean of reduced ones weighs it so."""
        if gradient is None or not self._scale:
            return gradient
        return divided_by_size(gradient, self._process_set)

    def around(
        self,
        reduce: Callable[[list[Any], list[Any]], tuple[list[Any], Any]],
        gradients: Sequence[Any],
        sources: Sequence[Any],
    ) -> tuple[list[Any], Any]:
        """Have `reduce` do what is not local; returns all gradients in order, and its verdict."""
        wide = [i for i, source in enumerate(sources) if not self.is_local(source)]
        reduced, applies = reduce([gradients[i] for i in wide], [sources[i] for i in wide])
        results = [
            self.scaled(gradient) if self.is_local(source) else gradient
            for gradient, source in zip(gradients, sources, strict=True)
        ]
        for i, gradient in zip(wide, reduced, strict=True):
            results[i] = gradient
        return results, applies

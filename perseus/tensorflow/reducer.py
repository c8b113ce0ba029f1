"""Gradients on their way: one reduction for each, or for each group, in any kind of graph.

Used by the tape and the optimizers, which decide what happens with the results. Thread-safe.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from perseus import basics
from perseus.compression import applied_here
from perseus.gradients.arguments import check_sparse
from perseus.gradients.bundles import bundles
from perseus.gradients.local_sources import LocalSources
from perseus.gradients.names import unnumbered
from perseus.gradients.outcome import Outcome
from perseus.gradients.parameter_check import ParameterCheck
from perseus.gradients.participation import takes_part
from perseus.gradients.plan import Plan
from perseus.gradients.reducer import Reducer
from perseus.process_sets import ProcessSet
from perseus.tensorflow import ops
from perseus.tensorflow.modes import name_of, on_device, tf_variable
from perseus.tensorflow.ops import Average, Sum
from perseus.tensorflow.parameter_check import compared
from perseus.tensorflow.reductions import divided_by_size, reduce_slices


def references_of(
    groups: int | Sequence[Sequence[Any]] | None,
) -> int | tuple[tuple[Any, ...], ...] | None:
    """Groups of variables as a Plan has them that is to be hashed: of references."""
    if groups is None or isinstance(groups, int):
        return groups
    return tuple(tuple(reference_of(variable) for variable in group) for group in groups)


def reference_of(variable: Any) -> Any:
    """What a variable is known by, whichever Keras or TensorFlow made it."""
    return tf_variable(variable).ref()


class GradientReducer(Reducer):
    """Reduces lists of gradients by a plan.

    scope: what the names of its reductions begin with. lasting: dense ones are called in the core
    what they are called here, in whatever functions they are, so that `residuals` can be saved;
    the scope belongs to this reducer alone then. They are known there by what their names have in
    front of a slash.
    """

    def __init__(self, scope: str, plan: Plan, lasting: bool = False) -> None:
        super().__init__(plan)
        self._scope = scope
        self._turns: weakref.WeakKeyDictionary[Any, int] | None = None
        if lasting:
            self._turns = weakref.WeakKeyDictionary()
        self._checks: dict[tuple[str, ...], ParameterCheck] = {}
        self._traced: dict[Any, Callable[..., tuple[list[Any], Any]]] = {}

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

    def _as_graph(
        self, names: tuple[str, ...], bundles: tuple[tuple[int, ...], ...]
    ) -> Callable[..., tuple[list[Any], Any]]:
        """_reduce for eager tensors, whose reductions are to overlap too."""
        members = self.plan.process_set
        # What a trace is made for, beside dtypes and shapes.
        key = (
            names,
            bundles,
            members.process_set_id,
            members.size(),
            basics.may_withhold_gradients(),
        )
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
        by_variable = not (groups is None or isinstance(groups, int))
        keys = [_reference(sources[i]) for i in dense] if by_variable else dense
        return tuple(tuple(dense[k] for k in bundle) for bundle in bundles(keys, groups))

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
        if not basics.may_withhold_gradients():
            return results, None
        return results, tf.reduce_all(tf.equal(tf.stack(outcomes), int(Outcome.REDUCED)))

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
                prescale=plan.prescale, postscale=plan.postscale,
                process_set=plan.process_set, gradient_of=self.number,
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
        check_sparse(name, "tensorflow")
        with on_device(plan.device_sparse):
            return reduce_slices(
                slices, name, plan.op, plan.process_set, plan.compression, self.number
            )


def _outcome_of(slices: Any) -> Any:
    """Of a sparse gradient, as the core's of a dense one: an Outcome."""
    has_nan = tf.reduce_any(tf.math.is_nan(slices.values))
    return tf.where(has_nan, int(Outcome.SKIPPED), int(Outcome.REDUCED))


def _name(index: int, source: Any) -> str:
    name = "".join(c if c.isalnum() or c in "_./-" else "_" for c in unnumbered(name_of(source)))
    return f"grad_{index}_{name}" if name else f"grad_{index}"


def _reference(source: Any) -> Any:
    variable = tf_variable(source)
    return variable.ref() if isinstance(variable, tf.Variable) else None


def local_sources(process_set: ProcessSet, scale: bool) -> LocalSources:
    """Those of one tape or optimizer; scale: divide their gradients by the number of ranks."""
    return LocalSources(
        _reference, partial(divided_by_size, process_set=process_set) if scale else None
    )

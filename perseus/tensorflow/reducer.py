"""Reduces gradients in eager mode and in graphs, by one operation for each or for each group.

The tape and the optimizers use it and decide how to use the results. Thread-safe.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from perseus import basics
from perseus.compression import applied_here, inside
from perseus.gradients.arguments import check_sparse
from perseus.gradients.bundles import bundles
from perseus.gradients.local_sources import LocalSources
from perseus.gradients.names import unnumbered
from perseus.gradients.outcome import Outcome
from perseus.gradients.parameter_check import ParameterCheck
from perseus.gradients.participation import sums_over_steps, takes_part
from perseus.gradients.plan import Plan
from perseus.gradients.reducer import Reducer
from perseus.gradients.rotation import parts_of
from perseus.gradients.scopes import Scope
from perseus.process_sets import ProcessSet
from perseus.tensorflow import ops
from perseus.tensorflow.compression import in_graphs
from perseus.tensorflow.modes import name_of, on_device, tf_variable
from perseus.tensorflow.ops import Average, Sum
from perseus.tensorflow.parameter_check import compared
from perseus.tensorflow.reductions import divided_by_size, reduce_slices
from perseus.tensorflow.rotation import VariableRotation, check_possible, rotated


def references_of(
    groups: int | Sequence[Sequence[Any]] | None,
) -> int | tuple[tuple[Any, ...], ...] | None:
    """Return groups with references instead of variables, so that a Plan with them is hashable."""
    if groups is None or isinstance(groups, int):
        return groups
    return tuple(tuple(reference_of(variable) for variable in group) for group in groups)


def reference_of(variable: Any) -> Any:
    """Return a hashable reference to a variable of TensorFlow or of any Keras."""
    return tf_variable(variable).ref()


class GradientReducer(Reducer):
    """Reduces lists of gradients according to a plan.

    scope: the prefix of the names of its reductions, or what has it in each world.
    lasting: use names that do not depend on the function in which a dense gradient is reduced, so
        that `residuals` can be saved. The scope must then belong to this reducer alone. The keys of
        the residuals are the names up to the first slash.
    """

    def __init__(self, scope: str | Scope, plan: Plan, lasting: bool = False) -> None:
        super().__init__(plan)
        self._scope_or_name = scope
        self._turns: weakref.WeakKeyDictionary[Any, int] | None = None
        if lasting:
            self._turns = weakref.WeakKeyDictionary()
        self._checks: dict[tuple[str, ...], ParameterCheck] = {}
        self._rotations: dict[tuple[Any, ...], VariableRotation] = {}
        self._traced: dict[Any, Callable[..., tuple[list[Any], Any]]] = {}

    @property
    def _scope(self) -> str:
        scope = self._scope_or_name
        return scope if isinstance(scope, str) else scope.prefix()

    def __call__(
        self,
        gradients: Sequence[Any],
        sources: Sequence[Any],
        generic_names: bool = False,
        learning_rate: Any = None,
    ) -> tuple[list[Any], Any]:
        """Return the reduced gradients, and whether to apply them.

        gradients: tensors, tf.IndexedSlices or None, which stays None, but counts as zeros while
            PERSEUS_ACCUMULATE_N_STEPS sums gradients.
        sources: the variables or tensors of which they are the gradients.
        generic_names: name gradients `grad_<i>`, without the names of the sources.
        learning_rate: see ops.allreduce.

        The second result is None if the settings never withhold gradients. Otherwise it is a scalar
        bool tensor, equal on all ranks; if it is false, the gradients must not be used.
        """
        gradients = list(gradients)
        if not takes_part(self.plan.process_set):
            return gradients, None
        if sums_over_steps():
            gradients = [
                tf.zeros_like(tf_variable(source)) if gradient is None else gradient
                for gradient, source in zip(gradients, sources, strict=True)
            ]
        if all(gradient is None for gradient in gradients):
            return gradients, None
        names = tuple(
            f"grad_{index}" if generic_names else _name(index, source)
            for index, source in enumerate(sources)
        )
        gradients = compared(self._check_of(names), names, sources, gradients)
        bundles = self._bundles(gradients, sources)
        gradients, applies = self.reduce(gradients, names, bundles, learning_rate)
        return self._rotated(names, sources, gradients, applies), applies

    def take_turn(self, name: str, variables: Sequence[Any]) -> None:
        """Average parameters after a step, if the compression does that.

        name: the name of the first gradient. variables: those that the step has changed.
        """
        rotation = self._rotation_of(name, variables)
        if rotation is not None:
            rotation.step()

    def _rotated(
        self, names: Sequence[str], sources: Sequence[Any], gradients: list[Any], applies: Any
    ) -> list[Any]:
        """Return reduced gradients, after averaging parameters if the compression does that.

        applies: the second result of reduce().
        """
        trained = [
            (name, source)
            for name, source, gradient in zip(names, sources, gradients, strict=True)
            if gradient is not None
        ]
        rotation = self._rotation_of(trained[0][0], [source for _, source in trained])
        return gradients if rotation is None else rotated(rotation, gradients, applies)

    def _rotation_of(self, name: str, sources: Sequence[Any]) -> VariableRotation | None:
        parts = parts_of(self.plan)
        if parts == 1:
            return None
        variables = [tf_variable(source) for source in sources]
        if not all(isinstance(variable, tf.Variable) for variable in variables):
            raise ValueError(
                "[tensorflow] Compression.rotate and PERSEUS_DOWNSAMPLE_N_ELEMENTS average "
                "variables: take the gradients with respect to tf.Variables, not to tensors"
            )
        name = f"{self._scope}/{name}"
        # Of several models, whose variables may be named alike.
        key = name, *(variable.ref() for variable in variables)
        known = self._rotations.get(key)
        if known is None or known.parts != parts:
            known = VariableRotation(variables, name, self.plan.process_set, parts)
            self._rotations[key] = known
        return known

    def reduce(
        self,
        gradients: list[Any],
        names: tuple[str, ...],
        bundles: tuple[tuple[int, ...], ...],
        learning_rate: Any = None,
    ) -> tuple[list[Any], Any]:
        """Reduce gradients with given names; see __call__.

        bundles: tuples of indices of the dense gradients that one operation reduces.
        """
        if parts_of(self.plan) > 1:
            check_possible()
        # A tensor, so that another rate does not trace another graph.
        rate = None if learning_rate is None else tf.cast(learning_rate, tf.float64)
        if not tf.executing_eagerly():
            if isinstance(self._scope_or_name, Scope):
                self._scope_or_name.keep()
            return self._reduce(gradients, names, bundles, rate)
        reduced, applies = self._as_graph(names, bundles)(gradients, rate)
        return list(reduced), applies

    def _check_of(self, names: tuple[str, ...]) -> ParameterCheck:
        """Return the check for these sources, which counts steps over all tapes with them."""
        if names not in self._checks:
            name = f"{self._scope}.{names[0]}"
            self._checks[names] = ParameterCheck(self.plan.process_set, name)
        return self._checks[names]

    def _as_graph(
        self, names: tuple[str, ...], bundles: tuple[tuple[int, ...], ...]
    ) -> Callable[..., tuple[list[Any], Any]]:
        """Return _reduce as a tf.function, in which the reductions of eager tensors overlap too."""
        members = self.plan.process_set
        # Everything that a trace depends on, besides dtypes and shapes.
        key = (
            self._scope,
            names,
            bundles,
            members.process_set_id,
            members.size(),
            basics.may_withhold_gradients(),
            parts_of(self.plan) > 1,
        )
        if key not in self._traced:
            self._traced[key] = tf.function(
                lambda gradients, rate: self._reduce(gradients, names, bundles, rate),
                autograph=False,
                reduce_retracing=True,
            )
        return self._traced[key]

    def _bundles(self, gradients: list[Any], sources: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
        """Return tuples of indices of the gradients that one operation reduces."""
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
        rate: Any,
    ) -> tuple[list[Any], Any]:
        results = list(gradients)
        outcomes: list[Any] = []
        turn = self._turn()
        with tf.name_scope(self._scope):
            for bundle in bundles:
                self._reduce_dense(bundle, results, names, outcomes, turn, rate=rate)
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
        *,
        rate: Any,
    ) -> None:
        plan = self.plan
        rotates = (parts := parts_of(plan)) > 1
        compression = inside(parts) if rotates else plan.compression
        outer = in_graphs(applied_here(compression))
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
                codec=compression.codec, codec_argument=compression.argument, learning_rate=rate,
                grouped=len(bundle) > 1, fixed_name=fixed_name,
            )  # fmt: skip
            outcomes += outcome or []
            for i, output, (_, context) in zip(bundle, outputs, pairs, strict=True):
                results[i] = outer.decompress(output, context)

    def _turn(self) -> str | None:
        """Return a suffix that makes fixed names unique in a graph; None if names are not fixed.

        A graph that reduces gradients twice may have both reductions in flight. Functions and
        branches are graphs of their own, but run one after the other, because they change the same
        variables. Eager reductions, as under tf.config.run_functions_eagerly(), do so as well.
        """
        if self._turns is None:
            return None
        if tf.executing_eagerly():
            return ""
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
    """Return the Outcome of a reduced sparse gradient, as the core does for dense ones."""
    has_nan = tf.reduce_any(tf.math.is_nan(slices.values))
    return tf.where(has_nan, int(Outcome.SKIPPED), int(Outcome.REDUCED))


def _name(index: int, source: Any) -> str:
    name = "".join(c if c.isalnum() or c in "_./-" else "_" for c in unnumbered(name_of(source)))
    return f"grad_{index}_{name}" if name else f"grad_{index}"


def _reference(source: Any) -> Any:
    """Return the identity of a variable, or of another source as long as it lives."""
    variable = tf_variable(source)
    return variable.ref() if isinstance(variable, tf.Variable) else id(source)


def local_sources(process_set: ProcessSet, scale: bool) -> LocalSources:
    """Return the LocalSources of one tape or optimizer.

    scale: divide the gradients of local sources by the number of ranks.
    """
    divided = partial(divided_by_size, process_set=process_set)
    return LocalSources(_reference, divided if scale else None, "tensorflow")

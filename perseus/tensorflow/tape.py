"""DistributedGradientTape: a tf.GradientTape whose gradients are reduced over all ranks.

Also the function by which optimizers that scripts have written themselves do that.
Source of behaviour: Horovod 0.28.1, horovod.tensorflow.
"""

# ruff: noqa: PLR0917 - the signatures are Horovod's

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import tensorflow as tf

from perseus.compression import Compressor
from perseus.gradients.arguments import (
    checked_groups,
    checked_local_layers,
    checked_reduction,
    wrapped_twice,
)
from perseus.gradients.local_sources import LocalSources
from perseus.gradients.plan import Plan
from perseus.process_sets import ProcessSet, global_process_set
from perseus.tensorflow.compression import Compression
from perseus.tensorflow.modes import belongs_to_program, converted, tf_variable
from perseus.tensorflow.ops import Average
from perseus.tensorflow.reducer import (
    GradientReducer,
    local_sources,
    reference_of,
    references_of,
)
from perseus.tensorflow.residuals import GradientResiduals

_WITHHELD = (
    "[tensorflow] PERSEUS_ACCUMULATE_N_STEPS or PERSEUS_ALLREDUCE_NANCHECK_ACTION=skip: on steps "
    "that are not to be applied, the reduced gradients are zeros, which optimizers with momentum "
    "still act on. Apply gradients only where tape.applies is true, or use DistributedOptimizer."
)


@functools.cache
def _reducer_without_variables(plan: Plan) -> GradientReducer:
    return GradientReducer("DistributedGradientTape_Allreduce", plan)


def _reducer(plan: Plan, sources: Sequence[Any]) -> GradientReducer:
    """Return the reducer of these sources.

    Scripts create a new tape in every step; the core's state of its gradients continues. Gradients
    of two models may have the same names, so each has a state of its own, which lives as long as
    its first variable.
    """
    variables = [tf_variable(source) for source in sources]
    # Not a function's arguments, which are other variables in each call and end with the trace.
    variables = [v for v in variables if isinstance(v, tf.Variable) and belongs_to_program(v)]
    if not variables:
        return _reducer_without_variables(plan)
    made: dict[Any, GradientReducer] = variables[0].__dict__.setdefault("_perseus_reducers", {})
    key = plan, *(variable.ref() for variable in variables)
    if key not in made:
        made[key] = GradientReducer("DistributedGradientTape_Allreduce", plan)
    return made[key]


@functools.cache
def _warn_of_withheld() -> None:
    warnings.warn(_WITHHELD, stacklevel=5)


class _DistributedGradientTape(tf.GradientTape):  # type: ignore[misc]
    """The mixin that DistributedGradientTape puts in front of the wrapped tape's class.

    applies: after gradient(), whether to apply the gradients: True, or a scalar bool tensor if the
        settings may withhold gradients. If it is false, the gradients are zeros.
    """

    process_set: ProcessSet
    scale_local_gradients: bool
    applies: Any
    _plan: Plan
    _local: LocalSources
    _kept: GradientResiduals | None

    def register_local_source(self, source: Any) -> None:
        """Leave the gradient of this variable on its rank."""
        self._local.register(source)

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """Return the gradients of tf.GradientTape, reduced over all ranks.

        None stays None, but counts as zeros while PERSEUS_ACCUMULATE_N_STEPS sums gradients.

        use_generic_names: name the reductions by position only, for ranks whose variables have
            different names. Raises ValueError and NotImplementedError for sparse gradients that the
            arguments do not allow.
        """
        own: Any = super().gradient  # as a function: AutoGraph takes the method for one of ours
        own = converted(own.__func__)
        gradients = own(self, target, sources, output_gradients, unconnected_gradients)
        flat_sources, flat = tf.nest.flatten(sources), _flat(gradients)
        reduced = self._reduced(flat_sources, flat, use_generic_names)
        return _packed(sources, gradients, reduced)

    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Return two lists of (source, gradient): local gradients, and reduced ones."""
        flat_sources = tf.nest.flatten(sources)
        flat = _flat(self.gradient(target, sources, output_gradients, use_generic_names))
        pairs = list(zip(flat_sources, flat, strict=True))
        return (
            [pair for pair in pairs if self._local.is_local(pair[0])],
            [pair for pair in pairs if not self._local.is_local(pair[0])],
        )

    def _reducer(self, sources: Sequence[Any]) -> GradientReducer:
        if self._kept is not None:
            return self._kept.reducer(self._plan)
        return _reducer(self._plan, sources)

    def _reduced(self, sources: list[Any], gradients: list[Any], generic: bool) -> list[Any]:
        reduced, applies = self._local.around(
            lambda g, s: self._reducer(s)(g, s, generic), gradients, sources
        )
        self.applies = True if applies is None else applies
        return _zeros_unless(applies, reduced)


def _flat(gradients: Any) -> list[Any]:
    return list(tf.nest.flatten(gradients))  # tf.IndexedSlices and None are leaves


def _packed(sources: Any, gradients: Any, flat: list[Any]) -> Any:
    if not tf.nest.is_nested(gradients):
        return flat[0]
    return tf.nest.pack_sequence_as(sources, flat)


def _zeros_unless(applies: Any, gradients: list[Any]) -> list[Any]:
    """Return gradients where they are to be applied, else zeros; applies: None is always."""
    if applies is None:
        return gradients
    _warn_of_withheld()
    return [_only_where(applies, gradient) for gradient in gradients]


def _only_where(applies: Any, gradient: Any) -> Any:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values = _only_where(applies, gradient.values)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return tf.where(applies, gradient, tf.zeros_like(gradient))


def DistributedGradientTape(  # noqa: N802 - the name is Horovod's
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.settings,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    residuals: GradientResiduals | None = None,
) -> Any:
    """A tape of the same class whose gradient() reduces over all ranks.

    gradtape: a tf.GradientTape that has recorded, or that will: `with
        hvd.DistributedGradientTape(tf.GradientTape()) as tape`.
    device_dense, device_sparse: where the reductions run; "" leaves it to TensorFlow.
    compression: how gradients are encoded on their way. Without it the settings decide, by default
        float16 between hosts; Compression.none keeps full precision everywhere.
    sparse_as_dense: send tf.IndexedSlices as dense tensors; without it their values and indices
        are gathered, with op Average or Sum only.
    op: Average, Sum, Min, Max, Product or Adasum, of gradients.
    gradient_predivide_factor: f: gradients are divided by f before and by size / f after the sum;
        only with Average.
    groups: reduce several gradients as one operation: an int makes that many groups in order; lists
        of variables form groups as given, all others are reduced one by one. Formerly num_groups.
    process_set: the ranks that take part.
    scale_local_gradients: divide gradients that stay on their rank by the number of ranks.
    residuals: keeps the residuals of lossy codecs for checkpoints; see hvd.GradientResiduals.

    Returns the tape, with register_local_source() and `applies`. ValueError for
    inconsistent arguments.
    """
    checked_reduction(op, gradient_predivide_factor, compression, process_set, "tensorflow")
    if isinstance(gradtape, _DistributedGradientTape):
        raise wrapped_twice("tensorflow", "tape")
    if not isinstance(gradtape, tf.GradientTape):
        raise ValueError(
            f"[tensorflow] DistributedGradientTape expected a tf.GradientTape, got {gradtape!r}; "
            f"write hvd.DistributedGradientTape(tape) after `with tf.GradientTape() as tape:`"
        )
    wrapped = type(gradtape)
    made_class = type(wrapped.__name__, (_DistributedGradientTape, wrapped), {})
    made = cast(_DistributedGradientTape, cast(Any, made_class).__new__(made_class))
    made.__dict__.update(gradtape.__dict__)
    made._recording = False  # the code that pushed the wrapped tape pops it
    made.process_set = process_set
    made.scale_local_gradients = scale_local_gradients
    made.applies = True
    made._kept = residuals
    made._local = local_sources(process_set, scale_local_gradients)
    made._plan = Plan(
        op=op,
        compression=compression,
        process_set=process_set,
        predivide_factor=gradient_predivide_factor,
        groups=references_of(checked_groups(groups, num_groups, "variable", reference_of)),
        sparse_as_dense=sparse_as_dense,
        device_dense=device_dense,
        device_sparse=device_sparse,
    )
    return made


def PartialDistributedGradientTape(  # noqa: N802 - the name is Horovod's
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.settings,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    residuals: GradientResiduals | None = None,
) -> Any:
    """DistributedGradientTape that leaves the gradients of some layers on their rank.

    local_layers: a Keras layer or an iterable of them, built; their trainable weights are local.
        ValueError for anything else.
    """
    tape = DistributedGradientTape(
        gradtape, device_dense, device_sparse, compression, sparse_as_dense, op,
        gradient_predivide_factor, num_groups, groups, process_set, scale_local_gradients,
        residuals,
    )  # fmt: skip
    for layer in checked_local_layers(local_layers, "tensorflow"):
        for variable in layer.trainable_weights:
            tape.register_local_source(variable)
    return tape


def _make_allreduce_grads_fn(
    name: str,
    device_dense: str,
    device_sparse: str,
    compression: type[Compressor],
    sparse_as_dense: bool,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[..., list[Any]]:
    """Return what reduces the gradients of a script's own optimizer, made once for it.

    name: begins the names of its reductions. groups: 0, in scripts for earlier versions of Horovod,
    is None. The rest: see DistributedGradientTape.

    The result takes (grads, vars=None, use_generic_names=False) and returns a list: None stays
    None, and steps that are not to be applied give zeros. vars: the gradients' variables. Settings
    that average these, or need zeros in place of None, raise ValueError without them.
    """
    checked_reduction(op, gradient_predivide_factor, compression, process_set, "tensorflow")
    plan = Plan(
        op=op,
        compression=compression,
        process_set=process_set,
        predivide_factor=gradient_predivide_factor,
        groups=references_of(checked_groups(groups or None, 0, "variable", reference_of)),
        sparse_as_dense=sparse_as_dense,
        device_dense=device_dense,
        device_sparse=device_sparse,
    )
    reducer = GradientReducer(f"{name}_Allreduce", plan)

    def allreduce_grads(grads: Any, vars: Any = None, use_generic_names: bool = False) -> list[Any]:
        gradients = list(grads)
        sources = gradients if vars is None else list(vars)
        reduced, applies = reducer(gradients, sources, use_generic_names)
        return _zeros_unless(applies, reduced)

    return allreduce_grads

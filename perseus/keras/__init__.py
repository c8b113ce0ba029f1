"""The public face for Keras: `import perseus.keras as hvd` in the place of horovod.keras.

Keras 3 may run on TensorFlow or PyTorch (KERAS_BACKEND). Keras 2 comes with TensorFlow 2.15, or as
tf_keras if TF_USE_LEGACY_KERAS=1 is set.
"""
# ruff: noqa: PLR0917 - the signatures are Horovod's

from __future__ import annotations

from typing import Any

import perseus.keras.library  # noqa: F401 - first of all: it says that Keras is missing
from perseus.basics import (
    abort,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    flush_residuals,
    gloo_built,
    gloo_enabled,
    init,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from perseus.gradients.arguments import checked_local_layers
from perseus.gradients.rotation import synchronize_parameters
from perseus.keras import callbacks, elastic
from perseus.keras.backend import backend
from perseus.keras.functions import (
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    reducescatter,
)
from perseus.keras.models import load_model
from perseus.keras.wrapping import distribute, make_options
from perseus.operations import ReduceOp
from perseus.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Sum",
    "abort",
    "add_process_set",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "flush_residuals",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "synchronize_parameters",
]

Compression = backend.Compression
Average = ReduceOp.Average
Sum = ReduceOp.Sum
Adasum = ReduceOp.Adasum


def DistributedOptimizer(  # noqa: N802 - the name is Horovod's
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.settings,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    num_groups: int = 0,
    groups: Any = None,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """An optimizer of the same class that reduces gradients over all ranks before each step.

    optimizer: any optimizer of Keras, also a LossScaleOptimizer around one; its options and state
        are taken over; those in a MultiOptimizer are not copied. With gradient_accumulation_steps
        gradients are sent once per step. Keras 2 reduces in minimize() and compute_gradients(), not
        in apply_gradients(), as in Horovod. On PyTorch, change gradients between scale_loss() and
        apply() on all ranks or on none, and under torch.no_grad(), not through `.data`, which
        PyTorch does not report.
    name: the prefix of its reductions' names, equal on all ranks; without one, a number.
    device_dense, device_sparse: where reductions run on TensorFlow; "" leaves it to TensorFlow.
    compression: how gradients are encoded on their way. Without it the settings decide, by default
        float16 between hosts; Compression.none keeps full precision everywhere.
    sparse_as_dense: send tf.IndexedSlices as dense tensors; without it their rows are gathered.
    gradient_predivide_factor: f: gradients are divided by f before and by size / f after the sum;
        only with Average.
    op: Average or Sum.
    groups: reduce several gradients as one operation: an int makes that many groups in order; lists
        of variables form groups as given, all others are reduced one by one. Formerly num_groups.
    backward_passes_per_step: calls of apply whose gradients each rank sums before it sends them;
        average_aggregated_gradients divides the sums by that number. Not together with an
        optimizer's gradient_accumulation_steps, which averages.
    process_set: the ranks that take part.
    scale_local_gradients: divide gradients of local variables (register_local_var) by the number
        of ranks.

    Raises ValueError for inconsistent arguments.
    """
    plan = make_options(
        name, device_dense, device_sparse, compression, sparse_as_dense,
        gradient_predivide_factor, op, backward_passes_per_step, average_aggregated_gradients,
        num_groups, groups, process_set, scale_local_gradients,
    )  # fmt: skip
    return distribute(optimizer, plan)


def PartialDistributedOptimizer(  # noqa: N802 - the name is Horovod's
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.settings,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """DistributedOptimizer that leaves gradients of some layers on their rank.

    local_layers: a layer or several, built, or ValueError. The rest: see DistributedOptimizer.
    """
    made = DistributedOptimizer(
        optimizer, name, device_dense, device_sparse, compression, sparse_as_dense,
        gradient_predivide_factor, op, 0, groups, backward_passes_per_step,
        average_aggregated_gradients, process_set, scale_local_gradients,
    )  # fmt: skip
    inner = getattr(made, "inner_optimizer", made)
    for layer in checked_local_layers(local_layers, "keras"):
        for variable in layer.trainable_weights:
            inner.register_local_var(variable)
    return made

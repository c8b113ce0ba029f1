"""The public face: `import perseus.tensorflow.horovod as hvd` replaces `horovod.tensorflow`."""

from importlib import import_module
from typing import Any

import tensorflow as tf

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
    is_homogeneous,
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
from perseus.compat.common.extensions import check_extension, gpu_available, split_list
from perseus.compat.common.extensions import num_rank_is_power_2 as check_num_rank_power_of_2
from perseus.errors import HorovodInternalError, HostsUpdatedInterrupt
from perseus.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from perseus.tensorflow import (
    compression,
    functions,
    gradient_aggregation,
    mpi_ops,
    sync_batch_norm,
)
from perseus.tensorflow import modes as util
from perseus.tensorflow.compression import Compression
from perseus.tensorflow.functions import (
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from perseus.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from perseus.tensorflow.modes import (
    _executing_eagerly,  # noqa: F401 - Horovod's own tests ask for it here
    refs_to_vars,
    vars_to_refs,
)
from perseus.tensorflow.mpi_ops import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    _allreduce,  # noqa: F401 - scripts use these four, although they begin with an underscore
    _grouped_allreduce,  # noqa: F401
    _grouped_reducescatter,  # noqa: F401
    _reducescatter,  # noqa: F401
    allgather,
    alltoall,
    broadcast,
    broadcast_,
    grouped_allgather,
    handle_average_backwards_compatibility,
    join,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    size_op,
)
from perseus.tensorflow.optimizer import (
    DistributedOptimizer,
    _DistributedOptimizer,  # noqa: F401 - scripts ask whether an optimizer is one
)
from perseus.tensorflow.reductions import (
    allreduce,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from perseus.tensorflow.residuals import GradientResiduals
from perseus.tensorflow.rotation import synchronize_parameters
from perseus.tensorflow.sync_batch_norm import SyncBatchNormalization
from perseus.tensorflow.tape import (
    DistributedGradientTape,
    PartialDistributedGradientTape,
    _make_allreduce_grads_fn,  # noqa: F401 - scripts' own optimizers use it
)

__all__ = [
    "Adasum",
    "Average",
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "GradientResiduals",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "LocalGradientAggregationHelper",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "abort",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "ccl_built",
    "check_extension",
    "check_num_rank_power_of_2",
    "compression",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "flush_residuals",
    "functions",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "gpu_available",
    "gradient_aggregation",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "handle_average_backwards_compatibility",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_ops",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "refs_to_vars",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "split_list",
    "start_timeline",
    "stop_timeline",
    "sync_batch_norm",
    "synchronize_parameters",
    "util",
    "vars_to_refs",
]


_LegacyOptimizer = tf.compat.v1.train.Optimizer  # scripts derive optimizers from it

# Imported when a script asks for them: `hvd.keras.callbacks`, `hvd.elastic.run`.
_LATER = {
    "elastic": "perseus.tensorflow.elastic",
    "keras": "perseus.tensorflow.horovod.keras",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return import_module(_LATER[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Where each module of Horovod's is in Perseus: the one table of names. Immutable."""

from __future__ import annotations

# Horovod's name -> the module that stands for it; None = a package with nothing in it but modules.
# A module that is not written yet is missing at run time too, with an error that says so.
MODULES: dict[str, str | None] = {
    "horovod": "perseus.compat.package",
    "horovod.common": None,
    "horovod.common.basics": "perseus.compat.common.basics",
    "horovod.common.elastic": "perseus.elastic",
    "horovod.common.exceptions": "perseus.errors",
    "horovod.common.process_sets": "perseus.process_sets",
    "horovod.common.util": "perseus.compat.common.extensions",
    "horovod.keras": "perseus.keras",
    "horovod.mxnet": "perseus.mxnet",
    "horovod.mxnet.compression": "perseus.mxnet.compression",
    "horovod.mxnet.functions": "perseus.mxnet.functions",
    "horovod.mxnet.mpi_ops": "perseus.mxnet.mpi_ops",
    "horovod.runner": "perseus.compat.runner",
    "horovod.runner.common": None,
    "horovod.runner.common.service": None,
    "horovod.runner.common.service.compute_service": "perseus.compute_service",
    "horovod.runner.common.util": None,
    "horovod.runner.common.util.env": "perseus.compat.rank_variables",
    "horovod.runner.common.util.hosts": "perseus.compat.hosts",
    "horovod.runner.util": None,
    "horovod.runner.util.threads": "perseus.compat.threads",
    "horovod.tensorflow": "perseus.tensorflow.horovod",
    "horovod.tensorflow.compression": "perseus.tensorflow.compression",
    "horovod.tensorflow.data": "perseus.tensorflow.data",
    "horovod.tensorflow.data.compute_service": "perseus.tensorflow.data.compute_service",
    "horovod.tensorflow.data.compute_worker": "perseus.tensorflow.data.compute_worker",
    "horovod.tensorflow.elastic": "perseus.tensorflow.elastic",
    "horovod.tensorflow.functions": "perseus.tensorflow.functions",
    "horovod.tensorflow.gradient_aggregation": "perseus.tensorflow.gradient_aggregation",
    "horovod.tensorflow.gradient_aggregation_eager": (
        "perseus.tensorflow.gradient_aggregation_eager"
    ),
    "horovod.tensorflow.keras": "perseus.tensorflow.horovod.keras",
    "horovod.tensorflow.mpi_ops": "perseus.tensorflow.mpi_ops",
    "horovod.tensorflow.sync_batch_norm": "perseus.tensorflow.sync_batch_norm",
    "horovod.tensorflow.util": "perseus.tensorflow.modes",
    "horovod.torch": "perseus.torch.horovod",
    "horovod.torch.compression": "perseus.torch.compression",
    "horovod.torch.elastic": "perseus.torch.elastic",
    "horovod.torch.elastic.sampler": "perseus.torch.elastic.sampler",
    "horovod.torch.elastic.state": "perseus.torch.elastic.state",
    "horovod.torch.functions": "perseus.torch.functions",
    "horovod.torch.mpi_ops": "perseus.torch.mpi_ops",
    "horovod.torch.optimizer": "perseus.torch.optimizer",
    "horovod.torch.sync_batch_norm": "perseus.torch.sync_batch_norm",
}

"""HorovodBasics: the functions of perseus.basics as methods, as `horovod.common.basics` has them.

Scripts reach it as `hvd.mpi_ops._basics`. Holds nothing; thread-safe as perseus.basics is.
"""

from __future__ import annotations

from perseus import basics
from perseus import extensions as util
from perseus.process_sets import ProcessSet, global_process_set

__all__ = ["HorovodBasics", "ProcessSet", "global_process_set", "util"]


class HorovodBasics:
    """One world per process, whichever of these objects is asked.

    pkg_path, args: where Horovod finds its library; unused here.
    """

    # enum perseus_reduce_op, with Horovod's numbers.
    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5

    init = staticmethod(basics.init)
    shutdown = staticmethod(basics.shutdown)
    is_initialized = staticmethod(basics.is_initialized)
    size = staticmethod(basics.size)
    local_size = staticmethod(basics.local_size)
    cross_size = staticmethod(basics.cross_size)
    rank = staticmethod(basics.rank)
    local_rank = staticmethod(basics.local_rank)
    cross_rank = staticmethod(basics.cross_rank)
    is_homogeneous = staticmethod(basics.is_homogeneous)
    mpi_threads_supported = staticmethod(basics.mpi_threads_supported)
    mpi_enabled = staticmethod(basics.mpi_enabled)
    mpi_built = staticmethod(basics.mpi_built)
    gloo_enabled = staticmethod(basics.gloo_enabled)
    gloo_built = staticmethod(basics.gloo_built)
    nccl_built = staticmethod(basics.nccl_built)
    ddl_built = staticmethod(basics.ddl_built)
    ccl_built = staticmethod(basics.ccl_built)
    cuda_built = staticmethod(basics.cuda_built)
    rocm_built = staticmethod(basics.rocm_built)

    def __init__(self, pkg_path: str = "", *args: str) -> None:
        pass

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        """The registered process sets; only the global one exists so far."""
        return {0: basics.group_ranks(0) or []}

"""HorovodBasics: the functions of perseus.basics as methods, as `horovod.common.basics` has them.

Scripts reach it as `hvd.mpi_ops._basics`. Holds nothing; thread-safe as perseus.basics is.
"""

from __future__ import annotations

from typing import Any

from perseus import basics
from perseus.compat.common import extensions as util
from perseus.operations import ReduceOp
from perseus.process_sets import ProcessSet, global_process_set, ids_and_ranks

__all__ = ["HorovodBasics", "ProcessSet", "global_process_set", "util"]


class HorovodBasics:
    """One world per process, whichever of these objects is asked; see perseus.basics.

    pkg_path, args: where Horovod finds its library; unused here.
    """

    Average = ReduceOp.Average
    Sum = ReduceOp.Sum
    Adasum = ReduceOp.Adasum
    Min = ReduceOp.Min
    Max = ReduceOp.Max
    Product = ReduceOp.Product

    def __init__(self, pkg_path: str = "", *args: str) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"'HorovodBasics' object has no attribute {name!r}")
        return getattr(basics, name)

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        """Every registered process set's global ranks by its id."""
        return ids_and_ranks()

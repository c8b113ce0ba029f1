"""The plan that says how gradients are reduced; all frameworks share it. Immutable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from perseus.arguments import OPS
from perseus.compression import Compressor, SettingsCompressor, compressor
from perseus.process_sets import ProcessSet, global_process_set


@dataclass(frozen=True)
class Plan:
    """The arguments of an optimizer wrapper or a tape; equal on all ranks.

    predivide_factor: gradients are divided by it before they are summed, and multiplied afterwards.
    groups: a number, or lists of the adapter's parameters; see bundles.bundles.
    device_dense, device_sparse: where TensorFlow runs the reductions; "" leaves it to TensorFlow.
    """

    op: int = OPS.index("Average")
    compression: type[Compressor] = SettingsCompressor
    process_set: ProcessSet = global_process_set
    predivide_factor: float = 1.0
    groups: int | Sequence[Sequence[Any]] | None = None
    sparse_as_dense: bool = False
    device_dense: str = ""
    device_sparse: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "compression", compressor(self.compression))

    @property
    def prescale(self) -> float:
        """The factor by which gradients are multiplied before the reduction."""
        return 1.0 / float(self.predivide_factor)

    @property
    def postscale(self) -> float:
        """The factor by which results are multiplied after the reduction."""
        return float(self.predivide_factor)

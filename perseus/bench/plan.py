"""What one job measures: written by perseus-bench, read by its ranks. Values only, thread-safe."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

PERSEUS = "perseus"
TORCH, TENSORFLOW = "torch", "tensorflow"  # frameworks, by the names of their packages
PEERS = {TORCH: ("torch-gloo", "mpi", "horovod"), TENSORFLOW: ("multiworker",)}
DDP = "torch-ddp-gloo"  # torch-gloo's name in training
NEED_MPIRUN = ("mpi", "horovod")  # formed by mpirun only
OWN_SIZES = ("tensors", "training")  # cases that --sizes does not change
IN_EQUAL_PARTS = ("allgather", "reducescatter", "alltoall")  # operations that part a size by rank
MARK = "PERSEUS-BENCH "  # begins a record's line in a job's output


@dataclass(frozen=True)
class Plan:
    """Cases in order, against whom, how large and for how long.

    sizes: bytes; empty = what is usual for the case. seconds: for each table row, all contenders
    together. codecs: by label, beside plain. advise: no cases, but what settings to use; compute_s:
    a step's computation then, None = measured. rate_gbit and links describe the hosts' network, for
    the records. framework: whose tensors are reduced; TensorFlow is there for training.
    """

    cases: list[str]
    peers: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    models: list[str] = field(default_factory=list)
    codecs: list[str] = field(default_factory=list)
    seconds: float = 3.0
    advise: bool = False
    compute_s: float | None = None
    rate_gbit: float | None = None
    links: int = 1
    framework: str = TORCH

    def to_json(self) -> str:
        """The plan as one line."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(line: str) -> Plan:
        """The plan that to_json wrote."""
        return Plan(**json.loads(line))

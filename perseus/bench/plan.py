"""The plan of what one job measures, which perseus-bench passes to the ranks. Immutable."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

PERSEUS = "perseus"
GROUP = "perseus-group"  # Perseus as a backend of torch.distributed, where PERSEUS is the hvd API
TORCH, TENSORFLOW = "torch", "tensorflow"  # frameworks, by the names of their packages
PEERS = {TORCH: ("torch-gloo", "mpi", "horovod"), TENSORFLOW: ("multiworker",)}
DDP = "torch-ddp-gloo"  # the name of torch-gloo in training
FP16_HOOK, POWERSGD_HOOK = "fp16-hook", "powersgd-hook"  # torch's, on gloo, in place of a codec
ALONE, NO_EXCHANGE = "compute-only", "no-exchange"  # what no communication can beat
LEAST_COPIES = "least-copies"  # and a sum: what no exchange through shared memory can beat
NEED_MPIRUN = ("mpi", "horovod")  # peers that work only if mpirun starts the ranks
OWN_SIZES = ("tensors", "training")  # cases that --sizes does not change
ON_GPUS = ("network", "gradients")  # cases that --gpu measures
ON_DDP = ("ddp", "ddp-training")  # need torch-gloo; --sizes are those of DDP's buckets
IN_EQUAL_PARTS = ("allgather", "reducescatter", "alltoall")  # give each rank a part of the size
MARK = "PERSEUS-BENCH "  # the beginning of a record's line in a job's output


@dataclass(frozen=True)
class Plan:
    """The cases to measure, in order, with their peers, sizes and durations.

    sizes: in bytes; [] = the usual ones for a case.
    codecs: labels of codecs to measure in addition to none.
    seconds: for each row of the table, for all contenders together.
    advise: measure no case, but find out which settings to use.
    compute_s: seconds that a step computes, for the advice; None = measure it.
    rate_gbit, links: the hosts' network, for the records.
    framework: TensorFlow supports the case training only.
    gpu: tensors are on the GPUs of a machine, which its ranks share if there are fewer.
    here: all ranks are on this machine, on virtual hosts or not.
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
    gpu: bool = False
    here: bool = True

    def to_json(self) -> str:
        """Return the plan as one line of JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(line: str) -> Plan:
        """Return the plan that to_json() wrote."""
        return Plan(**json.loads(line))

"""The session of one rank in a job: its world, its peers and their measurements.

One thread per rank.
"""

from __future__ import annotations

import os
import statistics
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from perseus import basics, config, control, stats
from perseus.bench.codecs import PLAIN, Codec
from perseus.bench.plan import PERSEUS, TORCH, Plan
from perseus.bench.record import Record, bus_factor, counters_match, pairwise_ratio
from perseus.bench.sampling import Contender, Samples, measure

if TYPE_CHECKING:
    import numpy as np

    from perseus.bench.peers import Peer

_ON = 2  # of LIGHT_2D_ALLREDUCE: auto|0|1
_MPI = 1  # of PERSEUS_CPU_OPERATIONS: perseus|mpi


@dataclass
class Subject:
    """A task that several contenders perform, the first of which the others are compared with.

    size: in bytes. settings: are added to the records. images: processed by a rank in one call.
    """

    case: str
    size: int
    contenders: list[Contender]
    tensors: int = 1
    settings: dict[str, str] = field(default_factory=dict)
    images: int = 0


class Session:
    """The ranks that measure (a sampling.World), their plan and their peers.

    encodes: whether codecs act on gradients.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.rank, self.size = basics.rank(), basics.size()
        self.hosts = self.share(basics.local_rank() == 0).count(True)
        self.encodes = any(self.share(_is_apart_from_first() or _is_in_small_groups()))
        self.counts_wire = self.hosts > 1 and basics.local_rank() == 0
        self.device = _take_gpu(plan) if plan.gpu else "cpu"
        self.peers = self._formed() if plan.framework == TORCH else []
        self._settings = _own_settings()
        if not self.encodes and set(plan.codecs) - {PLAIN}:
            self._say(
                f"--codec {','.join(plan.codecs)}: nothing is encoded, because all ranks share the "
                f"memory of one host: see --hosts and PERSEUS_TRANSPORT"
            )

    def barrier(self) -> None:
        """Return once every rank has called it."""
        control.barrier()

    def agree(self, value: float) -> float:
        """Return rank 0's value. A collective."""
        found: float = self.share(value)[0]
        return found

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Return the values of every rank, ordered by rank. A collective."""
        return self.share(list(values))

    def share(self, value: object) -> list[Any]:
        """Return the value of every rank, ordered by rank. A collective."""
        return control.allgather_object(value, "bench.share", 0)

    def sizes(self, usual: list[int]) -> list[int]:
        """Return the plan's sizes in bytes, or the usual ones of a case if it has none."""
        return self.plan.sizes or usual

    def payload(self, operation: str, size: int) -> int | None:
        """Return the bytes that an operation must send from each host.

        Returns None if they depend on the algorithm, as on a single host, with several ranks per
        host, or where the user has chosen one.
        """
        chosen = self._settings.get("PERSEUS_ALLREDUCE_ALGORITHM", "auto") != "auto"
        if chosen or self.hosts < 2 or self.hosts != self.size:
            return None
        return round(bus_factor(operation, self.size) * size)

    def payloads(self, codec: Codec, size: int) -> dict[str, Any]:
        """Return the payload of an allreduce through a codec, as arguments of a Contender."""
        plain = self.payload("allreduce", size)
        if plain is None:
            return {}
        least, most = codec.share(self.size)
        return {"payload": int(least * plain), "payload_most": int(most * plain)}

    def acting(self, codec: Codec) -> Codec:
        """Return the codec by which gradients travel here: the given one, or none."""
        return codec if self.encodes else Codec(PLAIN)

    def same(self, arrays: Iterable[np.ndarray[Any, Any]]) -> bool:
        """Return whether the arrays have the same bits on all ranks. A collective."""
        found = 0
        for array in arrays:
            found = zlib.crc32(array.reshape(-1).view("u1").data, found)
        return len(set(self.share(found))) == 1

    def to_its_end(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls another one and waits until the GPU has done it, too."""
        if not self.plan.gpu:
            return run
        from torch.cuda import synchronize

        def run_to_its_end(*arguments: Any) -> None:
            run(*arguments)
            synchronize()

        return run_to_its_end

    def records(self, subject: Subject) -> list[Record]:
        """Measure a subject; return a record for each contender. A collective.

        The records are equal on all ranks, except for this rank's own statistics.
        """
        samples = measure(self, subject.contenders, self.plan.seconds)
        reference = samples[subject.contenders[0].key].seconds
        return [
            self._record(subject, contender, samples[contender.key], reference)
            for contender in subject.contenders
        ]

    def _record(
        self, subject: Subject, contender: Contender, samples: Samples, reference: list[float]
    ) -> Record:
        ours = contender.name == PERSEUS
        median = statistics.median(samples.seconds)
        note, verified = "", samples.verified
        if not verified:
            note = "wrong result"
        elif not counters_match(samples.wire_bytes, contender.payload, contender.payload_most):
            note, verified = "the interfaces' counters do not match the algorithm", False
        return Record(
            case=subject.case,
            peer=contender.name,
            operation=contender.operation,
            ranks=self.size,
            hosts=self.hosts,
            bytes=subject.size,
            median_s=median,
            min_s=min(samples.seconds),
            n=len(samples.seconds),
            verified=verified,
            rate_gbit=self.plan.rate_gbit,
            links=self.plan.links,
            wire_bytes=samples.wire_bytes,
            wire_bytes_expected=contender.payload,
            wire_bytes_limit=contender.payload_most,
            codec=contender.codec,
            settings={**(self._settings if ours else {}), **subject.settings},
            tensors=subject.tensors,
            vs_perseus=pairwise_ratio(samples.seconds, reference),
            images_per_s=self.size * subject.images / median if subject.images else None,
            staging_bytes=stats()["staging_bytes"] if ours else None,
            load1=round(os.getloadavg()[0], 2),
            note=note,
        )

    def _formed(self) -> list[Peer]:
        from perseus.bench.peers import form

        return form(self.plan.peers, self._skipped)

    def _skipped(self, name: str, reason: str) -> None:
        self._say(f"{name} is skipped: {reason}")

    def _say(self, text: str) -> None:
        if self.rank == 0:
            print(f"perseus-bench: {text}", flush=True)


def _is_apart_from_first() -> bool:
    """Return whether this rank shares no memory with rank 0."""
    return basics.rank() > 0 and basics.transport(0) == "tcp"


def _is_in_small_groups() -> bool:
    """Return whether settings divide ranks that share memory into groups, as Topology does.

    See common/topology/topology.cc.
    """
    in_groups = basics.setting("LIGHT_2D_ALLREDUCE") == _ON
    by_mpi = basics.setting("PERSEUS_CPU_OPERATIONS") == _MPI
    return in_groups and not by_mpi and basics.local_size() > basics.setting("LIGHT_INTRA_SIZE")


def _take_gpu(plan: Plan) -> str:
    """Make a GPU of this machine the current one; return the name of its device in PyTorch."""
    from torch import cuda

    if cuda.device_count() == 0:
        raise RuntimeError("[bench] --gpu: PyTorch sees no GPU on this host")
    index = (basics.rank() if plan.here else basics.local_rank()) % cuda.device_count()
    cuda.set_device(index)
    return f"cuda:{index}"


def _own_settings() -> dict[str, str]:
    """Return the variables of Perseus that are set for this job, except for paths."""
    paths = ("PERSEUS_SECRET_FILE", "PERSEUS_FLIGHT_RECORDER")
    entries = (entry for entry in config.variables() if entry.name not in paths)
    known = (name for entry in entries for name in (entry.name, *entry.aliases))
    return {name: os.environ[name] for name in known if os.environ.get(name)}

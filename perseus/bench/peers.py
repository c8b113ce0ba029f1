"""The contenders: Perseus, and other libraries beside it in the same processes.

A peer exists on all ranks or on none. All tensors are contiguous float32 in host memory, and every
reduction is a sum. One thread per rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import perseus.torch.horovod as perseus_hvd
from perseus.bench.network import own_address
from perseus.bench.plan import PERSEUS

_GLOO_TIMEOUT = timedelta(seconds=120)


class Peer(Protocol):
    """The collectives that cases time.

    Results may be new tensors or the given ones; `output` has the shape of the result.
    """

    name: str

    def allreduce_(self, tensor: torch.Tensor, name: str) -> None:
        """Sum a tensor over all ranks in place."""

    def allreduce(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return the sum, by the blocking call that a script would use for a metric."""

    def allreduce_many_(self, tensors: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        """Start the sums of all tensors in place, then wait for all of them."""

    def allgather(self, tensor: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, concatenated in rank order."""

    def broadcast_(self, tensor: torch.Tensor) -> None:
        """Overwrite a tensor with rank 0's."""

    def reducescatter(self, tensor: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the sum; all parts are equally large."""

    def alltoall(self, tensor: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Send part r of the tensor to rank r; return the received parts in rank order."""


class HorovodPeer:
    """Perseus or Horovod, which have the same functions; see Peer."""

    def __init__(self, name: str, hvd: Any) -> None:
        self.name = name
        self._hvd = hvd

    def allreduce_(self, tensor: torch.Tensor, name: str) -> None:
        self._hvd.allreduce_(tensor, name=name, op=self._hvd.Sum)

    def allreduce(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        result: torch.Tensor = self._hvd.allreduce(tensor, name=name, op=self._hvd.Sum)
        return result

    def allreduce_many_(self, tensors: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        start, op = self._hvd.allreduce_async_, self._hvd.Sum
        handles = [start(t, name=n, op=op) for t, n in zip(tensors, names, strict=True)]
        for handle in handles:
            self._hvd.synchronize(handle)

    def allgather(self, tensor: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        gathered: torch.Tensor = self._hvd.allgather(tensor, name="bench.allgather")
        return gathered

    def broadcast_(self, tensor: torch.Tensor) -> None:
        self._hvd.broadcast_(tensor, 0, name="bench.broadcast")

    def reducescatter(self, tensor: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        part: torch.Tensor = self._hvd.reducescatter(
            tensor, name="bench.reducescatter", op=self._hvd.Sum
        )
        return part

    def alltoall(self, tensor: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        exchanged: Any = self._hvd.alltoall(tensor, name="bench.alltoall")
        # Horovod returns the received splits too, Perseus only if splits were given.
        result: torch.Tensor = exchanged[0] if isinstance(exchanged, tuple) else exchanged
        return result


@contextmanager
def _interface_for_gloo(local: bool) -> Iterator[None]:
    """Set the variable of gloo's interface within the context, unless the user has set it.

    Perseus reads the variable as well, so it must not stay set.
    """
    name = "GLOO_SOCKET_IFNAME"
    interfaces = "lo" if local else os.environ.get("PERSEUS_GLOO_NETWORK_INTERFACE")
    if name in os.environ or not interfaces:
        yield
        return
    os.environ[name] = interfaces
    try:
        yield
    finally:
        del os.environ[name]


class GroupPeer:
    """The functions of torch.distributed on a process group; see Peer."""

    def __init__(self, name: str, group: dist.ProcessGroup | None) -> None:
        self.name = name
        self._group = group  # None = the default one
        # In newer versions of torch, the older functions warn in every call.
        self._gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        self._scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

    def allreduce_(self, tensor: torch.Tensor, name: str) -> None:
        dist.all_reduce(tensor, group=self._group)

    def allreduce(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        dist.all_reduce(tensor, group=self._group)
        return tensor

    def allreduce_many_(self, tensors: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        works = [dist.all_reduce(tensor, group=self._group, async_op=True) for tensor in tensors]
        for work in works:
            assert work is not None
            work.wait()

    def allgather(self, tensor: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        self._gather(output, tensor, group=self._group)
        return output

    def broadcast_(self, tensor: torch.Tensor) -> None:
        dist.broadcast(tensor, 0, group=self._group)

    def reducescatter(self, tensor: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        self._scatter(output, tensor, group=self._group)
        return output

    def alltoall(self, tensor: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        dist.all_to_all_single(output, tensor, group=self._group)
        return output


class GlooPeer(GroupPeer):
    """The default group, over gloo, as DistributedDataParallel uses it on CPUs."""

    name = "torch-gloo"

    def __init__(self) -> None:
        super().__init__(self.name, None)
        rank, size = perseus_hvd.rank(), perseus_hvd.size()
        master = rank == 0
        place = [own_address(), 0]
        if master:
            store = self._store(place[0], 0, size, True)
            place[1] = store.port
        place = perseus_hvd.broadcast_object(place, 0)
        if not master:
            store = self._store(place[0], place[1], size, False)
        with _interface_for_gloo(local=perseus_hvd.local_size() == size):
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=size, timeout=_GLOO_TIMEOUT
            )

    @staticmethod
    def _store(host: Any, port: Any, size: int, master: bool) -> TCPStore:
        return TCPStore(host, port, size, master, _GLOO_TIMEOUT, wait_for_workers=False)


class MpiPeer:
    """MPI through mpi4py, directly on the tensors' memory; see Peer."""

    name = "mpi"

    def __init__(self) -> None:
        self._mpi: Any = import_module("mpi4py.MPI")
        self._world: Any = self._mpi.COMM_WORLD

    def allreduce_(self, tensor: torch.Tensor, name: str) -> None:
        self._world.Allreduce(self._mpi.IN_PLACE, tensor.numpy())

    def allreduce(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        self.allreduce_(tensor, name)
        return tensor

    def allreduce_many_(self, tensors: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        in_place = self._mpi.IN_PLACE
        self._mpi.Request.Waitall([self._world.Iallreduce(in_place, t.numpy()) for t in tensors])

    def allgather(self, tensor: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        self._world.Allgather(tensor.numpy(), output.numpy())
        return output

    def broadcast_(self, tensor: torch.Tensor) -> None:
        self._world.Bcast(tensor.numpy(), 0)

    def reducescatter(self, tensor: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        self._world.Reduce_scatter_block(tensor.numpy(), output.numpy())
        return output

    def alltoall(self, tensor: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        self._world.Alltoall(tensor.numpy(), output.numpy())
        return output


def _make_horovod() -> Peer:
    hvd = import_module("horovod.torch")
    hvd.init()
    return HorovodPeer("horovod", hvd)


def _no_gloo() -> str | None:
    return None if dist.is_gloo_available() else "this torch is built without gloo"


def _no_mpi() -> str | None:
    try:
        size = import_module("mpi4py.MPI").COMM_WORLD.Get_size()
    except Exception as error:
        return f"mpi4py cannot be used: {error}"
    wanted = perseus_hvd.size()
    return None if size == wanted else f"MPI's world has {size} ranks, expected {wanted}"


def _no_horovod() -> str | None:
    try:
        hvd = import_module("horovod.torch")
        if not hvd.mpi_built():
            return "this Horovod is built without MPI, and mpirun started the ranks"
    except Exception as error:
        return f"horovod.torch cannot be used: {error}"
    return _no_mpi()


_TABLE: dict[str, tuple[Callable[[], str | None], Callable[[], Peer]]] = {
    "torch-gloo": (_no_gloo, GlooPeer),
    "mpi": (_no_mpi, MpiPeer),
    "horovod": (_no_horovod, _make_horovod),
}


def form(names: Sequence[str], skipped: Callable[[str, str], None]) -> list[Peer]:
    """Return Perseus and those of the named peers that are available on all ranks. A collective.

    skipped: is called with the name of each other peer and the reason.
    """
    peers: list[Peer] = [HorovodPeer(PERSEUS, perseus_hvd)]
    for name in names:
        reason, make = _TABLE[name]
        reasons = [text for text in perseus_hvd.allgather_object(reason()) if text]
        if reasons:
            skipped(name, reasons[0])
        else:
            peers.append(make())
    return peers


def disband() -> None:
    """End the peers that form() has returned, except Perseus."""
    if dist.is_initialized():
        dist.destroy_process_group()

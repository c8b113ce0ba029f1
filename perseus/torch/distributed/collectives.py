"""The collectives of c10d on the core, under the names by which torch calls a backend.

Mixed into a Backend or a ProcessGroup, whatever this torch takes. Every collective is exact.
Tensors lie in host memory or on an NVIDIA GPU, with any strides, which may differ between ranks:
what is not row-major travels as a copy that is. Options come from torch.distributed, which has
checked their types. Any thread may start collectives; ranks pair them by their order, which they
count apart for callbacks of futures (future.py).

Errors: ValueError for tensors that cannot take part; torch.distributed.DistBackendError, from the
returned work's wait(), where ranks disagree or one has ended, which the message names. A group that
has ended raises it there, too: torch hangs in a backward pass whose communication hook raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from perseus.errors import HorovodInternalError
from perseus.operations import Kind, ReduceOp
from perseus.torch.distributed.completer import calling
from perseus.torch.distributed.pending import InPlace
from perseus.torch.distributed.reductions import (
    BITWISE,
    RedOpType,
    Reduction,
    core_reduction,
    kind_of,
)
from perseus.torch.distributed.streams import gpu_of
from perseus.torch.distributed.work import (
    NO_LIMIT,
    Done,
    Receive,
    Work,
    composing,
    joined,
)
from perseus.torch.distributed.world import World
from perseus.torch.session import DTYPES, keep
from perseus.torch.sparse import header_and_indices, sparse_total

Tensors = list[torch.Tensor]
_ANY_RANK = -1  # PERSEUS_ANY_RANK
_SPARSE_OPS = {RedOpType.SUM: ReduceOp.Sum, RedOpType.AVG: ReduceOp.Average}


def _are_row_major(tensors: Sequence[torch.Tensor]) -> bool:
    return all(tensor.is_contiguous() for tensor in tensors)


def _by_copies(tensors: Tensors, start: Callable[[Tensors], Work]) -> Work:
    """Start a collective that writes `tensors`, some of which are not row-major.

    start: is given row-major ones in their place, which are copied back when the collective ends.
    """
    for tensor in tensors:
        if any(step == 0 and n > 1 for step, n in zip(tensor.stride(), tensor.shape, strict=True)):
            raise ValueError(
                "[torch] elements of a tensor that is written share memory, as expand() makes "
                "them: call .contiguous()"
            )
    rows = [tensor.detach().contiguous() for tensor in tensors]
    with composing():
        work = start(rows).copying_back(rows, tensors)
    return work.published()


def _only(tensors: Sequence[Any]) -> Any:
    if len(tensors) != 1:
        raise ValueError(f"[torch] expected one tensor for this process, got {len(tensors)}")
    return tensors[0]


def _root(opts: Any, size: int) -> int:
    root: int = opts.rootRank
    if not 0 <= root < size:
        raise ValueError(f"[torch] invalid root rank {root}, in a group of {size} ranks")
    return root


def _movable(tensor: torch.Tensor) -> torch.Tensor:
    """A view of one dimension in a dtype that the core can move; of a copy if not row-major."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.dtype in DTYPES:
        return flat
    return torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat.view(torch.uint8)


def _reducible(tensor: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    return torch.view_as_real(tensor) if reduction.in_parts else tensor


def _one_row(flat: torch.Tensor) -> torch.Tensor:
    """What ranks gather in parts of one size: the core lets their numbers of rows differ."""
    return flat.view(1, flat.numel())


def _flattened(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    parts = [_movable(tensor) for tensor in tensors]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _spread(flat: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
    """Copy the parts of `flat` into the outputs, one after the other."""
    with torch.inference_mode():  # where all tensors can be written, also its own
        parts = [_movable(output) for output in outputs]
        pieces = torch.split(flat, [part.numel() for part in parts])
        for part, piece in zip(parts, pieces, strict=True):
            part.copy_(piece)


def _lies_apart(given: torch.Tensor, output: torch.Tensor, rank: int) -> bool:
    """Whether `given`, of which `output` has one for every rank, is no other rank's part there."""
    offset, size = given.data_ptr() - output.data_ptr(), given.nbytes
    return offset == rank * size or not -size < offset < output.nbytes


def _same_elements(outputs: Sequence[torch.Tensor], given: int, what: str) -> None:
    wanted = sum(output.numel() for output in outputs)
    if wanted != given:
        raise ValueError(f"[torch] {what}: the output has {wanted} elements, expected {given}")


def _of_each_rank(outputs: Sequence[torch.Tensor], size: int, given: int, what: str) -> None:
    if [output.numel() for output in outputs] != [given] * size:
        raise ValueError(
            f"[torch] {what}: expected {size} tensors of {given} elements in the list, got "
            f"{[output.numel() for output in outputs]}"
        )


def _take_parts(received: Any, wanted: Sequence[int], what: str) -> torch.Tensor:
    """Return what an alltoall has received, `wanted` elements from each rank."""
    values: torch.Tensor = received[0]
    for rank, (came, expected) in enumerate(zip(received[1], wanted, strict=True)):
        if came != expected:
            width = values.element_size()
            raise ValueError(
                f"[torch] {what}: {came * width} bytes came from rank {rank}, but the output has "
                f"{expected * width} for it: make sizes agree in pairs of ranks"
            )
    return values


def _in_rows(tensor: torch.Tensor, splits: Sequence[int], size: int) -> list[int]:
    """The elements of each rank's part of the first dimension; equal parts if splits are empty."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if not splits and rows % size:
        raise ValueError(
            f"[torch] all_to_all: the first dimension ({rows}) is no multiple of {size} "
            f"ranks: pass split sizes"
        )
    if splits and (len(splits) != size or sum(splits) != rows):
        raise ValueError(
            f"[torch] all_to_all: expected {size} split sizes whose sum is the first "
            f"dimension ({rows}), got {list(splits)}"
        )
    row = _movable(tensor).numel() // rows if rows else 0
    return [row * each for each in splits or [rows // size] * size]


def _same_dtype(outputs: Sequence[torch.Tensor], given: Sequence[torch.Tensor], what: str) -> None:
    # The core writes as many bytes as are given, and would overrun a narrower output.
    dtypes = {str(tensor.dtype) for tensor in (*outputs, *given)}
    if len(dtypes) > 1:
        raise ValueError(
            f"[torch] {what}: input and output must have the same dtype, got "
            f"{' and '.join(sorted(dtypes))}"
        )


def _combined(parts: torch.Tensor, combine: Any) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        combine(total, part, out=total)
    return total


class _Settling(InPlace):
    """Ends a barrier: waits for what its rank has begun before it."""

    def __init__(self, world: World) -> None:
        super().__init__([])
        self._pending, self._earlier = world.pending, world.pending.under_way()

    def __call__(self, _: Any) -> Tensors:
        for settle in self._earlier:
            settle()
        self._earlier.clear()
        self._pending.raise_unseen()
        return []


class Collectives:
    """c10d's methods. The class that this is mixed into sets `world`."""

    world: World
    started: int  # collectives, on this rank

    def _begin(self) -> None:
        self.started = 0
        self._done = Done(self.world, [])
        self._callback_numbers, self._outside_numbers = count(), count()

    def _submit(
        self,
        kind: Kind,
        given: Any,
        finish: Callable[[Any], Tensors],
        output: Any = None,
        awaited: bool = False,
        **arguments: Any,
    ) -> Work:
        """awaited: torch waits before it goes on, and nobody else sees the returned work."""
        self.started += 1
        if self.world.pending.left:
            self.world.pending.end_left()
        try:
            handle = self.world.operations.submit(
                kind, self._next_name(), given, output, transient=True, **arguments
            )
        except HorovodInternalError as error:
            return Work.failed(self.world, error)
        if not awaited:
            return Work(self.world, [(handle, finish)], gpu_of(given))
        try:
            finish(self.world.operations.synchronize(handle))
        except Exception as error:
            return Work.failed(self.world, error)
        return self._done

    def _next_name(self) -> str | None:
        """Return None where ranks pair collectives by their order; callbacks have their own.

        Their names differ by whose future calls: the thread of this group, or another one.
        """
        completer = calling()
        if completer is None:
            return None
        if completer is self.world.completer:
            return f"callback.{next(self._callback_numbers)}"
        return f"callback outside.{next(self._outside_numbers)}"

    # ---- reductions ----

    def allreduce(self, tensors: Tensors, opts: Any) -> Work:
        """Reduce a tensor over all ranks, in place."""
        tensor = _only(tensors)
        if tensor.is_sparse:
            return self._allreduce_sparse(tensor, opts)
        if not tensor.is_contiguous():
            return _by_copies(tensors, lambda rows: self.allreduce(rows, opts))
        reduction = core_reduction(opts.reduceOp, tensor.dtype)
        if reduction is None:
            return self._allreduce_bits(tensor, BITWISE[kind_of(opts.reduceOp)])
        own = _reducible(tensor, reduction)
        return self._reduce(own, own, reduction, tensors, not opts.asyncOp)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any) -> Work:
        """Reduce several tensors over all ranks, in place, as one operation."""
        if not _are_row_major(tensors):
            return _by_copies(tensors, lambda rows: self.allreduce_coalesced(rows, opts))
        reductions = {core_reduction(opts.reduceOp, tensor.dtype) for tensor in tensors}
        if len(reductions) != 1 or None in reductions:
            raise ValueError("[torch] coalesced tensors are reduced alike, and not bit by bit")
        reduction = reductions.pop()
        assert reduction is not None
        own = tuple(_reducible(tensor, reduction) for tensor in tensors)
        return self._reduce(own, own, reduction, tensors, not opts.asyncOp)

    def _reduce(
        self, given: Any, result: Any, reduction: Reduction, tensors: Tensors, awaited: bool
    ) -> Work:
        if not awaited or calling() is not None:
            finish = InPlace(tensors, keeps=result is not given)
            return self._submit(
                Kind.ALLREDUCE, given, finish, result, awaited, op=reduction.op,
                prescale=reduction.prescale,
            )  # fmt: skip
        # The same, without what takes as long as the reduction of a few bytes.
        self.started += 1
        if self.world.pending.left:
            self.world.pending.end_left()
        operations = self.world.operations
        try:
            handle = operations.submit(
                Kind.ALLREDUCE, None, given, result, op=reduction.op, prescale=reduction.prescale
            )
            operations.synchronize(handle)
        except HorovodInternalError as error:
            return Work.failed(self.world, error)
        return self._done

    def _allreduce_bits(self, tensor: torch.Tensor, combine: Any) -> Work:
        flat = _movable(tensor)

        def finish(gathered: torch.Tensor) -> Tensors:
            _spread(_combined(gathered.view(self.world.size, -1), combine), [tensor])
            keep(flat)
            return [tensor]

        return self._submit(Kind.ALLGATHER, _one_row(flat), finish)

    def reduce(self, tensors: Tensors, opts: Any) -> Work:
        """Reduce a tensor over all ranks; only the root's is overwritten."""
        tensor = _only(tensors)
        root = _root(opts, self.world.size) == self.world.rank
        if not tensor.is_contiguous():
            if root:
                return _by_copies(tensors, lambda rows: self.reduce(rows, opts))
            tensor = tensor.detach().contiguous()
        reduction = core_reduction(opts.reduceOp, tensor.dtype)
        if reduction is None:
            own = tensor if root else tensor.clone()
            return self._allreduce_bits(own, BITWISE[kind_of(opts.reduceOp)])
        given = _reducible(tensor, reduction)
        result = given if root else torch.empty_like(given)
        return self._reduce(given, result, reduction, tensors, not opts.asyncOp)

    def reduce_scatter_single(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        opts: c10d.ReduceScatterOptions | None = None,
    ) -> Work:
        """Reduce `given` over all ranks; this rank gets its part, in rank order, as `output`."""
        opts = opts or c10d.ReduceScatterOptions()
        if not output.is_contiguous():
            return _by_copies(
                [output], lambda rows: self.reduce_scatter_single(rows[0], given, opts)
            )
        _same_dtype([output], [given], "reduce_scatter")
        size = self.world.size
        if given.numel() != output.numel() * size:
            _same_elements([output], given.numel() // size, "reduce_scatter")
            raise ValueError(
                f"[torch] reduce_scatter: {given.numel()} elements cannot be split evenly among "
                f"{size} ranks"
            )
        reduction = core_reduction(opts.reduceOp, given.dtype)
        if reduction is None:
            return self._reduce_scatter_bits(output, given, BITWISE[kind_of(opts.reduceOp)])
        parts = _reducible(given.contiguous(), reduction).reshape(size, -1)
        return self._submit(
            Kind.REDUCESCATTER, parts, InPlace([output]),
            _reducible(output, reduction).view(1, -1), op=reduction.op, prescale=reduction.prescale,
        )  # fmt: skip

    def _reduce_scatter_bits(self, output: torch.Tensor, given: torch.Tensor, combine: Any) -> Work:
        splits = [_movable(output).numel()] * self.world.size

        def finish(received: Any) -> Tensors:
            parts = _take_parts(received, splits, "reduce_scatter").view(self.world.size, -1)
            _spread(_combined(parts, combine), [output])
            return [output]

        return self._submit(Kind.ALLTOALL, _movable(given), finish, splits=splits)

    def reduce_scatter(
        self, outputs: Tensors, given: list[Tensors], opts: c10d.ReduceScatterOptions | None = None
    ) -> Work:
        """Reduce a list of tensors over all ranks; this rank gets the one of its own index.

        The tensors of a list may differ in size; those of one index must not.
        """
        output, parts = _only(outputs), _only(given)
        opts = opts or c10d.ReduceScatterOptions()
        _same_dtype([output], parts, "reduce_scatter")
        size, rank = self.world.size, self.world.rank
        sizes = [part.numel() for part in parts]
        if len(parts) != size or sizes[rank] != output.numel():
            raise ValueError(
                f"[torch] reduce_scatter: expected {size} tensors, with {output.numel()} elements "
                f"in that of rank {rank}, got {sizes}"
            )
        joint = torch.cat([part.reshape(-1) for part in parts])
        if len(set(sizes)) == 1:
            return self.reduce_scatter_single(output, joint, opts)
        # The core scatters equal parts.
        options = c10d.AllreduceOptions()
        options.reduceOp = opts.reduceOp
        own = torch.split(joint, sizes)[rank].view(output.shape)

        def write(_: Tensors) -> Tensors:
            with torch.inference_mode():  # where all tensors can be written, also its own
                output.copy_(own)
            keep(own)
            return [output]

        with composing():
            work = self.allreduce([joint], options).ending_with(write)
        return work.published()

    def reduce_scatter_single_coalesced(
        self,
        outputs: Tensors,
        given: Tensors,
        opts: c10d.ReduceScatterOptions | None = None,
    ) -> Work:
        """reduce_scatter_single of several tensors."""
        pairs = zip(outputs, given, strict=True)
        return joined(
            self.world, lambda: [self.reduce_scatter_single(*pair, opts) for pair in pairs]
        )

    # ---- broadcast, gather, scatter ----

    def broadcast(self, tensors: Tensors, opts: Any) -> Work:
        """Overwrite a tensor with that of the root."""
        tensor = _only(tensors)
        if not tensor.is_contiguous():
            return _by_copies(tensors, lambda rows: self.broadcast(rows, opts))
        own = _movable(tensor)
        return self._submit(
            Kind.BROADCAST, own, InPlace(tensors), own, not opts.asyncOp, root=opts.rootRank
        )

    def all_gather_single(
        self, output: torch.Tensor, given: torch.Tensor, opts: Any = None
    ) -> Work:
        """Join the tensors of all ranks, which are of one size, in `output`."""
        if not output.is_contiguous():
            return _by_copies([output], lambda rows: self.all_gather_single(rows[0], given, opts))
        _same_dtype([output], [given], "all_gather")
        _same_elements([output], given.numel() * self.world.size, "all_gather")
        return self._gather([output], given)

    def allgather(self, outputs: list[Tensors], given: Tensors, opts: Any = None) -> Work:
        """Copy the tensors of all ranks, which are of one size, into a list of tensors."""
        own, parts = _only(given), _only(outputs)
        if not _are_row_major(parts):
            return _by_copies(parts, lambda rows: self.allgather([rows], given, opts))
        _same_dtype(parts, [own], "all_gather")
        _of_each_rank(parts, self.world.size, own.numel(), "all_gather")
        return self._gather(parts, own)

    def _gather(self, outputs: Tensors, given: torch.Tensor) -> Work:
        own = _movable(given)
        place = _movable(outputs[0]) if len(outputs) == 1 else None
        if place is None or not _lies_apart(own, place, self.world.rank):
            place = None

        def finish(gathered: torch.Tensor) -> Tensors:
            _spread(gathered.view(-1), outputs)
            return outputs

        in_place = None if place is None else InPlace(outputs)
        return self._submit(Kind.ALLGATHER, _one_row(own), in_place or finish, place)

    def allgather_coalesced(self, outputs: list[Tensors], given: Tensors, opts: Any = None) -> Work:
        """Gather several tensors; `outputs` has a list of them for each rank."""
        by_tensor = list(zip(*outputs, strict=True))
        pairs = zip(by_tensor, given, strict=True)
        return joined(self.world, lambda: [self.allgather([list(o)], [t]) for o, t in pairs])

    def all_gather_single_coalesced(
        self, outputs: Tensors, given: Tensors, opts: Any = None
    ) -> Work:
        """all_gather_single of several tensors."""
        pairs = zip(outputs, given, strict=True)
        return joined(self.world, lambda: [self.all_gather_single(*pair) for pair in pairs])

    def gather(self, outputs: list[Tensors], given: Tensors, opts: Any) -> Work:
        """Copy the tensors of all ranks into a list of tensors at the root."""
        own = _only(given)
        parts = _only(outputs) if _root(opts, self.world.size) == self.world.rank else []
        if not _are_row_major(parts):
            return _by_copies(parts, lambda rows: self.gather([rows], given, opts))
        _same_dtype(parts, [own], "gather")
        size, flat = self.world.size, _movable(own)
        if opts.rootRank == self.world.rank:
            _of_each_rank(parts, size, own.numel(), "gather")
        splits = [0] * size
        splits[opts.rootRank] = flat.numel()
        return self._exchange(flat, splits, parts, [splits[self.world.rank]] * size, "gather")

    def scatter(self, outputs: Tensors, given: list[Tensors], opts: Any) -> Work:
        """Copy one of the root's tensors to each rank."""
        output = _only(outputs)
        if not output.is_contiguous():
            return _by_copies(outputs, lambda rows: self.scatter(rows, given, opts))
        root = _root(opts, self.world.size) == self.world.rank
        parts = _only(given) if root else []
        _same_dtype([output], parts, "scatter")
        if root:
            _of_each_rank(parts, self.world.size, output.numel(), "scatter")
        flat = _flattened(parts) if root else _movable(output)[:0]
        size, elements = self.world.size, _movable(output).numel()
        wanted = [0] * size
        wanted[opts.rootRank] = elements
        splits = [elements if root else 0] * size
        return self._exchange(flat, splits, [output], wanted, "scatter")

    # ---- all to all ----

    def alltoall(self, outputs: Tensors, given: Tensors, opts: Any = None) -> Work:
        """Send one tensor to each rank; any sizes that agree in pairs."""
        if not _are_row_major(outputs):
            return _by_copies(outputs, lambda rows: self.alltoall(rows, given, opts))
        _same_dtype(outputs, given, "all_to_all")
        splits = [_movable(tensor).numel() for tensor in given]
        wanted = [_movable(tensor).numel() for tensor in outputs]
        if len(wanted) != self.world.size:
            raise ValueError(
                f"[torch] all_to_all: expected {self.world.size} output tensors, got {len(wanted)}"
            )
        return self._exchange(_flattened(given), splits, outputs, wanted, "all_to_all")

    def all_to_all_single(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> Work:
        """Send a part of the first dimension to each rank; equal parts if splits are empty."""
        if not output.is_contiguous():
            return _by_copies(
                [output],
                lambda rows: self.all_to_all_single(rows[0], given, output_splits, input_splits),
            )
        _same_dtype([output], [given], "all_to_all")
        splits = _in_rows(given, input_splits, self.world.size)
        wanted = _in_rows(output, output_splits, self.world.size)
        return self._exchange(_movable(given), splits, [output], wanted, "all_to_all")

    def _exchange(
        self, flat: torch.Tensor, splits: list[int], outputs: Tensors, wanted: list[int], what: str
    ) -> Work:
        """splits: the elements of `flat` for each rank. wanted: those that come from each."""

        def finish(received: Any) -> Tensors:
            _spread(_take_parts(received, wanted, what), outputs)
            return outputs

        return self._submit(Kind.ALLTOALL, flat, finish, splits=splits)

    # ---- between two ranks ----

    def send(self, tensors: Tensors, destination: int, tag: int = 0) -> Work:
        """Send a tensor to one rank, which receives it with the same tag."""
        return self._between_two(Kind.SEND, tensors, destination, tag)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> Work:
        """Receive a tensor from one rank."""
        return self._between_two(Kind.RECEIVE, tensors, source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        """Receive a tensor from whichever rank sends first; the work's source_rank() names it."""
        return self._between_two(Kind.RECEIVE, tensors, _ANY_RANK, tag)

    def _between_two(self, kind: Kind, tensors: Tensors, peer: int, tag: int) -> Work:
        tensor = _only(tensors)
        if kind == Kind.RECEIVE and not tensor.is_contiguous():
            return _by_copies(tensors, lambda rows: self._between_two(kind, rows, peer, tag))
        own = _movable(tensor)
        if self.world.pending.left:
            self.world.pending.end_left()
        try:
            handle = self.world.operations.submit(kind, None, own, root=peer, tag=tag)
        except HorovodInternalError as error:
            return Work.failed(self.world, error)
        if kind == Kind.RECEIVE:
            return Receive(self.world, handle, tensors)
        return Work(self.world, [(handle, InPlace(tensors))], gpu_of(tensors), in_order=False)

    # ---- sparse tensors ----

    def _allreduce_sparse(self, tensor: torch.Tensor, opts: Any) -> Work:
        kind = kind_of(opts.reduceOp)
        if kind not in _SPARSE_OPS:
            raise ValueError(
                f"[torch] sparse tensors can be reduced with SUM or AVG, not {kind.name}"
            )
        own = tensor.detach().coalesce()
        described: Tensors = []

        def keep(gathered: torch.Tensor) -> Tensors:
            described.append(gathered)
            return []

        def finish(gathered: torch.Tensor) -> Tensors:
            # Its new indices and values are tensors that are made here.
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.copy_(
                    sparse_total(described[0], gathered, own, _SPARSE_OPS[kind], self.world.size)
                )
            return [tensor]

        def start() -> list[Work]:
            indices = self._submit(Kind.ALLGATHER, header_and_indices(own), keep)
            values = self._submit(Kind.ALLGATHER, own.values().contiguous(), finish)
            return [indices, values]

        return joined(self.world, start)

    # ---- barriers ----

    def barrier(self, opts: Any = None) -> Work:
        """Complete once every rank has called it; opts' timeout, if it has one, limits wait().

        What this rank has started before is complete, too, but for sends and receives. The work
        also fails with what collectives have raised whose own works nobody has kept.
        """
        limited = opts is not None and opts.timeout > NO_LIMIT
        awaited = opts is not None and not opts.asyncOp and not limited
        settle = _Settling(self.world)
        with composing():
            work = self._submit(Kind.BARRIER, None, settle, None, awaited)
        if awaited:
            return work
        return work.uncounted().limited(opts.timeout) if limited else work.uncounted()

"""Averages gradients block by block: each block has an owner, which adds and sends it to all.

Each rank encodes its gradients and sends every block to its owner. The owner decodes them, adds
them in float32 in the order of ranks, and sends the encoded mean to all ranks. A rank thus sends
2 (N - 1) / N of the encoded gradients. Rounding errors are added to the next gradient (the
sender's) and to the next mean (the owner's). Blocks and owners depend on the parameter only, and
not on DDP's buckets: results do not change when DDP forms other buckets.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from perseus.torch.ddp.blocks import BLOCK, Format
from perseus.torch.ddp.gradients import FeedbackExchange, Gradients, Held, Parameter, Record

# torch 2.13 has renamed it.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class _Piece:
    """Neighbouring elements of a parameter that have one owner, and their place in its row."""

    key: str
    elements: slice  # of the bucket
    owner: int
    columns: slice


class _Layout:
    """The place of a bucket's elements in a matrix with a row for each owner. Immutable.

    width: a multiple of BLOCK; elements without a piece are padding.
    """

    def __init__(self, parameters: Sequence[Parameter], ranks: int) -> None:
        self.pieces: list[_Piece] = []
        used = [0] * ranks
        for parameter in parameters:
            blocks = -(-parameter.size // BLOCK)
            # Small parameters get different owners by their names.
            salt = zlib.crc32(parameter.key.encode())
            first, end = parameter.first, parameter.first + parameter.size
            for owner in range(ranks):
                share = blocks // ranks + ((owner - salt) % ranks < blocks % ranks)
                length = min(share * BLOCK, end - first)
                if length > 0:
                    elements = slice(first, first + length)
                    columns = slice(used[owner], used[owner] + length)
                    self.pieces.append(_Piece(parameter.key, elements, owner, columns))
                first += length
                used[owner] += share * BLOCK
        self.width = max(used)


class _OwnedBlocks(Record):
    """sent: what this rank's messages left out, by owner. owned: what its means left out."""

    def __init__(self, layout: _Layout, rank: int, like: torch.Tensor, ranks: int) -> None:
        self.layout = layout
        self.rank = rank
        self.sent = like.new_zeros((ranks, layout.width), dtype=torch.float32)
        self.owned = like.new_zeros((1, layout.width), dtype=torch.float32)

    def _views(self) -> dict[str, dict[str, list[torch.Tensor]]]:
        views: dict[str, dict[str, list[torch.Tensor]]] = {}
        for piece in self.layout.pieces:
            kinds = views.setdefault(piece.key, {"sent": [], "owned": []})
            kinds["sent"].append(self.sent[piece.owner, piece.columns])
            if piece.owner == self.rank:
                kinds["owned"].append(self.owned[0, piece.columns])
        return views

    def split(self) -> dict[str, Held]:
        """Return copies of what is held back, by parameter."""
        nothing = self.owned.new_empty(0)
        return {
            key: {kind: torch.cat([nothing, *parts]) for kind, parts in kinds.items()}
            for key, kinds in self._views().items()
        }

    def take(self, key: str, held: Held) -> None:
        """Set what is held back of a parameter."""
        for kind, parts in self._views()[key].items():
            first = 0
            for part in parts:
                part.copy_(held[kind][first : first + part.numel()])
                first += part.numel()


class OwnerExchange(FeedbackExchange):
    """Sends blocks of int8, float16 or bfloat16."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._format = Format(dtype)

    def _begin(self, gradients: Gradients, group: dist.ProcessGroup) -> _OwnedBlocks:
        layout = _Layout(gradients.parameters, group.size())
        return _OwnedBlocks(layout, group.rank(), gradients.flat, group.size())

    def average(self, gradients: Gradients, group: dist.ProcessGroup, step: int) -> None:
        """See the module."""
        record: _OwnedBlocks = self._record(gradients, group)
        sent, owned, flat = record.sent, record.owned, gradients.flat
        if not self._format.keeps_errors:
            sent.zero_()
            owned.zero_()
        for piece in record.layout.pieces:
            sent[piece.owner, piece.columns].add_(flat[piece.elements], alpha=1 / len(sent))
        size = self._format.bytes(record.layout.width)
        outgoing = torch.empty((len(sent), size), dtype=torch.uint8, device=flat.device)
        incoming = torch.empty_like(outgoing)
        self._format.encode(sent, outgoing)
        dist.all_to_all_single(incoming, outgoing, group=group)
        for rank in range(len(sent)):
            self._format.decode(incoming[rank : rank + 1], owned, add=True)
        mean = outgoing[:1]
        self._format.encode(owned, mean)
        all_gather(incoming, mean, group=group)
        result = torch.empty_like(sent)
        self._format.decode(incoming, result)
        for piece in record.layout.pieces:
            flat[piece.elements].copy_(result[piece.owner, piece.columns])

    def held(self) -> dict[str, Held]:
        """Return copies of what this rank holds back, by parameter."""
        return super().held() if self._format.keeps_errors else {}

"""The memory's own speed: the fastest copy this machine has. One caller per rank."""

from __future__ import annotations

import ctypes
import mmap

import torch

_PAGE = 4096


class Copy:
    """memcpy of `size` bytes between two buffers whose pages exist; values differ by index."""

    def __init__(self, name: str, size: int, page_aligned: bool) -> None:
        self.name = name
        self._size = size
        self._source = _buffer(size, page_aligned)
        self._target = _buffer(size, page_aligned)
        self._source.copy_(torch.arange(size // 4, dtype=torch.int32))

    def prepare(self) -> None:
        """Other values in the source, none in the target: a copy must happen again."""
        self._target.zero_()
        self._source.add_(1)

    def run(self, call: int = 0) -> None:
        """The C library's memcpy, without the GIL."""
        ctypes.memmove(self._target.data_ptr(), self._source.data_ptr(), self._size)

    def correct(self) -> bool:
        """Whether every byte arrived."""
        return torch.equal(self._source, self._target)


def copies(size: int) -> list[Copy]:
    """Where a copy's speed may differ: page-aligned with 4 KiB pages, and as torch allocates."""
    return [Copy("memcpy", size, True), Copy("memcpy-unaligned", size, False)]


def _buffer(size: int, page_aligned: bool) -> torch.Tensor:
    if not page_aligned:
        return torch.zeros(size // 4, dtype=torch.int32)
    pages = mmap.mmap(-1, max(size, _PAGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    except OSError:
        pass  # a kernel without huge pages has nothing to refuse
    return torch.frombuffer(pages, dtype=torch.int32, count=size // 4).zero_()

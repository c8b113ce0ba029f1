"""Measures the memory's speed: the fastest copy on this machine. One thread per rank."""

from __future__ import annotations

import ctypes
import mmap

import torch

_PAGE = 4096


class Copy:
    """A memcpy of `size` bytes between buffers whose pages are mapped; values differ by index."""

    def __init__(self, name: str, size: int, page_aligned: bool) -> None:
        self.name = name
        self._size = size
        self._source = _buffer(size, page_aligned)
        self._target = _buffer(size, page_aligned)
        self._source.copy_(torch.arange(size // 4, dtype=torch.int32))

    def prepare(self) -> None:
        """Change the source and clear the target, so that an earlier copy cannot pass correct()."""
        self._target.zero_()
        self._source.add_(1)

    def run(self, call: int = 0) -> None:
        """Copy with the C library's memcpy, without the GIL."""
        ctypes.memmove(self._target.data_ptr(), self._source.data_ptr(), self._size)

    def correct(self) -> bool:
        """Return whether the target equals the source."""
        return torch.equal(self._source, self._target)


def copies(size: int) -> list[Copy]:
    """Return copies whose speed may differ: with page-aligned memory, and as torch allocates it."""
    return [Copy("memcpy", size, True), Copy("memcpy-unaligned", size, False)]


def _buffer(size: int, page_aligned: bool) -> torch.Tensor:
    if not page_aligned:
        return torch.zeros(size // 4, dtype=torch.int32)
    pages = mmap.mmap(-1, max(size, _PAGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    except OSError:
        pass  # kernels without huge pages reject the advice
    return torch.frombuffer(pages, dtype=torch.int32, count=size // 4).zero_()

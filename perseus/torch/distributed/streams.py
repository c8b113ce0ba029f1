"""The order on a GPU of those who settle an operation, and of those who wait for its tensors.

The core makes the current stream of the thread that synchronizes a handle wait for the result. That
thread may be a completer's; whoever waits on another stream then has to wait for that one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from perseus.torch.session import keep


class _Aside(threading.local):
    """Streams of a completer's thread, which waits for no others and holds none up."""

    def __init__(self) -> None:
        self.streams: dict[torch.device, Any] = {}


_aside = _Aside()


def gpu_of(given: Any) -> torch.device | None:
    """The GPU where a tensor lies, or the first of several; None for host memory or no tensor."""
    tensor = given[0] if isinstance(given, (tuple, list)) and given else given
    return tensor.device if isinstance(tensor, torch.Tensor) and tensor.is_cuda else None


@contextmanager
def aside(device: torch.device | None) -> Iterator[None]:
    """Work on a stream of this thread's own on the GPU, which becomes current; None = as before.

    Called by a completer's thread.
    """
    if device is None:
        yield
        return
    # Else leaving it would make another GPU current, and begin to use that one.
    torch.cuda.set_device(device)
    if device not in _aside.streams:
        _aside.streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(_aside.streams[device]):
        yield


class Mark:
    """What the calling thread's current stream on a GPU has been given until now."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.current_stream(device)
        self._event = self._stream.record_event()

    def join(self, tensors: Sequence[torch.Tensor]) -> None:
        """Let the current stream wait for it, which will use these tensors. Any thread."""
        current = torch.cuda.current_stream(self._device)
        if current == self._stream:
            return
        current.wait_event(self._event)
        for tensor in tensors:
            for part in (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,):
                keep(part)

"""PyTorch's access to the core: which tensors it accepts, how results come back, and how to wait.

One table of handles per init(). Any thread may use it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from perseus import basics
from perseus.errors import NOT_INITIALIZED, HorovodInternalError
from perseus.operations import Kind, ReduceOp
from perseus.process_sets import ProcessSet
from perseus.torch.untraced import untraced

Average = ReduceOp.Average
Sum = ReduceOp.Sum
Adasum = ReduceOp.Adasum
Min = ReduceOp.Min
Max = ReduceOp.Max
Product = ReduceOp.Product

ALLREDUCE = Kind.ALLREDUCE
ALLGATHER = Kind.ALLGATHER
BROADCAST = Kind.BROADCAST
ALLTOALL = Kind.ALLTOALL
REDUCESCATTER = Kind.REDUCESCATTER
BARRIER = Kind.BARRIER
JOIN = Kind.JOIN

# enum perseus_dtype.
DTYPES = {
    torch.float16: 0,
    torch.bfloat16: 1,
    torch.float32: 2,
    torch.float64: 3,
    torch.uint8: 4,
    torch.int8: 5,
    torch.int16: 6,
    torch.int32: 7,
    torch.int64: 8,
    torch.bool: 9,
}


def tensor_over(buffer: Any, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """A tensor over memory that the core allocated."""
    if 0 in shape:
        output = torch.empty(shape, dtype=like.dtype)
    else:
        output = torch.frombuffer(buffer, dtype=like.dtype).view(shape)
    return output.to(like.device)


def wrap(
    buffer: Any, shape: tuple[int, ...], like: torch.Tensor, received: tuple[int, ...] | None
) -> Any:
    """A tensor over memory that the core allocated; with the received splits if asked."""
    output = tensor_over(buffer, shape, like)
    if received is None:
        return output
    return output, torch.tensor(received, dtype=torch.int32)


def describe(tensor: Any) -> tuple[Any, ...]:
    """A tensor's address and layout, for PyTorch before 2.10 (without DLPack's exchange table).

    On a GPU followed by the GPU's number and the address of the stream on which it works now.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"[torch] expected a tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.dtype not in DTYPES:
        kind = tensor.dtype if tensor.layout == torch.strided else tensor.layout
        remedy = " Use sparse_allreduce_async, or .to_dense()." if tensor.is_sparse else ""
        raise ValueError(f"Tensor type {kind} is not supported.{remedy}")
    layout = tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), DTYPES[tensor.dtype]
    if tensor.is_cuda:
        return *layout, tensor.get_device(), torch.cuda.current_stream(tensor.device).cuda_stream
    if tensor.device.type != "cpu":
        raise ValueError(
            f"[torch] the tensor is on {tensor.device}, expected host memory or an NVIDIA GPU; "
            "move it with .cpu()"
        )
    return layout


def _refuse_submit(*_: Any) -> int:
    raise HorovodInternalError(NOT_INITIALIZED)


def _refuse_poll(handle: int) -> bool:
    raise ValueError(f"Handle {handle} was not created or has been cleared.")


# Where alltoalls under way are to put received splits, by handle, if not in host memory.
splits_devices: dict[int, torch.device] = {}


class _Session:
    """The bound methods of the running world's Operations: one attribute away on the hot path."""

    __slots__ = ("poll", "submit", "synchronize")

    def __init__(self) -> None:
        self.submit: Callable[..., int] = _refuse_submit
        self.poll: Callable[[int], bool] = _refuse_poll
        self.synchronize: Callable[[int], Any] = lambda _: None

    def attach(self) -> None:
        operations = basics.operations(wrap, describe)
        splits_devices.clear()
        if operations is not None:
            self.submit = operations.submit
            self.poll = operations.poll
            self.synchronize = operations.synchronize


session = _Session()
basics.at_init(session.attach)


def keep(tensor: torch.Tensor) -> None:
    """Let its memory be used again only after what the current stream has been given."""
    if tensor.is_cuda:
        # Else the allocator might give the memory to the stream that it belongs to.
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def keep_all(result: Any) -> None:
    """The same for the output of an operation, which `Operations.synchronize` has returned.

    A new tensor belongs to the stream that was current when the operation began.
    """
    if isinstance(result, torch.Tensor):
        keep(result)
    elif isinstance(result, (tuple, list)):
        for tensor in result:
            keep(tensor)


@untraced
def poll(handle: int) -> bool:
    """Whether synchronize(handle) would return at once.

    ValueError ("was not created or has been cleared") for a handle that is unknown or synchronised.
    """
    return session.poll(handle)


@untraced
def synchronize(handle: int) -> Any:
    """Wait for an asynchronous operation and return its output; None for an unknown handle.

    The output is the tensor; a tuple of tensors for grouped operations; (output, received_splits)
    for alltoall with splits. A handle can be synchronised once. Ctrl-C ends the wait, not the
    operation. Raises HorovodInternalError when the operation failed: MismatchError where ranks
    disagree about the tensor (the job goes on), others where the world has broken.
    """
    result = session.synchronize(handle)
    keep_all(result)
    if splits_devices and handle in splits_devices:
        output, received = result
        result = output, received.to(splits_devices.pop(handle))
    return result


def place(process_set: ProcessSet) -> tuple[int, int]:
    """(this process's index, size) of a set; (0, size) for a process outside of it."""
    if not basics.is_initialized():
        raise HorovodInternalError(NOT_INITIALIZED)
    if process_set.process_set_id == 0:
        return basics.rank(), basics.size()
    size = process_set.size()
    if size is None:
        raise ValueError("Process set provided does not exist, or has not been registered.")
    return (process_set.rank() or 0) if process_set.included() else 0, size


def wants_grad(*tensors: torch.Tensor) -> bool:
    """Whether autograd must record an operation on these; TypeError for anything but tensors."""
    try:
        for tensor in tensors:  # any() over a generator costs 0.3 µs
            if tensor.requires_grad:
                return torch.is_grad_enabled()
    except AttributeError:
        raise TypeError(f"[torch] expected a tensor, got {type(tensor).__name__}") from None
    return False

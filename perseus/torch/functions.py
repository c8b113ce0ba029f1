"""Equal state on every rank: parameters, optimizer state, arbitrary objects.

Source of behaviour: Horovod 0.28.1, horovod.torch.functions, except that no optimizer step is taken
to create state.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch

from perseus import basics, control
from perseus.arguments import checked_root
from perseus.elastic import known_blocks
from perseus.gradients.rotation import finish_corrections
from perseus.process_sets import ProcessSet, global_process_set, group_id
from perseus.torch.data_movement import broadcast_async_
from perseus.torch.parameters import in_groups
from perseus.torch.session import synchronize
from perseus.torch.untraced import untraced
from perseus.torch.unwrapped import watch


@untraced
def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Overwrite parameters with the root's, in place; usually `model.state_dict()`.

    params: a dict name -> tensor, a list of (name, tensor), or a list of tensors; names, shapes and
    dtypes equal on all ranks. root_rank: a global rank.
    ValueError ("invalid params of type") for anything else, generators included.
    """
    if isinstance(params, Mapping):
        named: Iterable[tuple[str | None, torch.Tensor]] = sorted(params.items())
    elif isinstance(params, list):
        named = [item if isinstance(item, tuple) else (None, item) for item in params]
    else:
        raise ValueError(
            f"invalid params of type: {type(params)}, expected a dict or a list such as "
            f"model.state_dict() or list(model.named_parameters())"
        )
    finish_corrections()
    named = list(named)
    if _take_over([tensor for _, tensor in named], root_rank):
        named = [(name, tensor) for name, tensor in named if not _is_plain(tensor)]
    handles = [broadcast_async_(tensor, root_rank, name) for name, tensor in named]
    for handle in handles:
        synchronize(handle)
    watch()


def buffer_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in row-major order; not a copy if they lie like that in host memory.

    The view keeps the memory alive. Does not use Tensor.numpy(): PyTorch works without NumPy.
    """
    dense = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    flat = dense.cpu().contiguous().reshape(-1).view(torch.uint8)
    if flat.numel() == 0:
        return memoryview(b"")
    memory = (ctypes.c_ubyte * flat.numel()).from_address(flat.data_ptr())
    memory.owner = flat  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


def _is_plain(value: Any) -> bool:
    """Whether buffer_of() would give the memory of a tensor, rather than a copy."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and value.is_contiguous()
    )


def plain_buffers(values: Iterable[Any]) -> Iterator[memoryview]:
    """Yield the memory of those tensors that are contiguous in host memory."""
    return (buffer_of(value) for value in values if _is_plain(value))


def _take_over(tensors: Sequence[torch.Tensor], root_rank: int) -> bool:
    """Give tensors rank 0's values in an elastic job where most of them are known.

    Returns whether it has, but for those that are not plain. Otherwise they are to be broadcast.
    """
    if root_rank != 0 or not known_blocks.are_used():
        return False
    arrays = [buffer_of(tensor) if _is_plain(tensor) else None for tensor in tensors]
    return known_blocks.take_over(arrays, [(tuple(t.shape), t.dtype) for t in tensors])


def initial_state(optimizer: torch.optim.Optimizer) -> defaultdict[Any, Any]:
    """Return the state that the optimizer's constructor makes.

    Of torch's optimizers only Adagrad's makes any, which its step() needs before torch 2.12. That
    of others cannot be told from what their steps have made, so all of it is copied.
    """
    if not type(optimizer).__module__.startswith("torch.optim."):
        copied: dict[int, Any] = {id(p): p for p in parameters_of(optimizer)}  # parameters stay
        copies = {key: deepcopy(value, copied) for key, value in optimizer.state.items()}
        return defaultdict(dict, copies)
    state: defaultdict[Any, Any] = defaultdict(dict)
    if isinstance(optimizer, torch.optim.Adagrad):
        value = optimizer.defaults["initial_accumulator_value"]
        for parameter, old in optimizer.state.items():
            start = complex(value, value) if parameter.is_complex() else value
            total = torch.full_like(old["sum"], start)
            state[parameter] = {"step": torch.zeros_like(old["step"]), "sum": total}
    return state


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters of all groups, in their order."""
    return in_groups(optimizer.param_groups)


@untraced
def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The root's object: itself on the root, an unpickled copy elsewhere.

    obj: anything cloudpickle can write; ignored on the others. name: without one, ranks must pass
    objects of the same type, whose name is used. root_rank: a global rank.
    """
    return control.broadcast_object(obj, root_rank, name, group_id(process_set))


@untraced
def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Every rank's object, in rank order, on every rank. name as for broadcast_object."""
    return control.allgather_object(obj, name, group_id(process_set))


class _TensorSlot:
    """Stands for a tensor of the root's state, which is sent separately."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype
        self.in_host_memory = tensor.device.type == "cpu"

    def device(self, of_parameter: torch.device) -> torch.device:
        """Where it belongs: on the parameter's device unless the root has it in host memory."""
        return torch.device("cpu") if self.in_host_memory else of_parameter


@untraced
def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Give every rank the root's optimizer state and options (lr, momentum, …).

    The parameters must be the same, in the same order. State that only the root has, e.g. after
    loading a checkpoint there, is created on the others. If the root has no state, missing
    gradients become zeros, as in Horovod. model: accepted for Horovod's sake.
    ValueError for LBFGS, whose state is not per parameter, and for anything but an optimizer.
    """
    checked_root(root_rank, "torch")
    if not hasattr(optimizer, "param_groups"):
        raise ValueError(
            f"[torch] broadcast_optimizer_state expected an optimizer, got {type(optimizer)}; "
            f"broadcast_parameters(model.state_dict(), root_rank) is for models"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    is_root = basics.rank() == root_rank
    parameters = parameters_of(optimizer)
    outline = broadcast_object(
        _outline(optimizer, parameters) if is_root else None, root_rank, "optimizer_state"
    )
    options, entries = outline
    if len(entries) != len(parameters) or len(options) != len(optimizer.param_groups):
        raise ValueError(
            f"[torch] the root's optimizer has {len(entries)} parameters in {len(options)} groups, "
            f"this one {len(parameters)} in {len(optimizer.param_groups)}"
        )
    tensors: list[tuple[torch.Tensor, str]] = []
    for index, (parameter, entry) in enumerate(zip(parameters, entries, strict=True)):
        own = optimizer.state.get(parameter, {})
        for key, value in entry.items():
            if isinstance(value, _TensorSlot):
                own[key] = tensor = _room_for(value, own.get(key), parameter, is_root)
                tensors.append((tensor, f"{key}.{index}"))
            elif not is_root:
                own[key] = value
        if not is_root:
            for key in [key for key in own if key not in entry]:
                del own[key]
        if entry:
            optimizer.state[parameter] = own
        elif not is_root:
            optimizer.state.pop(parameter, None)
    _broadcast_all(tensors, root_rank)
    if not is_root:
        for group, values in zip(optimizer.param_groups, options, strict=True):
            group.update(values)
    if not any(entries) and not isinstance(optimizer, torch.optim.SparseAdam):
        for parameter in parameters:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def _outline(
    optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Options of each group, and the state of each parameter with tensors replaced by slots."""
    options = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    entries = [
        {
            key: _TensorSlot(value) if isinstance(value, torch.Tensor) else value
            for key, value in optimizer.state.get(parameter, {}).items()
        }
        for parameter in parameters
    ]
    return options, entries


def _room_for(
    slot: _TensorSlot, present: Any, parameter: torch.Tensor, is_root: bool
) -> torch.Tensor:
    device = slot.device(parameter.device)
    if isinstance(present, torch.Tensor):
        same = tuple(present.shape) == slot.shape and present.dtype == slot.dtype
        if is_root or (same and present.device.type == device.type):
            return present
    # Moments follow their parameter's memory format.
    if slot.shape == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=slot.dtype, device=device).detach()
    return torch.empty(slot.shape, dtype=slot.dtype, device=device)


def _broadcast_all(tensors: list[tuple[torch.Tensor, str]], root_rank: int) -> None:
    if _take_over([tensor for tensor, _ in tensors], root_rank):
        tensors = [(tensor, name) for tensor, name in tensors if not _is_plain(tensor)]
    # Memory formats of state tensors may differ between ranks, so they travel row-major.
    travelling = [tensor.contiguous() for tensor, _ in tensors]
    handles = [
        broadcast_async_(row_major, root_rank, name)
        for row_major, (_, name) in zip(travelling, tensors, strict=True)
    ]
    for handle, row_major, (tensor, _) in zip(handles, travelling, tensors, strict=True):
        synchronize(handle)
        if row_major is not tensor:
            tensor.copy_(row_major)

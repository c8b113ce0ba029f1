"""Which backend a process group gets where a script with `import perseus` asks for another.

Belongs to the main thread.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.distributed import Backend

from perseus.torch.distributed.backend import IS_BACKEND, NAME, register

_REPLACED = {"gloo", "nccl", "undefined"}  # "undefined" is torch's name for none given


class Choice(NamedTuple):
    """A backend, as init_process_group takes it, and what there is to say about it."""

    backend: str
    said: str


def backend_for(asked: str) -> Choice:
    """Return the backend that a new process group gets."""
    register()
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    accelerator = None if device is None else device.type
    usual = Backend.default_device_backend_map.get(accelerator or "cpu", "gloo")
    nvidia = accelerator == "cuda" and torch.version.hip is None
    return choose(asked, accelerator, usual, beside=IS_BACKEND, nvidia=nvidia)


def choose(
    asked: str,
    accelerator: str | None,
    usual: str,
    *,
    beside: bool,
    nvidia: bool,
) -> Choice:
    """Return the choice for a process whose tensors lie in host memory or on one accelerator.

    asked: a backend, or backends by device as in "cpu:gloo,cuda:nccl".
    accelerator: its device type; None without one. usual: the backend that torch would take for it.
    beside: whether this torch lets other backends be beside ours.
    nvidia: whether the accelerator is one of NVIDIA's, which Perseus serves.
    """
    by_device = dict(part.split(":", 1) for part in asked.split(",")) if ":" in asked else {}
    names = set(by_device.values()) or {asked}
    if NAME in names:
        return Choice(asked, "")
    shown = "PyTorch's own backend" if asked == "undefined" else f'"{asked}"'
    if not names <= _REPLACED:
        return Choice(asked, f"{shown} stays: Perseus takes the place of gloo and nccl only")
    others = {device: name for device, name in by_device.items() if device != "cpu"}
    for_host_only = set(by_device) == {"cpu"}
    if not by_device and accelerator is not None:
        others = {accelerator: usual if asked == "undefined" else asked}
    # Like Perseus, gloo takes a GPU's tensors through host memory. NCCL stays until both have been
    # measured there.
    in_place = nvidia and set(others.items()) == {("cuda", "gloo")}
    if accelerator is None or in_place or for_host_only:
        chosen = f"cpu:{NAME}" if for_host_only and accelerator is not None else NAME
        return Choice(chosen, f'this script runs on Perseus, with "{NAME}" in place of {shown}')
    by_name = f', unless the script asks for "{NAME}" by name' if nvidia else ""
    if not beside:
        return Choice(
            asked,
            f"{shown} stays for {accelerator} tensors, and only torch 2.14 and later can have "
            f"Perseus beside it{by_name}",
        )
    kept = ",".join(f"{device}:{name}" for device, name in others.items())
    return Choice(
        f"cpu:{NAME},{kept}",
        f"tensors in host memory travel through Perseus, and {accelerator} tensors through "
        f'"{next(iter(others.values()))}"{by_name}',
    )

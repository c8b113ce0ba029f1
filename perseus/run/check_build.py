"""`perseusrun --check-build`: reports what this installation supports on this host. Read only."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module, metadata
from importlib.util import find_spec

from perseus.errors import HorovodInternalError
from perseus.installed import unserved
from perseus.run import mpirun
from perseus.run.job import LaunchError

# Name, the framework's module, and the module of Perseus' adapter for it.
_FRAMEWORKS = (
    ("TensorFlow", "tensorflow", "perseus.tensorflow"),
    ("PyTorch", "torch", "perseus.torch"),
    ("MXNet", "mxnet", "perseus.mxnet"),
)


def report(version: str) -> str:
    """Return Horovod's table of available features, followed by lines about GPUs and the core."""
    native, fact = _core()
    has_gpus, gpus = _cuda() if native else (False, "")
    has_nccl, nccl = _nccl() if has_gpus else (False, "")
    reasons = [_unserved(module) for _, module, _ in _FRAMEWORKS]
    frameworks = [
        (name, _found(module) and _found(ours) and not reason)
        for (name, module, ours), reason in zip(_FRAMEWORKS, reasons, strict=True)
    ]
    sections = (
        ("Available Frameworks", frameworks),
        ("Available Controllers", [("MPI", _found("mpi4py")), ("Gloo", native)]),
        (
            "Available Tensor Operations",
            [
                ("NCCL", has_nccl),
                ("DDL", False),
                ("CCL", False),
                ("MPI", native and _has_mpirun()),
                ("Gloo", native),
            ],
        ),
        ("Available Transports", [("Shared memory", native), ("TCP", native)]),
        ("Available Devices", [("CPU", native), ("CUDA", has_gpus)]),
    )
    lines = [f"Perseus v{version}:"]
    for title, entries in sections:
        lines += ["", f"{title}:"]
        lines += [f"    [{'X' if there else ' '}] {name}" for name, there in entries]
    return "\n".join([*lines, "", *filter(None, (*reasons, gpus, nccl, fact))])


def _core() -> tuple[bool, str]:
    """Return whether the native core loads, and a sentence with its kernels or with the error."""
    try:
        core = import_module("perseus._core")
    except ImportError as error:
        return False, f"The native core does not load: {error}"
    return True, f"Kernels for this processor: {core.kernel_variant()}"


def _cuda() -> tuple[bool, str]:
    """Return whether there are GPUs that the core can use, and a sentence about them."""
    core = import_module("perseus._core")
    try:
        version, gpus = core.find_cuda(count_devices=True)
    except HorovodInternalError as error:
        return False, f"No GPUs: {error}"
    served = f"NVIDIA's driver serves CUDA {version // 1000}.{version % 1000 // 10}"
    return gpus > 0, f"{served}; GPUs of this host: {gpus}"


def _nccl() -> tuple[bool, str]:
    """Return whether there is an NCCL that the core can use, and a sentence about it."""
    core = import_module("perseus._core")
    try:
        version, path = core.find_nccl()
    except HorovodInternalError as error:
        return False, f"No NCCL: {error}"
    return True, f"NCCL {version // 10000}.{version % 10000 // 100}.{version % 100}: {path}"


def _has_mpirun() -> bool:
    """Return whether `perseusrun --mpi` can start ranks, whose data may then go over its MPI."""
    try:
        mpirun.find()
    except LaunchError:
        return False
    return True


def _unserved(module: str) -> str:
    """Return why the installed version of a framework cannot be served; "" otherwise.

    A framework takes seconds to import, so this asks what pip knows of it.
    """
    versions = set()
    for name in metadata.packages_distributions().get(module, []):
        # An installation that was interrupted may have no name, or no version.
        with suppress(metadata.PackageNotFoundError):
            if name and name.startswith(module):
                versions.add(metadata.version(name))
    return unserved(module, versions.pop() or "") if len(versions) == 1 else ""


def _found(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False

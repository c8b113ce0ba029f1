"""What Horovod's scripts ask about its native parts, and its small tools: `horovod.common.util`.

Nothing is compiled against a framework here, so the answers are about one core and the adapters
beside it. Source of names and behaviour: Horovod 0.28.1. Thread-safe, except env().
"""

from __future__ import annotations

import functools
import os
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

from perseus import basics
from perseus.arguments import checked_op
from perseus.errors import HorovodVersionMismatchError, get_version_mismatch_message
from perseus.gradients.bundles import split
from perseus.installed import MissingCoreError

__all__ = [
    "EXTENSIONS",
    "HorovodVersionMismatchError",
    "ccl_built",
    "check_extension",
    "check_installed_version",
    "ddl_built",
    "env",
    "extension_available",
    "get_average_backwards_compatibility_fun",
    "get_ext_suffix",
    "get_extension_full_path",
    "get_version_mismatch_message",
    "gloo_built",
    "gpu_available",
    "is_iterable",
    "is_version_greater_equal_than",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "split_list",
]

EXTENSIONS = ["tensorflow", "torch", "mxnet"]

Item = TypeVar("Item")

# Horovod's tests look at this one: results remembered by the arguments.
_cache = functools.cache

# A version's release numbers, and what makes it older than its release.
_VERSION = re.compile(r"\s*v?(\d+(?:\.\d+)*)[-_.]?(a|b|c|rc|alpha|beta|pre|preview|dev)?", re.I)


def get_ext_suffix() -> str:
    """How file names of native modules end, e.g. `.cpython-311-x86_64-linux-gnu.so`."""
    return sysconfig.get_config_var("EXT_SUFFIX") or ".so"


def get_extension_full_path(pkg_path: str, *args: str) -> str:
    """The path of a native module: folders and base name in `args`, beside the file `pkg_path`."""
    *folders, base = args
    return os.path.join(os.path.dirname(pkg_path), *folders, base + get_ext_suffix())


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """ImportError unless the adapter that `ext_name` ends in, e.g. `horovod.torch`, can work.

    The other arguments say where Horovod keeps its library and how to build it; unused here.
    """
    base_name = ext_name.rpartition(".")[2]
    if base_name not in EXTENSIONS or find_spec(f"perseus.{base_name}") is None:
        raise ImportError(f"Extension {ext_name} has not been built: Perseus has no such adapter")
    try:
        import_module("perseus._core")
    except ImportError as error:
        hint = "" if isinstance(error, MissingCoreError) else "; pip install Perseus again"
        raise ImportError(f"Extension {ext_name} has not been built: {error}{hint}") from error


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether a framework (`torch`, …) is installed and Perseus can serve it.

    verbose: print the answer.
    """
    try:
        check_extension(ext_base_name, "", "")
        available = find_spec(ext_base_name) is not None
    except ImportError:
        available = False
    if verbose:
        print(f"Extension {ext_base_name} {'was' if available else 'was NOT'} built.")
    return available


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether collectives take a framework's GPU tensors: PyTorch's, where there is a driver."""
    return ext_base_name.endswith("torch") and basics.cuda_built()


def mpi_built(verbose: bool = False) -> bool:
    """As perseus.basics.mpi_built; `verbose` is accepted for Horovod's sake, here and below."""
    return basics.mpi_built()


def gloo_built(verbose: bool = False) -> bool:
    """As perseus.basics.gloo_built."""
    return basics.gloo_built()


def nccl_built(verbose: bool = False) -> int:
    """As perseus.basics.nccl_built."""
    return basics.nccl_built()


def ddl_built(verbose: bool = False) -> bool:
    """As perseus.basics.ddl_built."""
    return basics.ddl_built()


def ccl_built(verbose: bool = False) -> bool:
    """As perseus.basics.ccl_built."""
    return basics.ccl_built()


@contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Environment variables that hold inside a `with`, and are as before after it.

    A value of None leaves its variable alone.
    """
    changes = {name: value for name, value in kwargs.items() if value is not None}
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def get_average_backwards_compatibility_fun(
    reduce_ops: Any,
) -> Callable[[int | None, bool | None], int]:
    """A function (op, average) -> op that understands the deprecated `average` of reductions.

    reduce_ops: anything with the attributes Average and Sum. The function raises ValueError when
    given both, and warns of `average` (DeprecationWarning).
    """

    def resolve(op: int | None, average: bool | None) -> int:
        """The reduction that is meant; see get_average_backwards_compatibility_fun."""
        if average is None:
            return checked_op(reduce_ops.Average if op is None else op, "allreduce")
        if op is not None:
            raise ValueError(
                "The op parameter supersedes average. Please provide only one of them."
            )
        warnings.warn(
            "Parameter `average` has been replaced with `op`: use op=hvd.Average or op=hvd.Sum.",
            DeprecationWarning,
            stacklevel=3,
        )
        return int(reduce_ops.Average if average else reduce_ops.Sum)

    return resolve


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether a number of ranks is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(l: Sequence[Item], n: int) -> list[Sequence[Item]]:
    """A sequence in n contiguous parts; the first ones have one element more where it is uneven."""
    return split(l, n)


def check_installed_version(
    name: str, version: str, exception: BaseException | None = None
) -> None:
    """Horovod compares a framework's version with the one it was compiled for; nothing is here."""


def is_iterable(x: Any) -> bool:
    """Whether iter(x) works."""
    try:
        iter(x)
    except TypeError:
        return False
    return True


def _release(text: str) -> tuple[list[int], bool]:
    found = _VERSION.match(text)
    if found is None:
        raise ValueError(f"'{text}' is not a version number")
    numbers = [int(number) for number in found.group(1).split(".")]
    while numbers and numbers[-1] == 0:  # 1.2 and 1.2.0 are the same
        numbers.pop()
    return numbers, found.group(2) is None


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether version `ver` is `target` ("major.minor.patch") or newer; ValueError for no text."""
    if not isinstance(ver, str) or not isinstance(target, str):
        raise ValueError(f"This function only accepts string arguments. Got {ver!r} and {target!r}")
    if len(target.split(".")) != 3:
        raise ValueError(
            f"We only accepts target version values in the form of: major.minor.patch. "
            f"Received: {target}"
        )
    return _release(ver) >= _release(target)

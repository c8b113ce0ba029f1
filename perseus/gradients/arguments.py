"""Checks the arguments of optimizer wrappers and tapes; its errors say what to write instead.

All frameworks share the checks. Stateless, thread-safe. `where` is the component that a message
begins with.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Iterable
from numbers import Real
from operator import index
from typing import Any

from perseus import basics
from perseus.arguments import OPS, checked_compression, checked_op
from perseus.compression import ROTATE, compressor
from perseus.process_sets import checked


def checked_passes(passes: Any, where: str) -> int:
    """Return backward_passes_per_step; raise ValueError unless it is a whole number above 0."""
    try:
        number = index(passes)
    except TypeError:
        raise ValueError(
            f"[{where}] backward_passes_per_step={passes!r}: expected a whole number, 1 or more"
        ) from None
    if number <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    return number


def checked_predivide_factor(factor: Any, op: int, where: str) -> float:
    """Return gradient_predivide_factor.

    Raises ValueError if it is 0, infinite or not a number, or if it is not 1 and op is not Average.
    """
    number = isinstance(factor, Real) and not isinstance(factor, bool)
    if not number or not math.isfinite(factor) or factor == 0:
        raise ValueError(
            f"[{where}] gradient_predivide_factor={factor!r}: expected a number other than 0 that "
            "is finite"
        )
    if factor != 1.0 and OPS[op] != "Average":
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    return float(factor)


def checked_reduction(
    op: Any, predivide_factor: Any, compression: Any, process_set: Any, where: str
) -> int:
    """Return the number of op after checking all arguments of a reduction.

    Raises ValueError for wrong or inconsistent arguments; TypeError if process_set is not a
    ProcessSet.
    """
    number = checked_op(op, where)
    checked_predivide_factor(predivide_factor, number, where)
    checked_compression(compression, where)
    if compressor(compression).codec == ROTATE and OPS[number] in ("Min", "Max", "Product"):
        raise ValueError(
            f"[{where}] Compression.rotate averages parameters, which is not what op={OPS[number]} "
            "does to gradients: use op=Average or op=Sum, or leave compression= out"
        )
    checked(process_set)
    return number


def checked_groups(
    groups: Any, num_groups: int, what: str, key: Callable[[Any], Hashable], stacklevel: int = 3
) -> int | list[list[Any]] | None:
    """Return `groups=`, or its deprecated form `num_groups=`: None, a number or lists of `what`.

    what: "tensor" or "variable", for messages.
    key: returns equal keys for the same member, which may occur only once; raises ValueError for
        anything else than a member.
    stacklevel: of the deprecation warning.

    Raises ValueError for other values and for members that occur twice.
    """
    if num_groups != 0:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups`.",
            DeprecationWarning,
            stacklevel=stacklevel,
        )
        groups = num_groups if groups is None else groups
    if groups is None:
        return None
    if isinstance(groups, int):
        if groups > 0:
            return groups
    elif isinstance(groups, list) and all(isinstance(group, list) for group in groups):
        keys = [key(member) for group in groups for member in group]
        if len(set(keys)) != len(keys):
            raise ValueError(f"A {what} can only appear once in groups")
        return groups
    raise ValueError(f"groups should be a positive integer or a list of lists of {what}s")


def check_sparse(name: str, where: str) -> None:
    """Raise ValueError for a sparse gradient if the settings accumulate gradients over steps."""
    if basics.setting("PERSEUS_ACCUMULATE_N_STEPS") > 1:
        raise ValueError(
            f"[{where}] the gradient of {name} is sparse; PERSEUS_ACCUMULATE_N_STEPS sums dense "
            "ones: pass sparse_as_dense=True"
        )


def checked_local_layers(layers: Any, where: str) -> list[Any]:
    """Return `local_layers=` as a list: a Keras layer, an iterable of them, or None.

    Raises ValueError for anything else, and for layers without weights because they are not built.
    """
    if layers is None:
        return []
    listed = list(layers) if isinstance(layers, Iterable) else [layers]
    for layer in listed:
        if isinstance(layer, type) or not hasattr(layer, "trainable_weights"):
            raise ValueError(f"[{where}] local_layers: expected Keras layers, got {layer!r}")
        if not getattr(layer, "built", True):
            raise ValueError(
                f"[{where}] local_layers: {layer.name} is not built and has no weights yet, so all "
                "of them would be shared: build the model first, by an Input layer, "
                "model.build(input_shape) or a call"
            )
    return listed


def check_local_sources(where: str) -> None:
    """Raise ValueError for local variables if the settings accumulate gradients over steps."""
    if basics.setting("PERSEUS_ACCUMULATE_N_STEPS") > 1:
        raise ValueError(
            f"[{where}] PERSEUS_ACCUMULATE_N_STEPS sums gradients that are reduced, but those of "
            "local variables are not, so only one step in N would count for them: use "
            "DistributedOptimizer(…, backward_passes_per_step=N)"
        )


def check_adasum_of_steps(where: str) -> None:
    """Raise ValueError for an optimizer with op=Adasum if the settings accumulate gradients."""
    if basics.setting("PERSEUS_ACCUMULATE_N_STEPS") > 1:
        raise ValueError(
            f"[{where}] PERSEUS_ACCUMULATE_N_STEPS sums gradients, but op=Adasum combines the "
            "steps of every rank's own optimizer: use backward_passes_per_step"
        )


def wrapped_twice(where: str, what: str = "optimizer") -> ValueError:
    """Return the error for an optimizer, or a tape, that is distributed already."""
    name = "DistributedOptimizer" if what == "optimizer" else "DistributedGradientTape"
    return ValueError(
        f"[{where}] the {what} is a {name} already, and its gradients are reduced once: call "
        f"hvd.{name} once, and use what it returned"
    )


def not_an_optimizer(given: Any, where: str, expected: str, example: str) -> ValueError:
    """Return the error for an object that is not an optimizer and so cannot be wrapped."""
    kind = type(given)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    got = "None" if given is None else name
    return ValueError(
        f"[{where}] DistributedOptimizer expected {expected}, got {got}; write, for example, "
        f"hvd.DistributedOptimizer({example})"
    )

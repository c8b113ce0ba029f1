"""Arguments of optimizer wrappers and tapes that cannot work, answered by what to write instead.

Alike in every framework. Stateless, thread-safe. `where` is the component in front of a message.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from operator import index
from typing import Any

from perseus import basics
from perseus.arguments import OPS, checked_compression, checked_op
from perseus.process_sets import checked


def checked_passes(passes: Any, where: str) -> int:
    """backward_passes_per_step; ValueError for what is not a whole number above 0."""
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
    """gradient_predivide_factor; ValueError for 0, no number, and other ops than Average."""
    if not isinstance(factor, int | float) or not factor:
        raise ValueError(
            f"[{where}] gradient_predivide_factor={factor!r}: expected a number other than 0"
        )
    if factor != 1.0 and OPS[op] != "Average":
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    return factor


def checked_reduction(
    op: Any, predivide_factor: Any, compression: Any, process_set: Any, where: str
) -> int:
    """The number of op; ValueError for what is wrong or does not fit, TypeError for no set."""
    number = checked_op(op, where)
    checked_predivide_factor(predivide_factor, number, where)
    checked_compression(compression, where)
    checked(process_set)
    return number


def checked_groups(
    groups: Any, num_groups: int, what: str, key: Callable[[Any], Hashable], stacklevel: int = 3
) -> int | list[list[Any]] | None:
    """`groups=`, or its old name `num_groups=`: None, a number or lists of `what`; ValueError.

    key: equal for what is the same, and so may occur only once; may raise for what does not belong
    there. stacklevel: of the warning of the old name.
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
    """ValueError for a sparse gradient where the settings sum up gradients over steps."""
    if basics.setting("PERSEUS_ACCUMULATE_N_STEPS") > 1:
        raise ValueError(
            f"[{where}] the gradient of {name} is sparse; PERSEUS_ACCUMULATE_N_STEPS sums dense "
            "ones: pass sparse_as_dense=True"
        )


def check_adasum_of_steps(where: str) -> None:
    """ValueError for an optimizer with op=Adasum where the settings sum up gradients."""
    if basics.setting("PERSEUS_ACCUMULATE_N_STEPS") > 1:
        raise ValueError(
            f"[{where}] PERSEUS_ACCUMULATE_N_STEPS sums gradients, but op=Adasum combines the "
            "steps of every rank's own optimizer: use backward_passes_per_step"
        )


def wrapped_twice(where: str, what: str = "optimizer") -> ValueError:
    """The error for an optimizer, or a tape, that is distributed already."""
    name = "DistributedOptimizer" if what == "optimizer" else "DistributedGradientTape"
    return ValueError(
        f"[{where}] the {what} is a {name} already, and its gradients are reduced once: call "
        f"hvd.{name} once, and use what it returned"
    )


def not_an_optimizer(given: Any, where: str, expected: str, example: str) -> ValueError:
    """The error for what is wrapped and is no optimizer."""
    kind = type(given)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    got = "None" if given is None else name
    return ValueError(
        f"[{where}] DistributedOptimizer expected {expected}, got {got}; write, for example, "
        f"hvd.DistributedOptimizer({example})"
    )

"""Arguments of optimizer wrappers and tapes that cannot work, answered by what to write instead.

Alike in every framework. Stateless, thread-safe. `where` is the component in front of a message.
"""

from __future__ import annotations

from operator import index
from typing import Any

from perseus.arguments import OPS


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

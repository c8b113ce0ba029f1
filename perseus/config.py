"""The core's table of configuration variables for Python: --help and docs/config.md derive from it.

Parsing happens in the core, when a context is created. Pure functions, thread-safe.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from perseus.errors import InvalidArgumentError


@dataclass(frozen=True)
class Variable:
    """One variable. All fields are texts as written in the environment."""

    name: str
    aliases: tuple[str, ...]
    type: str  # "int", "float", "bool", "string", "choice"
    default: str  # "" = unset
    allowed: str  # "1..12", "a|b|c", "" = anything
    help: str


def variables() -> list[Variable]:
    """Every variable the core knows, in the table's order."""
    from perseus import _core

    return [
        Variable(
            name=row["name"],
            aliases=tuple(alias for alias in row["aliases"].split(",") if alias),
            type=row["type"],
            default=row["default"],
            allowed=row["allowed"],
            help=row["help"],
        )
        for row in _core.config_table()
    ]


def check() -> None:
    """Raise InvalidArgumentError (a ValueError) naming the first variable with a bad value."""
    from perseus import _core

    _core.config_check()


def yes_or_no(name: str, default: bool) -> bool:
    """Return a yes/no variable that Python alone reads, in the words that the core takes.

    default: what it is if unset or empty. Raises InvalidArgumentError (a ValueError) for any other
    word.
    """
    text = os.environ.get(name, "")
    word = text.lower()
    if word in ("1", "true", "on", "yes"):
        return True
    if word in ("0", "false", "off", "no"):
        return False
    if text:
        raise InvalidArgumentError(f"[config] {name}='{text}': expected 0 or 1")
    return default


def dynamic_process_sets() -> bool:
    """Whether HOROVOD_DYNAMIC_PROCESS_SETS=1 lets process sets come and go after init()."""
    return yes_or_no("HOROVOD_DYNAMIC_PROCESS_SETS", False)


def elastic() -> bool:
    """Whether the elastic launcher started this process (HOROVOD_ELASTIC=1): the world may grow."""
    return yes_or_no("HOROVOD_ELASTIC", False)

"""`perseusrun --horovod`: the command with which a Python program finds Perseus as `horovod`.

The command line alone says so: nothing is put into the environment or into an installation, so that
no other program is affected. Pure functions.
"""

from __future__ import annotations

import os
import re

_ENTRY = ("-m", "perseus.compat.horovod")
_INTERPRETER = re.compile(r"(python|pypy)(\d+(\.\d+)?)?t?")
_OPTIONS_WITH_VALUE = "WX"
_LONG_OPTIONS_WITH_VALUE = ("--check-hash-based-pycs",)


def with_alias(command: list[str]) -> list[str]:
    """`python -u train.py 3` as `python -u -m perseus.compat.horovod train.py 3`.

    Likewise for `python -m MODULE` and `python -c CODE`. ValueError for any other command.
    """
    name = os.path.basename(command[0])
    if not _INTERPRETER.fullmatch(name):
        raise ValueError(
            f"--horovod needs a Python command such as 'python train.py', got '{name}'; in a "
            f"wrapper script write 'python -m perseus.compat.horovod train.py'"
        )
    options, program = _split(command[1:])
    if not program:
        raise ValueError("--horovod needs a script, -m MODULE or -c CODE after the interpreter")
    return [command[0], *options, *_ENTRY, *program]


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """(the interpreter's own options, the program and its arguments)."""
    options: list[str] = []
    rest = list(arguments)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        argument = rest.pop(0)
        if argument == "--":
            break
        options.append(argument)
        if argument.startswith("--"):
            takes_value = argument in _LONG_OPTIONS_WITH_VALUE
        else:
            letters = argument[1:]
            at = next((i for i, letter in enumerate(letters) if letter in "cmWX"), len(letters))
            kind, value = letters[at : at + 1], letters[at + 1 :]
            if kind in ("c", "m"):
                options[-1:] = [f"-{letters[:at]}"] if at else []
                values = [value] if value else rest[:1]
                return options, [f"-{kind}", *values, *(rest if value else rest[1:])]
            takes_value = kind in _OPTIONS_WITH_VALUE and bool(kind) and not value
        if takes_value and rest:
            options.append(rest.pop(0))
    return options, [] if rest[:1] == ["-"] else rest

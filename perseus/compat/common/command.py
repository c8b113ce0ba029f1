"""`perseusrun --horovod`: the command with which a Python program finds Perseus as `horovod`.

The command line alone says so: nothing is put into the environment or into an installation, so that
no other program is affected. Pure functions.
"""

from __future__ import annotations

import os
import re
import sys

# Python's message if a script imports Horovod and it is not installed, and the remedy.
WITHOUT_HOROVOD = "No module named 'horovod'"
HOROVOD_HINT = (
    "the script imports horovod, which is not installed: with 'perseusrun --horovod' it finds "
    "Perseus under that name"
)

_ENTRY = ("-m", "perseus.compat.horovod")
_INTERPRETER = re.compile(r"(python|pypy)(\d+(\.\d+)?)?t?")
# Short options up to the one with a value: -c and -m name the program, -W and -X do not.
_SHORT_OPTION = re.compile(r"-(?P<flags>[^-cmWX]*)(?P<kind>[cmWX])(?P<value>.*)", re.DOTALL)
_LONG_OPTION_WITH_VALUE = "--check-hash-based-pycs"


def is_aliased() -> bool:
    """Whether `import horovod` finds Perseus in this process."""
    return any(type(finder).__module__ == "perseus.compat.finder" for finder in sys.meta_path)


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
    position = 0
    while position < len(arguments):
        argument = arguments[position]
        before, after = arguments[:position], arguments[position + 1 :]
        if argument == "--":
            return before, after
        if argument == "-" or not argument.startswith("-"):
            break
        option = _SHORT_OPTION.fullmatch(argument)
        if option and option["kind"] in "cm":
            flags = [f"-{option['flags']}"] if option["flags"] else []
            value = [option["value"]] if option["value"] else []
            return [*before, *flags], [f"-{option['kind']}", *value, *after]
        value_follows = option and not option["value"]
        position += 2 if value_follows or argument == _LONG_OPTION_WITH_VALUE else 1
    program = arguments[position:]
    return arguments[:position], [] if program[:1] == ["-"] else program

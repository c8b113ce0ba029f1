"""Runs a script for torch.distributed as if `import perseus` were its first line.

    python -m perseus.compat.ddp train.py ARGUMENTS    under torchrun and every other launcher

`python -m perseus.torch.distributed.launch` starts ranks in this way.
"""

from __future__ import annotations

import sys

from perseus.compat.program import main_namespace, run

_LOCAL_RANK = "--local-rank="  # what torch's older launcher puts before a program's own arguments


def _own_arguments(given: list[str]) -> list[str]:
    """The program with its arguments, of which torch's launcher has put one before the program."""
    if not given or not given[0].startswith(_LOCAL_RANK):
        return given
    program = 3 if given[1:2] in (["-m"], ["-c"]) else 2
    return [*given[1:program], given[0], *given[program:]]


if __name__ == "__main__":
    run(_own_arguments(sys.argv[1:]), "perseus.compat.ddp")
elif __name__ == "__mp_main__":
    # A worker of multiprocessing: its main module is the script's.
    globals().update(main_namespace(__spec__.name))

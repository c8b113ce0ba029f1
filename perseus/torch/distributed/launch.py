"""torch's older launcher; its scripts run as if `import perseus` were their first line.

    python -m perseus.torch.distributed.launch --nproc-per-node 4 train.py ARGUMENTS

It takes the flags of torch.distributed.launch, with dashes and with underscores.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

theirs: Any = import_module("torch.distributed.launch")

_SCRIPT = "perseus.compat.ddp"


def main(arguments: Sequence[str] | None = None) -> None:
    """Start the ranks and wait for them. arguments: None for those of this process."""
    args = theirs.parse_args(arguments)
    if args.no_python:
        print("[perseus] --no-python: the program runs on Perseus if it says `import perseus`")
    else:
        program = [*(["-m"] if args.module else []), args.training_script]
        args.training_script_args = [*program, *args.training_script_args]
        args.training_script, args.module, args.run_path = _SCRIPT, True, False
    theirs.launch(args)


if __name__ == "__main__":
    main()

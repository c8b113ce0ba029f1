"""A rank of a job of perseus-bench: measures the cases of a plan; rank 0 prints the records.

Usage: python -m perseus.bench.worker '<plan as JSON>'
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator

from perseus import basics
from perseus.bench.plan import MARK, TENSORFLOW, Plan
from perseus.bench.session import Session, Subject

_Cases = dict[str, Callable[[Session], Iterator[Subject]]]


def main() -> int:
    """Measure the plan in the first argument; return the exit status, 0."""
    plan = Plan.from_json(sys.argv[1])
    # The autotuner's trials in the first steps would distort the measurement.
    os.environ.setdefault("HOROVOD_AUTOTUNE", "0")
    # The launcher has divided the cores among the ranks; TensorFlow reads a name of its own.
    if threads := os.environ.get("OMP_NUM_THREADS"):
        os.environ.setdefault("TF_NUM_INTRAOP_THREADS", threads)
    basics.init()
    if plan.advise:
        from perseus.bench import advice

        for found in advice.measure(plan):
            if basics.rank() == 0:
                print(MARK + found.to_json(), flush=True)
        basics.shutdown()
        return 0
    cases, disband = _of_tensorflow() if plan.framework == TENSORFLOW else _of_torch()
    session = Session(plan)
    # The garbage collector would otherwise run in the middle of repetitions.
    gc.disable()
    for name in plan.cases:
        for subject in cases[name](session):
            for record in session.records(subject):
                if session.rank == 0:
                    print(MARK + record.to_json(), flush=True)
            gc.collect()
    disband()
    basics.shutdown()
    return 0


def _of_torch() -> tuple[_Cases, Callable[[], None]]:
    """Return the cases for PyTorch and a function that ends their peers.

    The import is here because a job has only one of the frameworks.
    """
    from perseus.bench.cases import CASES
    from perseus.bench.peers import disband

    return CASES, disband


def _of_tensorflow() -> tuple[_Cases, Callable[[], None]]:
    from perseus.bench import tensorflow_training

    return {"training": tensorflow_training.sweep}, lambda: None


if __name__ == "__main__":
    sys.exit(main())

"""A rank of a job that perseus-bench started: measures the plan, rank 0 prints the records.

python -m perseus.bench.worker '<plan as JSON>'
"""

from __future__ import annotations

import gc
import os
import sys

import perseus.torch.horovod as hvd
from perseus.bench import advice
from perseus.bench.cases import CASES
from perseus.bench.peers import disband
from perseus.bench.plan import MARK, Plan
from perseus.bench.session import Session


def main() -> int:
    """The exit status: 0 when everything was measured; verdicts are the launcher's."""
    plan = Plan.from_json(sys.argv[1])
    # What a tuner tries in its first steps is not what is to be measured.
    os.environ.setdefault("HOROVOD_AUTOTUNE", "0")
    hvd.init()
    if plan.advise:
        for found in advice.measure(plan):
            if hvd.rank() == 0:
                print(MARK + found.to_json(), flush=True)
        hvd.shutdown()
        return 0
    session = Session(plan)
    # The collector would run in the middle of a repetition.
    gc.disable()
    for name in plan.cases:
        for subject in CASES[name](session):
            for record in session.records(subject):
                if session.rank == 0:
                    print(MARK + record.to_json(), flush=True)
            gc.collect()
    disband()
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())

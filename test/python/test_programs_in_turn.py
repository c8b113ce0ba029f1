"""A rank's script runs several programs one after the other, each with worlds of its own."""

from __future__ import annotations

import sys
from pathlib import Path

from perseusrun_command import perseusrun

PROGRAM = """
import sys
import numpy as np
import perseus.arrays as hvd

for again in range(int(sys.argv[1])):
    hvd.init()
    total = hvd.allreduce(np.arange(3.0) + hvd.rank(), op=hvd.Sum).tolist()
    print(sys.argv[2], again, total, flush=True)
    hvd.shutdown()
"""


def test_ranks_that_are_late_in_a_later_program_are_waited_for(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    python = f"{sys.executable} {tmp_path / 'program.py'}"
    # The ranks begin the second program in one order, and the third one in the other.
    script = tmp_path / "all.sh"
    script.write_text(
        f"set -e\n{python} 3 first\n[ $PERSEUS_RANK = 0 ] || sleep 1\n{python} 2 second\n"
        f"[ $PERSEUS_RANK = 1 ] || sleep 1\n{python} 1 third\n"
    )
    done = perseusrun("-np", "2", "sh", str(script), timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    for program, worlds in (("first", 3), ("second", 2), ("third", 1)):
        for world in range(worlds):
            line = f"{program} {world} [1.0, 3.0, 5.0]"
            assert done.stdout.count(line) == 2, done.stdout

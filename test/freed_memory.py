"""How many page faults a process has that frees and allocates large blocks, for tests."""

from __future__ import annotations

import os
import subprocess
import sys

# Each larger than all before, which glibc would map and unmap one by one: 210 MiB. Where it keeps
# what is freed, they need the 20 MiB by which the last is larger than the first.
_BLOCKS = """
import resource

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def fill(size):
    b"x" * (size << 20)

fill(10)
before = faults()
for size in range(12, 32, 2):
    fill(size)
print(faults() - before)
"""

# Pages of 4 KiB: less than 60 MiB of them, and 200 to 260 MiB.
KEPT, GIVEN_BACK = range(60 << 8), range(200 << 8, 260 << 8)


def page_faults(setup: str, **environment: str) -> int:
    """Of a Python process that has run `setup`, with `environment` beside the usual one."""
    kept = {k: v for k, v in os.environ.items() if "MALLOC" not in k and k != "GLIBC_TUNABLES"}
    done = subprocess.run(
        [sys.executable, "-c", setup + _BLOCKS],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return int(done.stdout)

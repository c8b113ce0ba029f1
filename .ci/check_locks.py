"""Fails when code touches what a lock guards without holding the lock, as clang sees it.

Clang reads the annotations of common/base/thread_annotations.h, which g++ ignores, and makes no
objects. `python .ci/check_locks.py [ROOT]` prints what clang says and exits 1 where it says
anything. First it makes sure that clang does see offences against both kinds of lock.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

OFFENCES = """
#include "base/mutex.h"
#include "base/progress_lock.h"
int by_lock PERSEUS_GUARDED_BY(perseus::progress_lock) = 0;
perseus::Mutex mutex;
int by_mutex PERSEUS_GUARDED_BY(mutex) = 0;
void offend() { by_lock = by_mutex = 1; }
void use() {
  const perseus::MutexLock lock(mutex);
  by_mutex = 2;
}
"""


def complaints(common: Path, source: Path) -> str:
    """What clang says about the locks of one source file; "" if all is well."""
    command = ["clang++", "-std=c++17", "-fsyntax-only", "-Wthread-safety", "-Werror"]
    includes = [f"-I{common}", f"-I{common / 'include'}"]
    version = ['-DPERSEUS_VERSION="0"']
    done = subprocess.run(
        [*command, *includes, *version, str(source)], capture_output=True, text=True, check=False
    )
    return "" if done.returncode == 0 else done.stderr


def main(root: Path) -> int:
    common = root.resolve() / "common"
    with tempfile.TemporaryDirectory() as folder:
        offence = Path(folder, "offence.cc")
        offence.write_text(OFFENCES, encoding="utf-8")
        seen = complaints(common, offence)
        if any(seen.count(f"'{name}' requires") != 1 for name in ("by_lock", "by_mutex")):
            print("locks: clang does not see offences that were made on purpose")
            return 1
    # Variants of kernels need flags of their own, and the version a generated file; they have no
    # locks. No other build compiles each file alone, without the standard library read before.
    sources = [
        source
        for source in sorted(common.rglob("*.cc"))
        if source.parent.name != "glibc"
        and not source.name.startswith("variant_")
        and source.name != "version.cc"
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        said = [
            text for text in pool.map(lambda source: complaints(common, source), sources) if text
        ]
    for text in said:
        print(text)
    print(
        f"locks: {len(said)} files with offences"
        if said
        else f"locks: held in {len(sources)} files"
    )
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent)))

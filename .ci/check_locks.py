"""Fails when code touches what a lock guards without holding the lock, as clang sees it.

Clang reads the annotations of common/base/thread_annotations.h, which g++ ignores, and makes no
objects. `python .ci/check_locks.py [ROOT]` prints what clang says and exits 1 where it says
anything. First it makes sure that clang does see offences against both kinds of lock.

Clang reads the files of a layer together, which takes a third of the time. With PERSEUS_TEST_FULL
it reads each alone, which no other build does without the standard library read before, so it also
finds what a file uses and does not include.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
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


def units(common: Path, folder: Path) -> Iterator[tuple[Path, int]]:
    """Yield what clang is to read at once, and how many sources it has.

    Variants of kernels need flags of their own, and the version a generated file; they have no
    locks. The stores use the same names for limits of their own.
    """
    sources = [
        source
        for source in sorted(common.rglob("*.cc"))
        if source.parent.name != "glibc"
        and not source.name.startswith("variant_")
        and source.name != "version.cc"
    ]
    alone = "PERSEUS_TEST_FULL" in os.environ
    layers: dict[Path, list[Path]] = {}
    for source in sources:
        together = not alone and source.parent.name != "bootstrap"
        layers.setdefault(source.parent if together else source, []).append(source)
    for number, of_layer in enumerate(layers.values()):
        unit = folder / f"{number}.cc"
        unit.write_text("".join(f'#include "{each}"\n' for each in of_layer), encoding="utf-8")
        yield unit, len(of_layer)


def main(root: Path) -> int:
    common = root.resolve() / "common"
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        offence = folder / "offence.cc"
        offence.write_text(OFFENCES, encoding="utf-8")
        seen = complaints(common, offence)
        if any(seen.count(f"'{lock}' requires") != 1 for lock in ("by_lock", "by_mutex")):
            print("locks: clang does not see offences that were made on purpose")
            return 1
        read = list(units(common, folder))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            said = [
                text for text in pool.map(lambda unit: complaints(common, unit[0]), read) if text
            ]
    for text in said:
        print(text)
    files = sum(count for _, count in read)
    print(
        f"locks: clang complains in {len(said)} of {len(read)} compilations"
        if said
        else f"locks: held in {files} files"
    )
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent)))

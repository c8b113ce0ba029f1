"""The hash of the core's sources, which ranks compare: of every source, and of nothing else."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import perseus

ROOT = Path(__file__).resolve().parents[2]
COMMON = ROOT / "common"


def hash_of(sources: Path, header: Path) -> str:
    subprocess.run(
        [
            "cmake",
            f"-DSOURCE_DIR={sources}",
            f"-DOUTPUT={header}",
            "-P",
            str(COMMON / "source_hash.cmake"),
        ],
        check=True,
    )
    define, name, value = header.read_text().split()
    assert (define, name) == ("#define", "PERSEUS_SOURCE_HASH")
    return value.strip('"')


def test_hash_depends_on_every_source_and_not_on_its_folder(tmp_path):
    here = hash_of(COMMON, tmp_path / "here.h")
    copy = tmp_path / "copy"
    shutil.copytree(COMMON, copy)
    assert hash_of(copy, tmp_path / "copy.h") == here
    (copy / "notes.txt").write_text("no source")
    assert hash_of(copy, tmp_path / "notes.h") == here
    seen = {here}
    for source in ("transport/tcp_protocol.h", "request/request.cc", "include/perseus/perseus.h"):
        with Path(copy, source).open("a") as file:
            file.write("// changed\n")
        seen.add(hash_of(copy, tmp_path / "changed.h"))
    Path(copy, "request/request.cc").rename(copy / "engine/requests.cc")
    seen.add(hash_of(copy, tmp_path / "renamed.h"))
    assert len(seen) == 5


def test_header_is_not_written_again_without_a_change(tmp_path):
    header = tmp_path / "hash.h"
    hash_of(COMMON, header)
    before = header.stat().st_mtime_ns
    hash_of(COMMON, header)
    assert header.stat().st_mtime_ns == before


def test_library_has_the_hash_of_these_sources(tmp_path):
    library = Path(perseus.__file__).parent / "libperseus.so"
    version = f"{perseus.__version__}+{hash_of(COMMON, tmp_path / 'hash.h')}"
    assert version.encode() in library.read_bytes()

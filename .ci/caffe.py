"""Gets BVLC Caffe's source, patches it and builds it for the tests: `caffe.py FOLDER`.

Debian's source package of the suite that had it is exactly the commit that patches/bvlc_caffe are
made for. What is in FOLDER from an earlier run is used again: the archive, and what was compiled of
files that are still the same. Where the archive cannot be had any more, says so and leaves FOLDER
without a `caffe`. Standard library only.
"""

from __future__ import annotations

import filecmp
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PATCHES = sorted((ROOT / "patches" / "bvlc_caffe").glob("[0-9]_*.patch"))
COMMIT = "99bd99795dcdf0b1d3086a8d67ab1782a8a08383"
TOOL = ROOT / "test" / "with_caffe" / "replicas.cc"
PACKAGE, VERSION, SUITE = "caffe", "1.0.0+git20180821.99bd997", "bullseye"
ARCHIVE = f"{PACKAGE}_{VERSION}.orig.tar.gz"
CHECKSUM = "e0eb3f06794f7402c77b7dec8e8480273ee1a1bb192e9122b621a69d4147ad0c"
KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
OPTIONS = [
    "-Wno-dev",
    "-Wno-deprecated",
    "-DCMAKE_BUILD_TYPE=Release",
    "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG",
    "-DCMAKE_UNITY_BUILD=ON",
    "-DCMAKE_UNITY_BUILD_BATCH_SIZE=16",
    "-DCPU_ONLY=ON",
    "-DBLAS=open",
    "-DUSE_LEVELDB=OFF",
    "-DBUILD_python=OFF",
    "-DBUILD_docs=OFF",
    "-DUSE_PERSEUS=ON",
    f"-DPERSEUS_LIBRARY_PATH={ROOT / 'perseus' / 'libperseus-caffe.so'}",
    f"-DOpenCV_DIR={ROOT / '.ci' / 'opencv'}",
]


def is_archive(path: Path) -> bool:
    """Is this the one archive that the patches are made for?"""
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == CHECKSUM


def mirror() -> str:
    """Where this machine gets Debian's packages from."""
    asked = ["apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages"]
    sites = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split()
    debian = [site for site in sites if site.rstrip("/").endswith("/debian")]
    return debian[0] if debian else "http://deb.debian.org/debian"


def download(archive: Path) -> str:
    """Fetches the archive with apt; returns why that failed, or ""."""
    if shutil.which("apt-get") is None:
        return "there is no apt-get"
    private = archive.parent / "apt"
    (private / "lists" / "partial").mkdir(parents=True, exist_ok=True)
    sources = private / "sources.list"
    sources.write_text(f"deb-src [signed-by={KEYS}] {mirror()} {SUITE} main\n", encoding="utf-8")
    # Lists of its own: this suite is none that packages are to be installed from.
    apt = ["apt-get", "-qq", "-o", f"Dir::Etc::SourceList={sources}"]
    apt += ["-o", "Dir::Etc::SourceParts=/dev/null", "-o", f"Dir::State::Lists={private / 'lists'}"]
    apt += ["-o", f"Dir::Cache={private / 'cache'}", "-o", "APT::Sandbox::User=root"]
    said = ""
    for command in (["update"], ["source", "--download-only", f"{PACKAGE}={VERSION}-8"]):
        done = subprocess.run(
            [*apt, *command], cwd=archive.parent, capture_output=True, text=True, check=False
        )
        said = (done.stderr.strip().splitlines() or [f"apt-get {command[0]} gave nothing"])[-1]
    if is_archive(archive):
        return ""
    return f"{ARCHIVE} has another checksum" if archive.exists() else said


def patched(archive: Path, tree: Path, patches: list[Path]) -> None:
    """Extracts the archive into a new folder and applies patches, as a user does."""
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    # Only Python from 3.11.4 on has filters. The checksum has shown that it is the archive we know.
    filtered = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    with tarfile.open(archive) as packed:
        packed.extractall(tree, **filtered)
    # Inside another repository git would leave out what is not part of that.
    alone = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)}
    for patch in patches:
        subprocess.run(["git", "apply", str(patch)], cwd=tree, env=alone, check=True)


def update(old: Path, new: Path) -> None:
    """Makes `old` equal to `new`; files that are the same keep their times."""
    for path in sorted(old.rglob("*"), reverse=True):
        if path.is_file() and not (new / path.relative_to(old)).is_file():
            path.unlink()
    old.mkdir(exist_ok=True)
    for path in sorted(new.rglob("*")):
        target = old / path.relative_to(new)
        if path.is_dir():
            target.mkdir(exist_ok=True)
        elif not target.is_file() or not filecmp.cmp(path, target, shallow=False):
            shutil.copyfile(path, target)
            shutil.copymode(path, target)


def build(folder: Path) -> None:
    """Compiles the command `caffe` as FOLDER/build/tools/caffe, and the tests' tool beside it."""
    made = folder / "build"
    # Each time: that is how CMake learns of a new source file.
    subprocess.run(
        ["cmake", "-G", "Ninja", "-S", str(folder / "source"), "-B", str(made), *OPTIONS],
        stdout=subprocess.DEVNULL, check=True,
    )  # fmt: skip
    subprocess.run(["ninja", "-C", str(made), "--quiet", "caffe.bin", TOOL.stem], check=True)


def main(folder: Path) -> int:
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / ARCHIVE
    if not is_archive(archive):
        why = download(archive)
        if why:
            print(f"NOT TESTED: Caffe. Its source ({ARCHIVE}) cannot be had: {why}", flush=True)
            return 0
    patched(archive, folder / "new", PATCHES)
    # CMake makes a command of each file there.
    shutil.copy(TOOL, folder / "new" / "tools" / f"{TOOL.stem}.cpp")
    update(folder / "source", folder / "new")
    shutil.rmtree(folder / "new")
    build(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

"""Installs the Debian packages that `make` needs and this machine lacks, and says which and why.

Run as `python3 .ci/system_packages.py build` or `… build test`. Looks for the thing itself, not
for the package, so other distributions and hand-made installations are fine; where apt-get or the
right to use it is missing, it says what to install. Standard library only: it runs before anything
is installed.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class Need(NamedTuple):
    """One thing that must be there, and the Debian package that brings it."""

    package: str
    purpose: str
    present: Callable[[], bool]


def command(name: str) -> Callable[[], bool]:
    """Is there a program of that name, in the usual places for root's programs too?"""
    places = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    return lambda: shutil.which(name, path=places) is not None


def header(name: str) -> Callable[[], bool]:
    """Is there an installed C or C++ header of that name?"""
    return lambda: any(Path(root, name).exists() for root in ("/usr/include", "/usr/local/include"))


def library(name: str) -> Callable[[], bool]:
    """Is there a library of that name to link with?"""
    places = [Path("/usr/lib"), Path("/usr/local/lib"), *Path("/usr/lib").glob("*-linux-gnu")]
    return lambda: any((place / f"lib{name}.so").exists() for place in places)


def python_headers() -> bool:
    return Path(sysconfig.get_paths()["include"], "Python.h").exists()


def fuzzer() -> bool:
    return any(Path("/usr/lib").glob("llvm-*/lib/clang/*/lib/linux/libclang_rt.fuzzer-x86_64.a"))


def has_venv() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("venv", "ensurepip"))


NEEDS = {
    "build": [
        Need("g++", "compiles the core", command("g++")),
        Need("python3-dev", "headers for the Python extension", python_headers),
        Need("python3-venv", "makes .venv", has_venv),
    ],
    "test": [
        Need("libgtest-dev", "the C++ tests", header("gtest/gtest.h")),
        Need("iproute2", "virtual hosts: network namespaces and rate limits", command("tc")),
        Need("openssh-client", "perseusrun over ssh", command("ssh")),
        Need("openssh-server", "perseusrun over ssh, to virtual hosts", command("sshd")),
    ],
    "locks": [Need("clang", "checks that locks are held", command("clang++"))],
    "fuzz": [Need("libclang-rt-dev", "libFuzzer and sanitizers of clang", fuzzer)],
    "aarch64": [
        Need("g++-aarch64-linux-gnu", "compiles for aarch64", command("aarch64-linux-gnu-g++")),
        Need("qemu-user-static", "runs that here", command("qemu-aarch64-static")),
    ],
    "caffe": [
        Need("git", "applies the patches of patches/bvlc_caffe", command("git")),
        Need("protobuf-compiler", "compiles Caffe's messages", command("protoc")),
        *(
            Need(f"lib{package}-dev", "builds Caffe", library(name))
            for package, name in (
                ("protobuf", "protobuf"),
                ("boost-system", "boost_system"),
                ("boost-filesystem", "boost_filesystem"),
                ("boost-thread", "boost_thread"),
                ("openblas", "openblas"),
                ("google-glog", "glog"),
                ("gflags", "gflags"),
                ("hdf5", "hdf5_serial"),
                ("lmdb", "lmdb"),
                ("opencv-core", "opencv_core"),
                ("opencv-imgproc", "opencv_imgproc"),
                ("opencv-imgcodecs", "opencv_imgcodecs"),
            )
        ),
    ],
}


def missing(groups: list[str]) -> list[Need]:
    """What the named groups need and is not there."""
    return [need for group in groups for need in NEEDS[group] if not need.present()]


def install(packages: list[str]) -> None:
    """Runs apt-get; raises CalledProcessError where it fails."""
    sudo = [] if os.geteuid() == 0 else ["sudo"]
    # One variable on the command line, not in our environment: sudo would drop it.
    apt = [*sudo, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get"]
    quiet = ["-qq", "-o", "Dpkg::Use-Pty=0"]
    options = [*quiet, "install", "-y", "--no-install-recommends"]
    with open(__file__, encoding="utf-8") as file:
        # make -j starts several of us, and one apt-get does not wait for another.
        fcntl.flock(file, fcntl.LOCK_EX)
        subprocess.run([*apt, *quiet, "update"], check=True, stdin=subprocess.DEVNULL)
        subprocess.run([*apt, *options, *packages], check=True, stdin=subprocess.DEVNULL)


def may_install() -> bool:
    """Is there an apt-get that we may run without a password?"""
    if shutil.which("apt-get") is None:
        return False
    if os.geteuid() == 0:
        return True
    asked = ["sudo", "-n", "true"]
    return shutil.which("sudo") is not None and subprocess.run(asked, check=False).returncode == 0


def main(groups: list[str]) -> int:
    if not (3, 10) <= sys.version_info[:2] <= (3, 13):
        print(f"Python {sys.version.split()[0]}: expected 3.10 to 3.13; say make PYTHON=python3.11")
        return 1
    wanted = missing(groups)
    if not wanted:
        return 0
    packages = [need.package for need in wanted]
    for need in wanted:
        print(f"missing: {need.package} ({need.purpose})", flush=True)
    if not may_install():
        print(f"please install: sudo apt-get install {' '.join(packages)} (or their equivalents)")
        return 1
    print(f"installing with apt-get: {' '.join(packages)}", flush=True)
    try:
        install(packages)
    except subprocess.CalledProcessError as error:
        print(f"apt-get failed ({error}); please install {' '.join(packages)} by hand")
        return 1
    left = [need.package for need in missing(groups)]
    if left:
        print(f"installed, but still not found: {' '.join(left)}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

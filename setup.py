"""Builds libperseus.so and what loads it with CMake, for a wheel with examples and patches.

Everything declarative is in pyproject.toml. PERSEUS_BUILD_DIR names a CMake build folder to use
and keep (the Makefile's); without it setuptools' temporary folder is used.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
TARGETS = ["perseus", "_core", "perseus_tensorflow", "perseus_mxnet", "perseus_caffe"]


def version() -> str:
    """The version of perseus/version.py, which the core reports too."""
    text = (ROOT / "perseus" / "version.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([0-9.]+)"$', text, re.MULTILINE)
    if found is None:
        raise SystemExit("perseus/version.py: no line __version__ = …")
    return found.group(1)


def tool(name: str) -> str:
    """The full path of a build tool: its Python package's, or an environment's, activated or not.

    pip builds with a package in a folder of its own, and with the interpreter of the environment,
    beside which an older tool may lie.
    """
    try:
        files = metadata.files(name) or []
    except metadata.PackageNotFoundError:
        files = []
    locations = [Path(file.locate()) for file in files if file.match(f"bin/{name}")]
    packaged = [str(location.parent.resolve()) for location in locations]
    places = [*packaged, str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    found = shutil.which(name, path=os.pathsep.join(places))
    if found is None:
        raise SystemExit(f"{name} not found: pip install {name} (or no --no-build-isolation)")
    return found


def check_compiler() -> None:
    """Names what no Python package brings; CMake would take a page to say so."""
    given = os.environ.get("CXX", "").split()[:1]
    names = given or ["c++", "g++", "clang++"]
    if not any(map(shutil.which, names)):
        raise SystemExit(f"no C++ compiler ({', '.join(names)}) found: apt install g++, or set CXX")
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        package = "python3-dev, or python{}.{}-dev".format(*sys.version_info)
        raise SystemExit(f"{header} not found: apt install {package}")


def run(command: list[str]) -> None:
    """Runs one build step; its own output says what went wrong."""
    if subprocess.run(command, check=False).returncode != 0:
        raise SystemExit(f"failed: {' '.join(command)}")


class CleanBuild(build):
    """Starts from an empty output folder, so that deleted modules cannot reach a wheel."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


# What perseus/tensorflow/build_xla.py compiles on the user's machine.
COMPILED_LATER = ["frameworks/tensorflow", "frameworks/world", "common/include/perseus"]
# What users start from: scripts, and patches for other source trees.
FOR_USERS = ["examples", "patches"]


class BuildPackage(build_py):
    """Python modules, perseus/{examples,patches} for users, C++ sources as perseus/sources."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            for folder in FOR_USERS:
                link = ROOT / "perseus" / folder
                if not link.exists():
                    link.symlink_to(Path("..") / folder)
            return
        for folder in FOR_USERS:
            self._install(ROOT / folder, Path(folder))
        for folder in COMPILED_LATER:
            self._install(ROOT / folder, Path("sources", folder), (".h", ".cc"))

    def _install(self, folder: Path, place: Path, endings: tuple[str, ...] = ("",)) -> None:
        """Copy the files of a folder to a place in the package."""
        for source in sorted(folder.rglob("*")):
            relative = source.relative_to(folder)
            wanted = source.is_file() and source.name.endswith(endings)
            if wanted and "__pycache__" not in relative.parts:
                target = Path(self.build_lib, "perseus", place, relative)
                self.mkpath(str(target.parent))
                self.copy_file(str(source), str(target))


class BuildCore(build_ext):
    """Runs CMake. An editable install gets the libraries in perseus/, with their debug lines."""

    def run(self) -> None:
        in_place = self.inplace or self.editable_mode
        package = ROOT / "perseus" if in_place else Path(self.build_lib, "perseus").resolve()
        kept = os.environ.get("PERSEUS_BUILD_DIR")
        folder = Path(kept or Path(self.build_temp, "cmake")).resolve()
        check_compiler()
        cmake = tool("cmake")
        configure = [cmake, "-S", str(ROOT), "-B", str(folder), "-DPERSEUS_PYTHON=ON"]
        configure.append(f"-DPython_EXECUTABLE={sys.executable}")
        if not kept or not (folder / "CMakeCache.txt").exists():
            configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"]
        if not kept:
            # An earlier pip run's cache names tools of an environment that is gone.
            made = package if in_place else folder / "package"
            configure += ["--fresh", f"-DPERSEUS_PACKAGE_DIR={made}"]
        run(configure)
        run([cmake, "--build", str(folder), "--target", *TARGETS])
        if not in_place:
            install = [cmake, "--install", str(folder), "--component", "python", "--strip"]
            run([*install, "--prefix", str(package.parent)])

    def get_outputs(self) -> list[str]:
        """Nothing for setuptools to copy: CMake has put everything where it belongs."""
        return []

    def get_output_mapping(self) -> dict[str, str]:
        return {}


setup(
    version=version(),
    ext_modules=[Extension("perseus._core", sources=[])],
    cmdclass={"build": CleanBuild, "build_py": BuildPackage, "build_ext": BuildCore},
)

"""The wheel is what it promises: no framework, no new glibc, complete, and usable where nothing is.

The wheel is built from the objects that `make build` left, so that nothing is compiled twice.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from elftools.elf.sections import SymbolTableSection

ROOT = Path(__file__).resolve().parents[2]
SYSTEM_LIBRARIES = re.compile(r"(libc|libm|libpthread|libdl|librt|ld-linux[a-z0-9_-]*)\.so\.\d+")
NEWEST_GLIBC = (2, 28)


def build_folder() -> Path:
    default = ROOT / "build" / f"cp{sys.version_info.major}{sys.version_info.minor}"
    return Path(os.environ.get("PERSEUS_BUILD_DIR", default))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    env = {**os.environ, "PERSEUS_BUILD_DIR": str(build_folder())}
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "."]
    command += ["--disable-pip-version-check", "-w", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def libraries(unpacked: Path) -> list[Path]:
    found = sorted(unpacked.rglob("*.so*"))
    names = [path.name.split(".")[0] for path in found]
    assert names == [
        "_core",
        "libperseus-caffe",
        "libperseus",
        "libperseus_mxnet",
        "libperseus_tensorflow",
    ]
    return found


def dynamic_entries(library: Path, tag: str) -> list[str]:
    """The text of every entry of one kind in the dynamic section."""
    attribute = {"DT_NEEDED": "needed", "DT_RUNPATH": "runpath", "DT_RPATH": "rpath"}[tag]
    with library.open("rb") as file:
        section = ELFFile(file).get_section_by_name(".dynamic")
        assert isinstance(section, DynamicSection)
        return [getattr(entry, attribute) for entry in section.iter_tags(tag)]


def glibc_needs(library: Path) -> Iterator[tuple[tuple[int, ...], str]]:
    """(version, symbol) for every symbol that is bound to a GLIBC_… version."""
    with library.open("rb") as file:
        elf = ELFFile(file)
        needs = elf.get_section_by_name(".gnu.version_r")
        versions = elf.get_section_by_name(".gnu.version")
        symbols = elf.get_section_by_name(".dynsym")
        assert isinstance(needs, GNUVerNeedSection)
        assert isinstance(symbols, SymbolTableSection)
        names = {
            auxiliary["vna_other"]: auxiliary.name
            for _, auxiliaries in needs.iter_versions()
            for auxiliary in auxiliaries
        }
        for index, symbol in enumerate(symbols.iter_symbols()):
            name = names.get(versions.get_symbol(index)["ndx"], "")
            if name.startswith("GLIBC_"):
                yield tuple(int(part) for part in name[6:].split(".")), symbol.name


def visible_symbols(library: Path) -> list[str]:
    with library.open("rb") as file:
        symbols = ELFFile(file).get_section_by_name(".dynsym")
        assert isinstance(symbols, SymbolTableSection)
        return [s.name for s in symbols.iter_symbols() if s.name and s["st_shndx"] != "SHN_UNDEF"]


def test_libraries_need_only_libc_each_other_and_their_framework(libraries: list[Path]) -> None:
    for library in libraries:
        for needed in dynamic_entries(library, "DT_NEEDED"):
            own = needed == "libperseus.so" and library.name != "libperseus.so"
            # Which TensorFlow itself has loaded by then, in any version.
            own |= needed == "libtensorflow_framework.so.2" and "tensorflow" in library.name
            assert own or SYSTEM_LIBRARIES.fullmatch(needed), f"{library.name} needs {needed}"


def test_the_core_is_found_beside_what_needs_it(libraries: list[Path]) -> None:
    extension, caffe, core, mxnet, tensorflow = libraries
    for library in (extension, caffe, mxnet, tensorflow):
        assert "libperseus.so" in dynamic_entries(library, "DT_NEEDED")
        assert dynamic_entries(library, "DT_RUNPATH") == ["$ORIGIN"]
    assert dynamic_entries(core, "DT_RUNPATH") + dynamic_entries(core, "DT_RPATH") == []


def test_no_symbol_is_newer_than_glibc_2_28(libraries: list[Path]) -> None:
    for library in libraries:
        needs = list(glibc_needs(library))
        assert len(needs) > 20  # the reader of this test reads something
        newer = sorted(f"{name}@{version}" for version, name in needs if version > NEWEST_GLIBC)
        assert not newer, f"{library.name}: add to common/glibc/older_symbols.cc: {newer}"


def test_only_the_interface_is_visible(libraries: list[Path]) -> None:
    extension, caffe, core, mxnet, tensorflow = libraries
    assert visible_symbols(extension) == ["PyInit__core"]
    prefixes = {
        caffe: "perseus_exchange_",
        mxnet: "perseus_mxnet_",
        tensorflow: "perseus_tensorflow_",
    }
    for library, prefix in prefixes.items():
        names = visible_symbols(library)
        assert names and all(name.startswith(prefix) for name in names), names
    assert "perseus_context_create" in visible_symbols(core)
    assert [name for name in visible_symbols(core) if not name.startswith("perseus_")] == []


def test_libraries_are_stripped_and_small(libraries: list[Path]) -> None:
    for library in libraries:
        with library.open("rb") as file:
            assert ELFFile(file).get_section_by_name(".debug_info") is None
        assert library.stat().st_size < 8 * 2**20


def test_the_wheel_is_complete(wheel: Path, unpacked: Path) -> None:
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert re.fullmatch(rf"perseus_training-[0-9.]+-{tag}-{tag}-linux_\w+\.whl", wheel.name)
    package = unpacked / "perseus"
    assert (package / "py.typed").exists()
    sources = sorted(path.relative_to(ROOT) for path in (ROOT / "examples").glob("*.py"))
    assert sources
    for source in sources:
        assert (package / source).read_bytes() == (ROOT / source).read_bytes()
    # What --build-xla compiles.
    for folder in ("frameworks/tensorflow/xla", "frameworks/world", "common/include/perseus"):
        for source in (ROOT / folder).glob("*"):
            assert (package / "sources" / source.relative_to(ROOT)).exists(), source
    # What a patched Caffe is compiled with.
    headers = package / "include" / "perseus"
    assert {path.name for path in headers.iterdir()} == {"caffe.h", "perseus.h"}
    modules = {path.relative_to(ROOT) for path in (ROOT / "perseus").rglob("*.py")}
    modules = {path for path in modules if path.parts[1] != "examples"}
    packed = {path.relative_to(unpacked) for path in package.rglob("*.py")}
    assert modules <= packed
    assert {path for path in packed - modules if path.parts[1] != "examples"} == set()


def test_installed_alone_it_imports_and_launches(wheel: Path, tmp_path: Path) -> None:
    """In an environment without torch, numpy or a compiler: python -m venv, the wheel, no more."""
    home = tmp_path / "venv"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def run(*command: str) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    target = f"--python={python}"
    quiet = ["--quiet", "--disable-pip-version-check"]
    run(sys.executable, "-m", "pip", target, "install", *quiet, "--no-deps", str(wheel))
    code = "import sys, perseus; print(perseus.__version__, 'torch' in sys.modules)"
    version = re.search(
        r"project\(perseus VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text()
    )
    assert version is not None
    assert run(str(python), "-c", code).split() == [version.group(1), "False"]
    report = run(str(home / "bin" / "perseusrun"), "--check-build")
    assert "[ ] PyTorch" in report
    assert "[X] Gloo" in report

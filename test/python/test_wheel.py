"""The wheel is what it promises: no framework, no new glibc, complete, and usable where nothing is.

The wheel is built from the objects that `make build` left, so that nothing is compiled twice.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from elftools.elf.sections import SymbolTableSection

from perseus import _core
from perseus.bench.virtual_hosts import unavailable

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


def test_functions_that_a_new_glibc_renames_are_bound_to_their_old_names() -> None:
    """On glibc 2.38 and newer, headers turn them into __isoc23_…; this libc's may be older."""
    sources = [*(ROOT / "common").rglob("*"), *(ROOT / "frameworks").rglob("*")]
    text = "".join(path.read_text() for path in sources if path.suffix in {".cc", ".h"})
    used = set(re.findall(r"\b(v?[fs]?w?scanf|(?:str|wcs)to(?:l|ll|ul|ull|imax|umax))\(", text))
    assert "sscanf" in used
    bound = set(re.findall(r"^RENAMED\(__isoc23_(\w+),", text, re.MULTILINE))
    assert used <= bound, f"add to common/glibc/older_symbols.cc: {used - bound}"


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
    sources = {path.relative_to(ROOT) for path in (ROOT / "examples").glob("*.py")}
    sources |= {path.relative_to(ROOT) for path in (ROOT / "patches").rglob("*") if path.is_file()}
    assert {source.suffix for source in sources} == {".py", ".patch", ".md"}
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


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and nothing else: its folder."""
    home = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(home, with_pip=False)
    command = [sys.executable, "-m", "pip", f"--python={home / 'bin' / 'python'}", "install"]
    command += ["--quiet", "--disable-pip-version-check", "--no-deps", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return home


def run_in(home: Path, *command: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """A command of an environment, away from the checkout; it ends with `code`."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    program = [str(home / "bin" / command[0]), *command[1:]]
    done = subprocess.run(
        program, cwd=home, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def test_installed_alone_it_imports_and_launches(installed: Path) -> None:
    """In an environment without torch, numpy or a compiler: python -m venv, the wheel, no more."""
    code = "import sys, perseus; print(perseus.__version__, 'torch' in sys.modules)"
    version = _core.version()
    assert run_in(installed, "python", "-c", code).stdout.split() == [version, "False"]
    report = run_in(installed, "perseusrun", "--check-build").stdout
    assert "[ ] PyTorch" in report
    assert "[X] Gloo" in report


def examples_of(home: Path) -> Path:
    (found,) = home.glob("lib/python3*/site-packages/perseus/examples")
    return found


def test_an_example_without_its_packages_names_the_extra(installed: Path) -> None:
    for example in ("caffe_mnist.py", "mnist_data.py"):
        script = str(examples_of(installed) / example)
        said = run_in(installed, "python", script, code=1).stderr
        assert said == (
            "the examples need numpy, which is not installed: "
            "pip install 'perseus-training[examples]'\n"
        )


@pytest.mark.parametrize(
    ("missing", "example", "arguments"),
    [
        ("tqdm", "pytorch_mnist.py", []),
        ("tqdm", "pytorch_join.py", []),
        ("sklearn", "pytorch_mnist.py", []),
        ("matplotlib", "pytorch_mnist.py", ["--plot", "loss.png"]),
        ("h5py", "caffe_mnist.py", ["digits"]),
    ],
)
def test_every_package_that_an_example_misses_is_named(
    missing: str, example: str, arguments: list[str], tmp_path: Path
) -> None:
    script = str(ROOT / "examples" / example)
    # A finder in front of all others, as if it were not installed.
    program = f"""
import runpy, sys
class Absent:
    def find_spec(name, path=None, target=None):
        if name == {missing!r}:
            raise ModuleNotFoundError(f"No module named '{{name}}'", name=name)
sys.meta_path.insert(0, Absent)
sys.argv = {[script, *arguments]!r}
sys.path.insert(0, {str(ROOT / "examples")!r})
runpy.run_path({script!r}, run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert f"the examples need {missing}, which is not installed: pip install" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_extra_has_what_the_examples_import(unpacked: Path) -> None:
    frameworks = {"torch", "tensorflow", "keras", "mxnet", "perseus"}
    frameworks |= {"pytorch_lightning", "transformers"}
    examples = sorted((ROOT / "examples").glob("*.py"))
    imported = set()
    for source in examples:
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.split(".")[0])
    own = {source.stem for source in examples}
    needed = imported - own - frameworks - set(sys.stdlib_module_names)
    (metadata,) = unpacked.glob("*.dist-info/METADATA")
    lines = metadata.read_text(encoding="utf-8").splitlines()
    extra = [line for line in lines if line.endswith('extra == "examples"')]
    names = {re.split(r"[^\w-]", line.removeprefix("Requires-Dist: "))[0] for line in extra}
    assert {name.replace("sklearn", "scikit-learn") for name in needed} == names


def test_a_build_tool_is_its_package_s_before_the_interpreter_s(tmp_path: Path) -> None:
    for place in ("bin", "build/bin"):
        folder = tmp_path / place
        folder.mkdir(parents=True)
        (folder / "cmake").write_text("#!/bin/sh\n")
        (folder / "cmake").chmod(0o755)
    (tmp_path / "bin" / "python").symlink_to(Path(sys.executable).resolve())
    package = tmp_path / "build" / "site-packages" / "cmake-4.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: cmake\nVersion: 4.0\n")
    (package / "RECORD").write_text("../bin/cmake,,\n")
    program = f"""
import runpy, setuptools
setuptools.setup = lambda **_: None
print(runpy.run_path({str(ROOT / "setup.py")!r})["tool"]("cmake"))
"""
    found = subprocess.run(
        [str(tmp_path / "bin" / "python"), "-c", program],
        env={
            **os.environ,
            "PYTHONPATH": f"{package.parent}:{sysconfig.get_path('purelib')}",
            "PATH": os.defpath,
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert Path(found.stdout.strip()).resolve() == tmp_path / "build" / "bin" / "cmake"


@pytest.mark.parametrize(
    ("compiler", "headers", "said"),
    [
        (None, True, "no C++ compiler (c++, g++, clang++) found: apt install g++, or set CXX\n"),
        ("g++-0 -O1", True, "no C++ compiler (g++-0) found: apt install g++, or set CXX\n"),
        ("compiler -O1", False, "Python.h not found: apt install python3-dev, or python3."),
        ("compiler -O1", True, ""),
    ],
)
def test_what_a_build_needs_of_the_system_is_named(
    compiler: str | None, headers: bool, said: str, tmp_path: Path
) -> None:
    (tmp_path / "compiler").write_text("#!/bin/sh\n")
    (tmp_path / "compiler").chmod(0o755)
    if headers:
        (tmp_path / "Python.h").touch()
    program = f"""
import runpy, setuptools, sysconfig
setuptools.setup = lambda **_: None
sysconfig.get_path = lambda name: {str(tmp_path)!r}
runpy.run_path({str(ROOT / "setup.py")!r})["check_compiler"]()
"""
    env = {name: value for name, value in os.environ.items() if name != "CXX"}
    env |= {"PATH": str(tmp_path), **({} if compiler is None else {"CXX": compiler})}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert (said in done.stderr) if said else not done.stderr
    assert (done.returncode != 0) == bool(said)


def test_the_source_distribution_has_what_the_wheel_has(wheel: Path, tmp_path: Path) -> None:
    program = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        held = {name.partition("/")[2] for name in packed.getnames()}
    with zipfile.ZipFile(wheel) as archive_of_wheel:
        files = {name.removeprefix("perseus/") for name in archive_of_wheel.namelist()}
    for_users = {name for name in files if name.startswith(("examples/", "patches/"))}
    assert for_users <= held
    sources = {name.removeprefix("sources/") for name in files if name.startswith("sources/")}
    assert sources <= held
    modules = {f"perseus/{name}" for name in files if name.endswith(".py")} - {
        f"perseus/{name}" for name in for_users
    }
    assert modules <= held


def test_installed_it_measures_virtual_hosts(installed: Path) -> None:
    if reason := unavailable():
        pytest.skip(reason)
    pytest.importorskip("torch")
    # PyTorch from this environment, behind the wheel; its .pth files, the editable install, stay.
    (site,) = installed.glob("lib/python3*/site-packages")
    (site / "torch.pth").write_text(sysconfig.get_path("purelib") + "\n")
    arguments = ["network", "--hosts", "2", "--sizes", "64K", "--seconds", "0.05", "--peer", ""]
    said = run_in(installed, "perseus-bench", *arguments)
    found = re.search(r"^network +perseus +2 +2 +64 KiB .* right$", said.stdout, re.MULTILINE)
    assert found, said.stdout + said.stderr
    where = run_in(installed, "python", "-c", "import perseus; print(perseus.__file__)").stdout
    assert where.startswith(str(installed))

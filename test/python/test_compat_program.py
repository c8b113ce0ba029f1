"""`python -m perseus.compat.horovod` runs programs as `python` itself does, worker processes too.

Without a framework: scripts here import `horovod` itself and modules of it that need none.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

_ENTRY = ["-m", "perseus.compat.horovod"]
# What a program can see of how it was started.
_SHOW = """
import json, sys
try:
    import horovod
except ImportError:
    pass  # plain python
if __name__ == "__main__":
    json.dump([sys.argv, sys.path[0], globals().get("__file__"), __package__,
               sys.modules["__main__"].__dict__ is globals()], sys.stdout)
"""


def python(*arguments: str, cwd: Path, status: int = 0) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == status, result.stderr
    return result


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A script, a package with a main module, and a link to the script from elsewhere."""
    (tmp_path / "src" / "package").mkdir(parents=True)
    (tmp_path / "src" / "show.py").write_text(_SHOW, encoding="utf-8")
    (tmp_path / "src" / "package" / "__init__.py").touch()
    (tmp_path / "src" / "package" / "show.py").write_text(
        "from . import __name__ as package\nassert package.endswith('package')\n" + _SHOW,
        encoding="utf-8",
    )
    (tmp_path / "src" / "package" / "__main__.py").write_text(_SHOW, encoding="utf-8")
    (tmp_path / "link.py").symlink_to(tmp_path / "src" / "show.py")
    return tmp_path


_SCRIPT = ["src/show.py", "-m", "1"]
_MODULE = ["-m", "src.package.show", "2"]
_CODE = ["-c", _SHOW, "3"]
_NEEDS_3_11 = pytest.mark.skipif(sys.version_info < (3, 11), reason="-P came with Python 3.11")


@pytest.mark.parametrize(
    ("options", "program"),
    [
        pytest.param([], _SCRIPT, id="script"),
        pytest.param(["-u"], ["link.py"], id="-u-link"),
        pytest.param([], _MODULE, id="module"),
        pytest.param([], ["-m", "src.package", "-c"], id="package"),
        pytest.param([], _CODE, id="code"),
        pytest.param(["-P"], _SCRIPT, id="-P-script", marks=_NEEDS_3_11),
        pytest.param(["-P"], _CODE, id="-P-code", marks=_NEEDS_3_11),
    ],
)
def test_program_sees_what_python_would_show_it(
    folder: Path, options: list[str], program: list[str]
) -> None:
    plain = python(*options, *program, cwd=folder)
    aliased = python(*options, *_ENTRY, *program, cwd=folder)
    assert json.loads(aliased.stdout) == json.loads(plain.stdout)


def test_environment_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text(
        "import json, os, sys\njson.dump(dict(os.environ), sys.stdout)\n", encoding="utf-8"
    )
    for program in (["show.py"], ["-m", "show"]):
        plain = python(*program, cwd=tmp_path)
        aliased = python(*_ENTRY, *program, cwd=tmp_path)
        assert json.loads(aliased.stdout) == json.loads(plain.stdout)


def test_module_of_a_package_imports_its_neighbours(folder: Path) -> None:
    result = python(*_ENTRY, "-m", "package.show", cwd=folder / "src")
    assert json.loads(result.stdout)[3] == "package"


def test_exit_status_and_error_are_the_programs(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("import horovod, sys; sys.exit(7)\n", encoding="utf-8")
    python(*_ENTRY, "ends.py", cwd=tmp_path, status=7)
    (tmp_path / "fails.py").write_text("import horovod\n1 / 0\n", encoding="utf-8")
    result = python(*_ENTRY, "fails.py", cwd=tmp_path, status=1)
    assert 'fails.py", line 2' in result.stderr
    assert result.stderr.endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (["nowhere.py"], "nowhere.py: No such file or directory"),
        (["-m", "nowhere"], "no module named nowhere that can be run"),
        ([], "no program; a program that starts its own ranks"),
        (["-m"], "no such option, or incomplete: -m"),
        (["-z", "x.py"], "no such option, or incomplete: -z"),
    ],
)
def test_what_cannot_be_run_is_said_in_one_line(
    tmp_path: Path, program: list[str], message: str
) -> None:
    result = python(*_ENTRY, *program, cwd=tmp_path, status=1)
    assert f"perseus.compat.horovod: error: {message}" in result.stderr.splitlines()[0]


_POOL = """
import multiprocessing
from horovod.common import util

class Point:
    def __init__(self, x):
        self.x = x

def work(point):
    return point.x * 10 + len(util.EXTENSIONS), __name__

if __name__ == "__main__":
    for method in ("spawn", "forkserver", "fork"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(method, pool.map(work, [Point(4)]))
"""


@pytest.mark.parametrize("how", ["script", "module"])
def test_worker_processes_find_the_alias_and_the_programs_names(tmp_path: Path, how: str) -> None:
    (tmp_path / "pool.py").write_text(_POOL, encoding="utf-8")
    result = python(*_ENTRY, *(["pool.py"] if how == "script" else ["-m", "pool"]), cwd=tmp_path)
    assert result.stdout.splitlines() == [
        "spawn [(43, '__mp_main__')]",
        "forkserver [(43, '__mp_main__')]",
        "fork [(43, '__main__')]",
    ]


_CHAIN = """
import multiprocessing
from horovod.common import util

def work(depth):
    print(depth, len(util.EXTENSIONS), flush=True)
    if depth:
        child = multiprocessing.get_context("spawn").Process(target=work, args=(depth - 1,))
        child.start()
        child.join()
        raise SystemExit(child.exitcode)

if __name__ == "__main__":
    work(2)
"""


def test_workers_of_workers_find_the_alias(tmp_path: Path) -> None:
    (tmp_path / "chain.py").write_text(_CHAIN, encoding="utf-8")
    result = python(*_ENTRY, "chain.py", cwd=tmp_path)
    assert result.stdout.splitlines() == ["2 3", "1 3", "0 3"]


def test_import_above_the_script_needs_no_launcher(tmp_path: Path) -> None:
    text = "import perseus.compat.horovod\n" + _POOL
    (tmp_path / "pool.py").write_text(text, encoding="utf-8")
    result = python("pool.py", cwd=tmp_path)
    assert "forkserver [(43, '__mp_main__')]" in result.stdout


def test_an_installed_horovod_is_hidden_only_on_request(tmp_path: Path) -> None:
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("__version__ = 'real'\n", encoding="utf-8")
    show = "import horovod; print(horovod.__version__)"
    plain = python("-c", f"import perseus.compat.names, perseus.run.cli; {show}", cwd=tmp_path)
    assert plain.stdout == "real\n"
    asked = python(*_ENTRY, "-c", show, cwd=tmp_path)
    assert asked.stdout == "0.28.1\n"
    late = python("-c", "import horovod, perseus.compat.horovod", cwd=tmp_path, status=1)
    assert "horovod is already imported, from" in late.stderr
    assert "import perseus.compat.horovod before it" in late.stderr

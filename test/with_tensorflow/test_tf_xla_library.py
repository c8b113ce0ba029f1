"""The XLA library, made by `perseusrun --build-xla`, on 2 real ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("tensorflow")

from ranks.launch import Launch, checks_of

from perseus.tensorflow import xla

ROOT = Path(__file__).resolve().parents[2]
BUILD = [sys.executable, "-m", "perseus.run", "--build-xla"]
MODULE = "tf_xla_library_checks"


def test_without_a_compiler_it_says_what_is_missing(tmp_path):
    environment = {**os.environ, "PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(BUILD, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "g++ is missing: install a C++ compiler" in done.stderr
    assert list(tmp_path.rglob("*.so")) == []


SOME = SimpleNamespace(
    __version__="2.99.0",
    sysconfig=SimpleNamespace(get_include=lambda: "", get_compile_flags=lambda: ["-DX=1"]),
)


def test_a_library_that_does_not_load_is_left_out_with_a_warning(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library = xla.place(SOME)
    library.parent.mkdir(parents=True)
    library.write_bytes(b"of another architecture")
    with pytest.warns(UserWarning, match="build it again with `perseusrun --build-xla`") as said:
        assert xla.load(SOME) is None
    assert str(library) in str(said[0].message)


def test_hosts_with_another_processor_or_libc_have_libraries_of_their_own(monkeypatch):
    places = {xla.place(SOME)}
    monkeypatch.setattr("platform.machine", lambda: "another")
    places.add(xla.place(SOME))
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.1"))
    places.add(xla.place(SOME))
    assert len(places) == 3


def test_a_user_without_a_home_has_no_library(monkeypatch):
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    assert xla.load(SOME) is None


@pytest.fixture(scope="module")
def with_library(request):
    """Processes that start from here on find the library, compiled if these sources never were."""
    patch = pytest.MonkeyPatch()
    request.addfinalizer(patch.undo)
    patch.setenv("XDG_CACHE_HOME", str(ROOT / "build" / "cache"))
    done = subprocess.run(BUILD, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert Path(done.stdout.splitlines()[-1]).exists()


@pytest.fixture(scope="module")
def launched(with_library):
    return Launch({MODULE: checks_of(MODULE)}, 2)


@pytest.mark.full  # a minute or two of compiling
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("check", checks_of(MODULE))
def test_on_ranks(launched, check):
    launched.expect(MODULE, check)

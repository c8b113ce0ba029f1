"""The XLA library, made by `perseusrun --build-xla`, on 2 real ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorflow")

from ranks.launch import Launch, checks_of

ROOT = Path(__file__).resolve().parents[2]
BUILD = [sys.executable, "-m", "perseus.run", "--build-xla"]
MODULE = "tf_xla_library_checks"


def test_without_a_compiler_it_says_what_is_missing(tmp_path):
    environment = {**os.environ, "PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(BUILD, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "g++ is missing: install a C++ compiler" in done.stderr
    assert list(tmp_path.rglob("*.so")) == []


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

"""Building in a folder whose path has spaces or parentheses, such as that of a second download."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("name", "works"), [("perseus-1", True), ("a b", False), ("a(1)", False)])
def test_make_refuses_paths_that_its_recipes_would_split(name, works, tmp_path):
    folder = tmp_path / name
    folder.mkdir()
    shutil.copy(ROOT / "Makefile", folder)
    done = subprocess.run(["make", "help"], cwd=folder, capture_output=True, text=True, timeout=60)
    assert (done.returncode == 0) == works, done.stderr
    assert ("needs a path without spaces" in done.stderr) != works


def test_cmake_quotes_paths_in_every_command_of_its_own():
    for path in [*(ROOT / "common").rglob("CMakeLists.txt"), *ROOT.glob("frameworks/**/*.txt")]:
        for command in re.findall(r"add_custom_command\([^)]*\)", path.read_text()):
            assert "VERBATIM" in command, path

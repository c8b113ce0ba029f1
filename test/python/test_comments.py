"""The check of comments accepts this tree, finds each kind of cut, and leaves whole text alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / ".ci" / "check_comments.py"
# Prose that leaves no room for another word in Python's 100 and in C++'s 120 columns.
FULL = "word " * 18 + "words"
WIDE = FULL + " and some more words"


def check(root: Path) -> tuple[int, str]:
    command = [sys.executable, str(SCRIPT), str(root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


def check_file(root: Path, path: str, text: str) -> tuple[int, str]:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text, encoding="utf-8")
    return check(root)


def test_this_tree_is_whole() -> None:
    code, output = check(ROOT)
    assert code == 0, output


@pytest.mark.parametrize(
    ("path", "text", "line", "rule"),
    [
        ("perseus/a.py", f'"""{FULL} "\n"cut."""\n', 1, "quotes in a docstring"),
        (
            "test/a.py",
            f'def f():\n    """One.\n\n    {FULL} "\n    "cut."""\n',
            4,
            "quotes in a docstring",
        ),
        (
            "perseus/a.py",
            f'def f():\n    """One.\n\n    {FULL}\n    cut off\n    and filled again.\n    """\n',
            5,
            "cut off",
        ),
        (".ci/a.py", "    # ---- starting\n    # ---------------\n", 2, "dashes"),
        ("common/a.h", "/* ---- groups: all ranks\n * --------------- */\n", 2, "dashes"),
        ("common/a.h", "// ---- sums\n// ---------------\n", 2, "dashes"),
        ("common/a.h", "/* ---- speeds, in all ----------\n */\n", 2, "dashes"),
        ("perseus/a.py", "x = (\n    1\n)  # the first\n", 3, "closing bracket"),
        ("setup.py", f"    # {FULL}\n    # cut off\n    # and filled again.\n", 2, "cut off"),
        ("frameworks/a.cc", f"    // {WIDE}\n    // cut off\n    // (again).\n", 2, "cut off"),
        ("common/a.h", f"    /* {WIDE}\n     * cut off\n     * again. */\n", 2, "cut off"),
        ("common/a.cc", f'    "{WIDE} "\n    "cut off "\n    "again.";\n', 2, "cut off"),
        ("benchmarks/a.py", f'x = (\n    "{FULL} "\n    "cut "\n    f"{{x}}"\n)\n', 3, "cut off"),
    ],
)
def test_a_cut_is_named(tmp_path: Path, path: str, text: str, line: int, rule: str) -> None:
    code, output = check_file(tmp_path, path, text)
    assert code == 1
    assert f"{path}:{line}: " in output
    assert rule in output
    assert "comments: 1 offences" in output


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("perseus/a.py", '"""Knows "one",\n"two" and "three"."""\n'),
        ("perseus/a.py", f'"""{FULL}\nand so on.\n"""\n'),
        ("perseus/a.py", "# ---- starting ----\n# ---- ending -------------\n"),
        ("perseus/a.py", "x = f(  # the first\n    1,\n)  # fmt: skip\n"),
        ("perseus/a.py", f"    # {FULL}\n    # the end.\n    # Another sentence.\n"),
        ("perseus/a.py", "    # in a narrow\n    # column, as\n    # poems are\n"),
        ("perseus/a.py", f'x = (\n    "{FULL}\\n"\n    "a line "\n    "and more"\n)\n'),
        ("perseus/a.py", f'x = (\n    "{FULL} | "\n    "longer | "\n    "| more |"\n)\n'),
        ("perseus/examples/a.py", "    # ---- a copy\n    # ---------------\n"),
        ("common/a.cc", f"    // {WIDE}\n#include <poll.h>\n#include <queue>\n"),
        ("common/a.cc", f"    // {WIDE}:\n    // one   = first\n    // Two   = second\n"),
        ("build/a.cc", "// ---- sums\n// ---------------\n"),
    ],
)
def test_whole_text_is_accepted(tmp_path: Path, path: str, text: str) -> None:
    assert check_file(tmp_path, path, text) == (0, "comments: whole\n")

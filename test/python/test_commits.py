"""The check of commit messages looks at new commits only, in full and shallow clones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / ".ci" / "check_commits.py"
BASE_SECONDS = 1_600_000_000
OLD = "Merge branch 'main' of /home/ada/ring\n"  # made before there were rules
GOOD = "Add a ring\n\nIt is what /dev/shm and docs/a.md say.\n"


def git(repository: Path, *arguments: str, message: str = "", seconds: int = 0) -> str:
    """One git command as someone without settings of their own; its output."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(repository),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_COMMITTER_DATE": f"@{seconds} +0000",
    }
    for who in ("AUTHOR", "COMMITTER"):
        environment |= {f"GIT_{who}_NAME": "a", f"GIT_{who}_EMAIL": "a@b"}
    command = ["git", "-C", str(repository), *arguments]
    done = subprocess.run(command, input=message, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def commit(repository: Path, message: str, seconds: int) -> str:
    """An empty commit; its id. Messages are taken as they are."""
    git(
        repository,
        *("commit", "--quiet", "--allow-empty", "--allow-empty-message"),
        *("--cleanup=verbatim", "-F", "-"),
        message=message,
        seconds=seconds,
    )
    return git(repository, "rev-parse", "HEAD")


def check(repository: Path, base: str) -> tuple[int, str]:
    command = [sys.executable, str(SCRIPT), str(repository), base, str(BASE_SECONDS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def repository(tmp_path: Path) -> tuple[Path, str]:
    """A repository whose only commit breaks every rule, and that commit's id."""
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "--quiet")
    return folder, commit(folder, OLD, BASE_SECONDS)


def test_this_history_is_in_order() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("message", "rule"),
    [
        ("Add " + "x" * 69, "subject of 73 characters (at most 72)"),
        ("Add a ring.\n", "full stop"),
        ("Add a ring\nand a tree\n", "no empty line"),
        ("Added a ring\n", "'Added' (imperative: 'add')"),
        ("ring: dropping a chunk\n", "'dropping' (imperative: 'drop')"),
        ("Copies a ring\n", "'Copies' (imperative: 'copy')"),
        ("Closes a ring\n", "'Closes' (imperative: 'close')"),
        ("The ring is closed\n", "begin with a verb"),
        ("Merge branch 'main' of /home/ada/ring\n", "path of one machine: /home/ada/ring ("),
        ("Add a ring\n\nSee file:///tmp/log.txt.\n", "path of one machine: file:///tmp/log.txt"),
        ("Add a ring\n\nof C:\\Users\\Ada\n", "path of one machine: C:\\Users"),
        ("", "no subject"),
    ],
)
def test_a_new_message_is_named(repository: tuple[Path, str], message: str, rule: str) -> None:
    folder, base = repository
    wrong = commit(folder, message, BASE_SECONDS)
    commit(folder, GOOD, BASE_SECONDS)
    code, output = check(folder, base)
    assert code == 1
    assert rule in output
    assert output.startswith(wrong[:7])
    assert "commits: 1 offences" in output


@pytest.mark.parametrize(
    "message",
    [
        GOOD,
        "Add " + "x" * 68,
        "core: add a ring",
        'Revert "Add a ring"',
        "Ringing bells: 3 × 4, a/b and ~/.ssh/config\n\nhttps://a.b/home/ada/x, ${X}/tmp/x, /tmp\n",
    ],
)
def test_a_message_in_order_is_accepted(repository: tuple[Path, str], message: str) -> None:
    folder, base = repository
    commit(folder, message, BASE_SECONDS)
    assert check(folder, base) == (0, "commits: 1 new ones in order\n")


def test_without_the_base_new_commits_are_the_younger_ones(
    repository: tuple[Path, str], tmp_path: Path
) -> None:
    folder, base = repository
    commit(folder, GOOD, BASE_SECONDS + 1)
    wrong = commit(folder, OLD, BASE_SECONDS + 2)
    shallow = tmp_path / "shallow"
    git(folder, "clone", "--quiet", "--depth", "2", f"file://{folder}", str(shallow))
    code, output = check(shallow, base)
    assert (code, output.split(":")[0]) == (1, wrong[:7])
    git(shallow, "reset", "--quiet", "--hard", "HEAD~1")
    assert check(shallow, base) == (0, "commits: 1 new ones in order\n")
    assert check(folder, "f" * 40) == check(folder, base)


def test_an_exported_tree_has_nothing_to_check(tmp_path: Path) -> None:
    assert check(tmp_path, "HEAD") == (0, "commits: not a git checkout, nothing to check\n")

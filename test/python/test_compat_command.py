"""`perseusrun --horovod`: which commands it turns into what, and which it refuses."""

from __future__ import annotations

import pytest
from perseusrun_command import perseusrun

from perseus.compat.common.command import with_alias

_ENTRY = ["-m", "perseus.compat.horovod"]


@pytest.mark.parametrize(
    ("command", "options", "program"),
    [
        ("python train.py", "", "train.py"),
        ("python3 train.py --epochs 3 -u", "", "train.py --epochs 3 -u"),
        ("/opt/env/bin/python3.11 -u train.py", "-u", "train.py"),
        ("python -W ignore -X dev -Bu t.py", "-W ignore -X dev -Bu", "t.py"),
        ("python -Wignore -Xdev t.py x", "-Wignore -Xdev", "t.py x"),
        ("python -BW ignore t.py", "-BW ignore", "t.py"),
        ("python --check-hash-based-pycs always t.py", "--check-hash-based-pycs always", "t.py"),
        ("python -- t.py -c", "", "t.py -c"),
        ("python -m pytest -q x.py", "", "-m pytest -q x.py"),
        ("python -um pytest -q", "-u", "-m pytest -q"),
        ("python -mpytest -q", "", "-m pytest -q"),
        ("python -c pass 1 2", "", "-c pass 1 2"),
        ("python -Bcpass 1", "-B", "-c pass 1"),
        ("pypy3 t.py", "", "t.py"),
    ],
)
def test_python_command_gets_the_alias(command: str, options: str, program: str) -> None:
    interpreter = command.split(maxsplit=1)[0]
    expected = [interpreter, *options.split(), *_ENTRY, *program.split()]
    assert with_alias(command.split()) == expected


@pytest.mark.parametrize(
    "command",
    [
        "pytest -q",
        "./train.py",
        "bash run.sh",
        "python-config x",
        "ipython t.py",
        "env python t.py",
    ],
)
def test_other_command_is_refused(command: str) -> None:
    with pytest.raises(ValueError, match=r"needs a Python command such as 'python train\.py'"):
        with_alias(command.split())


@pytest.mark.parametrize("command", ["python", "python -u", "python -", "python -W ignore"])
def test_interpreter_without_a_program_is_refused(command: str) -> None:
    with pytest.raises(ValueError, match="needs a script, -m MODULE or -c CODE"):
        with_alias(command.split())


def test_refusal_is_one_line() -> None:
    result = perseusrun("--horovod", "-np", "2", "pytest", "x.py")
    assert (result.returncode, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    assert "perseusrun: error: --horovod needs a Python command" in result.stderr
    assert "python -m perseus.compat.horovod train.py" in result.stderr

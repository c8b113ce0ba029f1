"""perseusrun's command line: what it prints by itself, and one clear line for every mistake."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest
from perseusrun_command import environment, perseusrun

from perseus.run import check_build, mpirun
from perseus.run.job import LaunchError
from perseus.run.mpirun import Mpirun


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["true"], 2, "-np is missing: give the number of ranks"),
        (["-np", "2"], 2, "no command given"),
        (["-np", "0", "true"], 2, "-np 0: expected 1 or more"),
        (["-np", "x", "true"], 2, "argument -np/--num-proc: invalid int value: 'x'"),
        (["-np", "4", "-H", "localhost:2", "true"], 2,
         "Requested more processes (4) than slots available (2) on localhost:2"),
        (["-np", "1", "-H", "a:b", "true"], 2, "Invalid host input in -H a:b"),
        (["-np", "1", "-H", "a..b", "true"], 1, "a..b: could not be reached by ssh"),
        (["-n", "2", "true"], 2, "unrecognized arguments: -n"),
        (["-np", "1", "--hostfile", "/nowhere", "true"], 2, "--hostfile /nowhere: No such file"),
        (["-np", "1", "-H", "a", "--hostfile", "f", "true"], 2, "not allowed with argument"),
        (["-np", "1", "--no-such-flag", "true"], 2, "--no-such-flag"),
        (["-np", "1", "--cycle-time-ms", "soon", "true"], 2, "'soon' is not a number"),
        (["-np", "1", "--fusion-threshold-mb", "-1", "true"], 2, "expected 0 or more"),
        (["-np", "2", "no-such-command", "x"], 127, "no-such-command: command not found"),
        (["-np", "1", "/etc/passwd"], 126, "/etc/passwd: Permission denied"),
        (["-np", "1", "--network-interface", "nope0", "true"], 1,
         "network interface 'nope0': no such interface or no IPv4 address; this host has"),
        (["-np", "1", "--output-filename", "/proc/x", "true"], 1, "--output-filename /proc/x"),
    ],
)  # fmt: skip
def test_mistake_is_one_line(arguments: list[str], status: int, message: str) -> None:
    result = perseusrun(*arguments)
    assert (result.returncode, result.stdout) == (status, "")
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert result.stderr.startswith("perseusrun: error: ")
    assert message in result.stderr


def test_a_script_in_place_of_a_command_gets_a_hint(tmp_path: Path) -> None:
    (tmp_path / "own.py").touch()
    result = perseusrun("-np", "1", "own.py", cwd=tmp_path)
    assert result.returncode == 127
    assert "own.py: command not found; did you mean: python own.py\n" in result.stderr


def test_bad_variable_is_named_before_any_rank_starts() -> None:
    env = environment(PERSEUS_ALLREDUCE_STREAMS="13")
    result = perseusrun("-np", "2", "echo", "started", env=env)
    assert (result.returncode, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    assert "PERSEUS_ALLREDUCE_STREAMS='13'" in result.stderr and "1..12" in result.stderr


def test_vanished_directory_is_one_line(tmp_path: Path) -> None:
    directory = tmp_path / "gone"
    directory.mkdir()
    fd = os.open(directory, os.O_RDONLY)
    directory.rmdir()
    try:
        result = perseusrun("-np", "1", "true", cwd=Path(f"/proc/self/fd/{fd}"))
    finally:
        os.close(fd)
    assert result.returncode == 1
    assert "current directory" in result.stderr


def test_help_shows_flags_and_every_variable() -> None:
    result = perseusrun("-h")
    assert (result.returncode, result.stderr) == (0, "")
    for text in ("-np", "--hostfile", "--check-build", "--start-timeout", "--log-level"):
        assert text in result.stdout
    for text in ("PERSEUS_ALLREDUCE_STREAMS", "1..12", "HOROVOD_NUM_NCCL_STREAMS"):
        assert text in result.stdout


def test_version_is_a_number() -> None:
    for flag in ("-v", "--version"):
        result = perseusrun(flag)
        assert result.returncode == 0
        assert re.fullmatch(r"\d+\.\d+\.\d+\n", result.stdout)


def test_check_build_has_the_sections_that_scripts_look_for() -> None:
    result = perseusrun("--check-build")
    assert result.returncode == 0
    lines = result.stdout.splitlines()
    assert re.fullmatch(r"Perseus v\d+\.\d+\.\d+:", lines[0])
    titles = [line for line in lines if re.fullmatch(r"Available .*:", line)]
    assert titles[:3] == [
        "Available Frameworks:",
        "Available Controllers:",
        "Available Tensor Operations:",
    ]
    entries = [line for line in lines if re.fullmatch(r"    \[[X ]\] \w[\w ]*", line)]
    assert len(entries) == 14
    assert {"    [X] Gloo", "    [X] CPU"} <= set(entries)
    assert ("    [X] CUDA" in entries) != lines[-2].startswith("No GPUs: [cuda] ")
    assert "Kernels for this processor: " in lines[-1]


@pytest.mark.parametrize(
    ("version", "mark"),
    [("1.8.0", " "), ("1.9.1", "X"), ("2.0.0b1", " "), ("unknown", "X"), (None, "X")],
)
def test_check_build_marks_no_framework_whose_version_is_not_served(
    version: str | None, mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mxnet").mkdir()
    (tmp_path / "mxnet" / "__init__.py").write_text("raise AssertionError")
    if version is not None:
        known = tmp_path / "mxnet_cu112.dist-info"
        known.mkdir()
        (known / "METADATA").write_text(f"Name: mxnet-cu112\nVersion: {version}\n")
        (known / "top_level.txt").write_text("mxnet\n")
    monkeypatch.syspath_prepend(tmp_path)
    report = check_build.report("0.1.0")
    assert f"    [{mark}] MXNet\n" in report
    assert (f"\nMXNet {version} is not served" in report) == (mark == " ")


@pytest.mark.parametrize("files", [{}, {"METADATA": "Name: mxnet\n"}])
def test_check_build_bears_installations_that_are_not_whole(
    files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = tmp_path / "mxnet-1.9.1.dist-info"
    known.mkdir()
    (tmp_path / "mxnet.py").touch()
    for name, text in {"top_level.txt": "mxnet\n", **files}.items():
        (known / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert "    [X] MXNet\n" in check_build.report("0.1.0")


@pytest.mark.parametrize("there", [True, False])
def test_check_build_offers_the_operations_of_an_mpirun_that_is_there(
    monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    def find() -> Mpirun:
        if not there:
            raise LaunchError("--mpi: there is no mpirun")
        return Mpirun("/usr/bin/mpirun", 5)

    monkeypatch.setattr(mpirun, "find", find)
    operations = check_build.report("0.1.0").split("Available Tensor Operations:\n")[1]
    assert f"    [{'X' if there else ' '}] MPI\n    [X] Gloo\n" in operations


@pytest.mark.parametrize("separator", [[], ["--"]])
def test_arguments_of_the_command_are_its_own(separator: list[str]) -> None:
    own = ["-np", "7", "--", "--verbose", "a b", "*", "", "-n", "5", "-ho", "x", "-pre", "-c", "-H"]
    result = perseusrun("-np", "1", *separator, "printf", "%s|", *own)
    assert result.stdout == "[0]<stdout>:" + "".join(f"{word}|" for word in own) + "\n"


def test_script_without_execute_permission_is_126(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text("#!/bin/sh\necho ran $PERSEUS_RANK\n")
    assert perseusrun("-np", "1", str(script)).returncode == 126
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    assert perseusrun("-np", "1", "./train.sh", cwd=tmp_path).stdout == "[0]<stdout>:ran 0\n"


def test_script_that_does_not_name_its_interpreter_is_one_of_sh(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text("echo ran $PERSEUS_RANK $1\n")
    script.chmod(0o755)
    expected = "[0]<stdout>:ran 0 a b\n"
    assert perseusrun("-np", "1", "./train.sh", "a b", cwd=tmp_path).stdout == expected
    found = environment(PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert perseusrun("-np", "1", "train.sh", "a b", env=found).stdout == expected
    script.write_bytes(b"\1\2\0\3")
    refused = perseusrun("-np", "1", str(script))
    assert refused.returncode == 126 and "Exec format error" in refused.stderr

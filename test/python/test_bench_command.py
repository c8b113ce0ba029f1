"""perseus-bench as users run it: it starts its ranks, verifies, and writes what was asked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from perseus.bench import __main__ as command_line
from perseus.bench.plan import Plan
from perseus.bench.virtual_hosts import unavailable


def bench(
    *arguments: str, timeout: float = 120, python: str = sys.executable, **variables: str
) -> Any:
    return subprocess.run(
        [python, "-m", "perseus.bench", *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_cases_are_measured_against_gloo_and_limits(tmp_path: Path) -> None:
    arguments = ["latency", "memory", "tensors", "network", "--seconds", "0.05"]
    found = bench(*arguments, "--sizes", "64K", "--json", str(tmp_path / "r.json"))
    assert found.returncode == 0, found.stderr
    measured = records(tmp_path / "r.json")
    contenders = {}
    for entry in measured:
        contenders.setdefault(entry["case"], []).append(entry["peer"])
    both = ["perseus", "torch-gloo"]
    assert contenders == {
        "latency": [*both, "perseus-group"],
        "memory": [*both, "memcpy", "memcpy-unaligned"],
        "tensors": [*both, "cat-and-copy"],
        "network": [*both, "raw-tcp"],
    }
    for entry in measured:
        assert entry["verified"], entry
        assert (entry["ranks"], entry["hosts"]) == (2, 1)
        assert entry["n"] >= 5
        assert 0 < entry["min_s"] <= entry["median_s"] < 60
        assert entry["vs_perseus"] > 0
        assert entry["bytes"] == (500 * 4000 if entry["case"] == "tensors" else 65536)
    assert "perseus-bench: tensors: it has its own sizes, --sizes does not" in found.stderr
    assert found.stdout.count("right") == len(measured)


def test_gradients_go_through_codecs_beside_plain(tmp_path: Path) -> None:
    arguments = ["gradients", "--sizes", "64K", "--codec", "none,default,fp16"]
    found = bench(*arguments, "--seconds", "0.05", "--json", str(tmp_path / "r.json"))
    assert found.returncode == 0, found.stderr
    measured = records(tmp_path / "r.json")
    assert [(entry["peer"], entry["codec"]) for entry in measured] == [
        ("perseus", "none"),
        ("torch-gloo", "none"),
        ("perseus", "default"),
        ("perseus", "fp16"),
    ]
    for entry in measured:
        assert entry["verified"], entry
        assert (entry["case"], entry["bytes"], entry["tensors"]) == ("gradients", 65536, 1)
        assert entry["vs_perseus"] > 0
    assert "perseus fp16" in found.stdout
    assert found.stderr.count("perseus-bench: --codec none,default,fp16: nothing is encoded") == 1


@pytest.mark.parametrize(
    ("ranks", "variables"),
    [
        ("2", {"PERSEUS_TRANSPORT": "tcp"}),
        ("3", {"HOROVOD_TORUS_ALLREDUCE": "1", "LIGHT_INTRA_SIZE": "2"}),
    ],
)
def test_codecs_act_on_one_host_where_ranks_are_divided(
    tmp_path: Path, ranks: str, variables: dict[str, str]
) -> None:
    arguments = ["gradients", "-np", ranks, "--sizes", "64K", "--codec", "default,int8,topk:0.01"]
    arguments += ["--peer", "", "--seconds", "0.05", "--json", str(tmp_path / "r.json")]
    found = bench(*arguments, **variables)
    assert found.returncode == 0, found.stdout
    measured = records(tmp_path / "r.json")
    assert [entry["codec"] for entry in measured] == ["none", "default", "int8", "topk:0.01"]
    assert all(entry["verified"] for entry in measured)
    assert "nothing is encoded" not in found.stderr


def test_ddp_over_tcp_keeps_the_bounds_of_its_codec(tmp_path: Path) -> None:
    arguments = ["ddp", "--sizes", "25M", "--model", "resnet50", "--seconds", "0.05"]
    found = bench(*arguments, "--json", str(tmp_path / "r.json"), PERSEUS_TRANSPORT="tcp")
    assert found.returncode == 0, found.stdout
    measured = records(tmp_path / "r.json")
    assert [entry["codec"] for entry in measured if entry["peer"] == "perseus"] == ["default"]
    assert all(entry["verified"] for entry in measured)


def test_every_collective_is_verified_and_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    arguments = ["collectives", "-np", "3", "--sizes", "4,4K", "--seconds", "0.02"]
    arguments += ["--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.png")]
    found = bench(*arguments, PERSEUS_TRANSPORT="tcp")
    assert found.returncode == 0, found.stderr
    measured = records(tmp_path / "r.json")
    operations = ["allreduce", "allgather", "broadcast", "reducescatter", "alltoall"]
    assert [entry["operation"] for entry in measured] == [op for op in operations for _ in range(4)]
    assert all(entry["verified"] for entry in measured)
    for entry in measured:
        whole = entry["operation"] in ("allreduce", "broadcast")
        assert entry["bytes"] in ((4, 4096) if whole else (12, 4092)), entry
    assert found.stderr.splitlines()[0] == (
        "perseus-bench: allgather, reducescatter, alltoall: 12 bytes for 4, 4092 bytes for 4096, "
        "an equal part of float32 for each of 3 ranks"
    )
    ours = [entry for entry in measured if entry["peer"] == "perseus"]
    # The tuner would change buckets and streams while they are measured: the bench turns it off.
    settings = {"PERSEUS_TRANSPORT": "tcp", "HOROVOD_AUTOTUNE": "0"}
    assert all(entry["settings"] == settings for entry in ours)
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_peers_that_are_not_there_are_skipped_and_said(tmp_path: Path) -> None:
    # Neither at PATH nor beside this Python, whatever the machine and its environments have.
    alone = tmp_path / "python"
    alone.symlink_to(Path(sys.executable).resolve())
    variables = {"PATH": "/nonexistent", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    arguments = ["latency", "--peer", "mpi,horovod", "--seconds", "0.02"]
    arguments += ["--json", str(tmp_path / "r.json")]
    found = bench(*arguments, python=str(alone), **variables)
    assert found.returncode == 0, found.stderr
    assert "mpi is skipped: there is no mpirun" in found.stderr
    assert "horovod is skipped: there is no mpirun" in found.stderr
    assert [entry["peer"] for entry in records(tmp_path / "r.json")] == ["perseus"]


def test_sizes_that_are_no_tensors_of_this_machine_are_not_held_to_its_memory() -> None:
    for arguments in (["ddp"], ["memory", "-H", "elsewhere:2"]):
        given = command_line._parser().parse_args([*arguments, "--sizes", "99999G"])
        assert command_line._jobs(given)[0].plan.sizes == [99999 << 30]


def test_a_name_that_is_repeated_counts_once() -> None:
    given = command_line._parser().parse_args(
        ["gradients", "--peer", "mpi,torch-gloo,mpi", "--model", "gpt2,vgg16,gpt2"]
    )
    (job,) = command_line._jobs(given)
    assert job.plan.peers == ["mpi", "torch-gloo"]
    assert job.plan.models == ["gpt2", "vgg16"]


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        (["nonsense"], "no case 'nonsense'"),
        (["latency", "-np", "0"], "'0': expected a whole number"),
        (["latency", "--sizes", "7"], "7 bytes are no whole number of float32"),
        (["memory", "--sizes", "4,99999999G"], "--sizes 4,99999999G: 2 ranks hold 1e+08 GiB each"),
        (["latency", "--peer", "nccl"], "--peer nccl: expected some of torch-gloo"),
        (["gradients", "--model", "alexnet"], "--model alexnet: expected some of resnet50"),
        (["training", "--model", "gpt2"], "--model gpt2: expected some of resnet50, vgg16"),
        (["latency", "--peer", "torch-ddp-gloo"], "it is a peer of training"),
        (["gradients", "--codec", "zip"], "--codec zip: expected some of default, none"),
        (["gradients", "--codec", "topk"], "--codec topk: expected topk:0.01"),
        (["gradients", "--codec", "rotate:1.5"], "--codec rotate:1.5: expected rotate:8"),
        (["gradients", "--codec", "rotate:8"], "measure it by the case training"),
        (["latency", "--codec", "fp16"], "--codec is of gradients, training, ddp-training"),
        (["ddp-training", "--codec", "bf16"], "--codec bf16: no variable"),
        (["ddp-training", "--model", "gpt2"], "--model gpt2: expected some of resnet50, vgg16"),
        (["ddp", "--peer", "mpi"], "--peer mpi: ddp compares with torch-gloo"),
        (["training", "--peer", "horovod"], "--peer horovod: training compares with torch-gloo"),
        (["ddp", "--peer", "torch-gloo,mpi"], "--peer mpi: ddp compares with torch-gloo"),
        (["memory", "--model", "gpt2"], "--model is of gradients, training, ddp, ddp-training"),
        (["latency", "--rate", "1gbit"], "add --hosts 2"),
        (["memory", "--gpu"], "--gpu: case memory has tensors in host memory alone"),
        (["network", "--gpu", "--peer", "mpi"], "--gpu: --peer mpi has tensors in host memory"),
        (["latency", "--hosts", "3", "-np", "2"], "more hosts than ranks"),
        (["latency", "--seconds", "-1"], "expected seconds above 0"),
        (["latency", "--framework", "jax"], "invalid choice: 'jax'"),
        (["--advise", "--framework", "tensorflow"], "--advise computes with torch"),
        (["--advise", "--peer", "torch-gloo"], "--advise takes models, ranks, hosts and"),
        (["--advise", "--seconds", "1"], "--advise takes models, ranks, hosts and"),
        (["-np", "4"], "name a case"),
        (["--seconds", "3"], "name a case"),
        (["--model", "resnet50"], "name a case"),
        (["--peer", ""], "name a case"),
        (["--timeout", "9"], "name a case"),
        (["--links", "1"], "name a case"),
        (["--compute", "1"], "name a case"),
        (["network", "-np", "1"], "network -np 1: expected two ranks or more"),
        (["--readme", "/nonexistent/README.md"], "a directory that exists"),
        (["--readme", "no.md"], "--readme no.md: no such file"),
        (["--readme", __file__], "expected the lines <!-- bench:begin -->"),
        (["--bars", __file__], "--bars"),
        (["memory", "--bars", "r.md"], "--bars r.md: it replaces the results of the whole suite"),
        (["latency", "--readme", "r.md"], "--readme r.md: it replaces the results of the whole"),
        (["latency", "--json", "/nonexistent/r.json"], "a directory that exists"),
        (["latency", "--plot", "."], "--plot .: expected a file in a directory"),
        (["latency", "--plot", "r.docx"], "--plot r.docx: expected a name that ends with .png"),
        (["latency", "--hosts", "2", "--rate", "1foo"], "rate '1foo': expected a number with"),
        (["latency", "--hosts", "2", "--links", "9"], "2 hosts with 9 links: expected 1..200"),
        (["latency", "--hosts", "300", "-np", "300"], "300 hosts with 1 links: expected 1..200"),
    ],
)
def test_bad_usage_is_one_line_and_status_2(arguments: list[str], fact: str) -> None:
    found = bench(*arguments)
    assert found.returncode == 2
    assert fact in found.stderr
    assert found.stderr.startswith("perseus-bench: error: ")
    assert found.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("package", "arguments"),
    [("torch", ["--advise"]), ("torch", ["latency"]), ("numpy", ["latency"]), ("numpy", [])],
)
def test_a_package_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    package: str,
    arguments: list[str],
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setitem(sys.modules, package, None)
    assert command_line.main(arguments) == 2
    fact = f"{sys.executable} has no {package}, which perseus-bench needs"
    assert capsys.readouterr().err == f"perseus-bench: error: {fact}\n"


def test_a_job_that_fails_is_said_with_status_1() -> None:
    found = bench("latency", PERSEUS_SECRET_FILE="/nowhere")
    assert found.returncode == 1
    assert "/nowhere" in found.stderr
    assert "perseus-bench: the job ended with status 1" in found.stderr


def test_a_wrong_variable_is_bad_usage() -> None:
    found = bench("latency", PERSEUS_ALLREDUCE_STREAMS="40")
    assert found.returncode == 2
    assert "PERSEUS_ALLREDUCE_STREAMS='40': expected a whole number 1..12" in found.stderr
    assert found.stderr.count("\n") == 1


def test_a_job_that_takes_too_long_is_ended() -> None:
    # At most 400 samples are taken: together they must take longer, on any machine.
    found = bench("memory", "--sizes", "256M", "--seconds", "500", "--timeout", "4", timeout=60)
    assert found.returncode == 1, found.stdout
    assert "the job was ended after 4 s" in found.stderr


def processes_with(mark: str) -> list[str]:
    """The numbers of the processes whose environment has this mark."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes():
                found.append(process.name)
        except OSError:
            continue
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_ranks(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "perseus.bench", "memory", "--sizes", "256M"]
    process = subprocess.Popen(
        [*command, "--seconds", "500"],
        env={**os.environ, "PERSEUS_BENCH_MARK": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while len(processes_with(str(tmp_path))) < 4:  # with perseusrun and two ranks
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    assert processes_with(str(tmp_path)) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_the_records_that_were_shown(
    tmp_path: Path, number: signal.Signals
) -> None:
    saved = tmp_path / "r.json"
    saved.write_text("of an earlier run\n")
    command = [sys.executable, "-m", "perseus.bench", "memory", "--sizes", "4K,256M", "--peer", ""]
    process = subprocess.Popen(
        [*command, "--seconds", "500", "--json", str(saved)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    shown = [process.stdout.readline() for _ in range(4)]  # with the heading
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, "Traceback" in error) == (128 + number, False), error
    measured = records(saved)
    assert [(entry["bytes"], entry["peer"]) for entry in measured] == [
        (4096, peer) for peer in ("perseus", "memcpy", "memcpy-unaligned")
    ]
    assert all(entry["peer"] in line for entry, line in zip(measured, shown[1:], strict=True))


def test_a_file_that_cannot_be_opened_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command_line, "run", None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    link = tmp_path / "r.json"
    link.symlink_to(tmp_path / "missing" / "r.json")
    for arguments in (["latency"], ["--advise"]):
        assert command_line.main([*arguments, "--json", str(link)]) == 2
        fact = f"--json {link}: No such file or directory"
        assert capsys.readouterr().err == f"perseus-bench: error: {fact}\n"


def test_wrong_usage_leaves_the_records_of_an_earlier_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    saved = tmp_path / "r.json"
    saved.write_text("of an earlier run\n")
    assert command_line.main(["latency", "--json", str(saved), "--rate", "1gbit"]) == 2
    assert command_line.main(["latency", "--json", str(saved), "--advise"]) == 2
    assert saved.read_text() == "of an earlier run\n"


def test_an_interrupted_advice_has_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "run", interrupted)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert command_line.main(["--advise"]) == 128 + signal.SIGINT


def test_a_plan_survives_its_way_to_the_ranks() -> None:
    plan = Plan(["latency"], ["mpi"], [4, 64], ["gpt2"], ["fp16"], 0.5, 2.5, 2)
    assert Plan.from_json(plan.to_json()) == plan


def test_a_codec_halves_what_goes_over_the_wire(tmp_path: Path) -> None:
    if reason := unavailable():
        pytest.skip(reason)
    arguments = ["gradients", "--codec", "fp16", "--hosts", "2", "--sizes", "8M", "--peer", ""]
    found = bench(*arguments, "--seconds", "0.1", "--json", str(tmp_path / "r.json"))
    assert found.returncode == 0, found.stdout + found.stderr
    plain, half = records(tmp_path / "r.json")
    assert plain["wire_bytes_expected"] == 2 * half["wire_bytes_expected"] == 8 << 20
    for entry in (plain, half):
        assert entry["verified"], entry
        assert 1 <= entry["wire_bytes"] / entry["wire_bytes_expected"] < 1.06


def test_virtual_hosts_count_what_goes_over_the_wire(tmp_path: Path) -> None:
    if reason := unavailable():
        pytest.skip(reason)
    arguments = ["network", "--hosts", "2", "--rate", "1gbit", "--sizes", "4M", "--seconds", "0.1"]
    found = bench(*arguments, "--json", str(tmp_path / "r.json"))
    assert found.returncode == 0, found.stderr
    measured = records(tmp_path / "r.json")
    assert [entry["peer"] for entry in measured] == ["perseus", "torch-gloo", "raw-tcp"]
    for entry in measured:
        assert entry["verified"], entry
        assert (entry["ranks"], entry["hosts"], entry["rate_gbit"]) == (2, 2, 1.0)
        assert entry["wire_bytes_expected"] == 4 << 20
        assert 4 << 20 <= entry["wire_bytes"] < 1.06 * (4 << 20) + 65536
        # The wire carries 125 MB/s; the token bucket lets 128 kB through at once.
        assert entry["min_s"] > 0.9 * ((4 << 20) - 262144) / 125e6

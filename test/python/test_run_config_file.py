"""perseusrun --config-file: horovodrun's keys, what wins, mistakes; and flags that it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from perseusrun_command import environment, perseusrun

pytest.importorskip("yaml")

from perseus.run.config_file import arguments_of

# The keys of Horovod's documentation, each with another value than its default.
HOROVODS = """\
controller: gloo
params:
  fusion_threshold_mb: 32
  cycle_time_ms: 3.5
  cache_capacity: 2048
  hierarchical_allreduce: true
  hierarchical_allgather: true
  torus_allreduce: false
autotune:
  enabled: true
  log_file: horovod_autotune_log.txt
  warmup_samples: 5
  steps_per_sample: 20
  bayes_opt_max_samples: 50
  gaussian_process_noise: 0.9
timeline:
  filename: horovod_timeline.json
  mark_cycles: true
stall_check:
  enabled: false
  warning_time_seconds: 120
  shutdown_time_seconds: 240
library_options:
  mpi_threads_disable: true
  num_nccl_streams: 2
  thread_affinity: 1
  gloo_timeout_seconds: 60
logging:
  level: INFO
  with_timestamp: false
"""
NAMES = (
    "HOROVOD_FUSION_THRESHOLD",
    "HOROVOD_CYCLE_TIME",
    "PERSEUS_ALLREDUCE_MODE",
    "HOROVOD_HIERARCHICAL_ALLREDUCE",
    "LIGHT_2D_ALLREDUCE",
    "HOROVOD_AUTOTUNE",
    "HOROVOD_AUTOTUNE_LOG",
    "HOROVOD_TIMELINE",
    "HOROVOD_TIMELINE_MARK_CYCLES",
    "HOROVOD_STALL_CHECK_DISABLE",
    "HOROVOD_STALL_CHECK_TIME_SECONDS",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    "PERSEUS_ALLREDUCE_STREAMS",
    "GLOO_TIMEOUT_SECONDS",
    "PERSEUS_LOG_LEVEL",
    "HOROVOD_LOG_HIDE_TIME",
)
SHOW = f"import os; print([os.environ.get(name) for name in {NAMES!r}])"


@pytest.fixture
def written(tmp_path: Path):
    def write(text: str) -> str:
        path = tmp_path / "config.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def test_horovods_keys_set_what_their_flags_set(written) -> None:
    done = perseusrun("-np", "1", "--config-file", written(HOROVODS), sys.executable, "-c", SHOW)
    assert done.returncode == 0, done.stderr
    values = [
        str(32 << 20), "3.5", "1", "1", None, "1", "horovod_autotune_log.txt",
        "horovod_timeline.json", "1", "1", "120", "240", "2", "60", "info", "1",
    ]  # fmt: skip
    assert done.stdout.strip() == f"[0]<stdout>:{values}"
    said = [line.split(" has no effect: ")[0] for line in done.stderr.splitlines()]
    assert said == [
        f"perseusrun: {flag}"
        for flag in (
            "--cache-capacity", "--hierarchical-allgather", "--autotune-warmup-samples",
            "--autotune-steps-per-sample", "--autotune-bayes-opt-max-samples",
            "--autotune-gaussian-process-noise", "--mpi-threads-disable", "--thread-affinity",
        )
    ]  # fmt: skip


def test_flags_win_wherever_they_stand(written) -> None:
    file = written("params: {cycle_time_ms: 3}\nstall_check: {enabled: false}\ncontroller: mpi\n")
    flags = ["--gloo", "--cycle-time-ms", "7", "--stall-check"]
    for arguments in (["--config-file", file, *flags], [*flags, "--config-file", file]):
        done = perseusrun("-np", "1", *arguments, sys.executable, "-c", SHOW)
        assert done.returncode == 0, done.stderr
        shown = eval(done.stdout.partition(":")[2])
        assert dict(zip(NAMES, shown, strict=True)) == {
            **dict.fromkeys(NAMES),
            "HOROVOD_CYCLE_TIME": "7",
            "HOROVOD_STALL_CHECK_DISABLE": "0",
        }


def test_flags_beat_variables_whatever_their_name(written) -> None:
    file = written("params: {hierarchical_allreduce: true}\n")
    env = environment(PERSEUS_ALLREDUCE_MODE="0", LIGHT_2D_ALLREDUCE="1")
    flags = ["--config-file", file, "--no-torus-allreduce"]
    done = perseusrun("-np", "1", *flags, sys.executable, "-c", SHOW, env=env)
    shown = dict(zip(NAMES, eval(done.stdout.partition(":")[2]), strict=True))
    assert (shown["PERSEUS_ALLREDUCE_MODE"], shown["LIGHT_2D_ALLREDUCE"]) == ("1", "0")


def test_hosts_of_the_command_line_beat_a_script(written) -> None:
    file = written("elastic: {min_num_proc: 1, host_discovery_script: ./nowhere.sh}\n")
    done = perseusrun("-np", "1", "-H", "localhost:1", "--config-file", file, "echo", "here")
    assert (done.returncode, done.stdout) == (0, "[0]<stdout>:here\n"), done.stderr


def test_without_its_script_a_file_makes_no_job_elastic(written) -> None:
    file = written(
        "elastic:\n  host_discovery_script: ./nowhere.sh\n  slots_per_host: 4\n  timeout: 30\n"
        "  blacklist_cooldown_range: [1, 2]\nparams: {cycle_time_ms: 3}\n"
    )
    done = perseusrun("-np", "1", "-H", "localhost:1", "--config-file", file, "echo", "here")
    assert (done.returncode, done.stdout) == (0, "[0]<stdout>:here\n"), done.stderr
    for is_elastic, timeout in ((False, []), (True, ["--elastic-timeout=30"])):
        found = arguments_of(file, with_controller=True, with_hosts=False, is_elastic=is_elastic)
        rest = [*timeout, "--blacklist-cooldown-range", "1", "2"] if is_elastic else []
        assert found == [*rest, "--cycle-time-ms=3"]


def test_an_elastic_job_may_come_from_the_file(written) -> None:
    file = written(
        "elastic:\n  min_num_proc: 2\n  max_num_proc: 3\n  timeout: 30\n  reset_limit: 1\n"
        "  slots_per_host:\n  blacklist_cooldown_range: [1, 2]\n"
    )
    assert arguments_of(file, with_controller=True, with_hosts=True, is_elastic=False) == [
        "--min-np=2", "--max-np=3", "--elastic-timeout=30", "--reset-limit=1",
        "--blacklist-cooldown-range", "1", "2",
    ]  # fmt: skip
    program = "import perseus.basics as basics; basics.init(); print(basics.size())"
    done = perseusrun("--config-file", file, sys.executable, "-c", program)
    assert done.returncode == 0, done.stderr
    # All slots of the fixed hosts, which are as many as the most ranks.
    assert sorted(done.stdout.split()) == [f"[{rank}]<stdout>:3" for rank in range(3)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("params: {cycle_time: 3}", "params.cycle_time is unknown: did you mean params.cycle"),
        ("parms: {}", "parms is unknown: did you mean params?"),
        ("colour: {}", "colour is unknown: expected params, autotune, timeline"),
        ("params: 3", "params is not a mapping of keys to values"),
        ("- a\n- b", "the file is not a mapping of keys to values"),
        ("controller: jsrun", "controller: jsrun: expected gloo or mpi"),
        ("autotune: {enabled: 1}", "autotune.enabled: 1: expected true or false"),
        ("timeline: {filename: true}", "timeline.filename: True: expected one number or text"),
        ("params: {cycle_time_ms: soon}", "argument --cycle-time-ms: 'soon' is not a number"),
        ("logging: {level: LOUD}", "argument --log-level: invalid choice: 'LOUD'"),
        ("params: {cycle_time_ms: [1, 2]}", "params.cycle_time_ms: [1, 2]: expected one number"),
        ("elastic: {blacklist_cooldown_range: [1]}", "expected a list of two whole numbers"),
        ("elastic: {blacklist_cooldown_range: [1, 2, 3]}", "expected a list of two whole numbers"),
        ("timeline: {filename: 2026-13-01}", "this is not valid YAML: month must be in 1..12"),
        ("params: {fusion_threshold_mb: 3.5}", "'3.5' is not a whole number"),
        ("a: b: c", "this is not valid YAML: mapping values are not allowed here"),
        ("\x00", "this is not valid YAML"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_the_file(written, text: str, message: str) -> None:
    file = written(text)
    done = perseusrun("-np", "1", "--config-file", file, "true")
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert f"--config-file {file}: " in done.stderr and message in done.stderr


def test_a_file_that_is_not_there_and_one_that_is_empty(written, tmp_path: Path) -> None:
    done = perseusrun("-np", "1", "--config-file", str(tmp_path / "none"), "true")
    assert done.returncode == 2 and "none: No such file or directory" in done.stderr
    assert perseusrun("-np", "1", "--config-file", written("# nothing\n"), "true").returncode == 0


def test_without_pyyaml_it_says_what_to_install(written) -> None:
    program = (
        "import sys; sys.modules['yaml'] = None; from perseus.run.cli import main; sys.exit(main())"
    )
    arguments = ["-np", "1", "--config-file", written("params: {}"), "true"]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "PyYAML is not installed: pip install pyyaml" in done.stderr


def test_what_only_mpirun_or_jsrun_has_is_refused() -> None:
    for flags, message in (
        (["--binding-args=--bind-to core"], "--binding-args needs --mpi"),
        (["--jsrun"], "perseusrun does not support --jsrun"),
        (["--mpi", "--binding-args=--bind-to 'core"], "--bind-to 'core: No closing quotation"),
    ):
        done = perseusrun("-np", "1", *flags, "true")
        assert done.returncode == 2 and message in done.stderr

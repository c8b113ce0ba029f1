"""perseusrun starts local ranks, passes their output on, and ends them all together."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from perseusrun_command import COMMAND, PATIENT, Running, alive, environment, eventually, perseusrun

from perseus.run.job import Job
from perseus.run.launch import Launcher

SHOW = "import os, json; print(json.dumps(dict(os.environ)))"


def environments(*arguments: str, env: dict[str, str] | None = None) -> dict[int, dict[str, str]]:
    """What each rank of a job finds in its environment."""
    result = perseusrun(*arguments, sys.executable, "-c", SHOW, env=env)
    assert result.returncode == 0, result.stderr
    found = {}
    for line in result.stdout.splitlines():
        head, _, content = line.partition("<stdout>:")
        found[int(head.strip("[]"))] = json.loads(content)
    return found


def pids(directory: Path, count: int) -> list[int]:
    """Wait until `count` processes have put their numbers into `directory`."""
    assert eventually(lambda: len(list(directory.glob("*.pid"))) == count)
    return [int(file.stem) for file in directory.glob("*.pid")]


def announce(directory: Path) -> str:
    """Shell text with which a process says that it runs."""
    return f"> {directory}/$$.pid"


def test_every_rank_gets_its_identity_under_both_names() -> None:
    found = environments("-np", "3")
    assert sorted(found) == [0, 1, 2]
    for rank, env in found.items():
        for prefix in ("PERSEUS", "HOROVOD"):
            names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
            values = [env[f"{prefix}_{name}"] for name in names]
            assert values == [str(rank), "3", str(rank), "3", "0", "1"]
        assert env["HOROVOD_HOSTNAME"] == "localhost"
        assert env["HOROVOD_CONTROLLER"] == env["HOROVOD_CPU_OPERATIONS"] == "gloo"
        assert env["PYTHONUNBUFFERED"] == "1"


def test_ranks_share_a_store_on_loopback_and_a_fresh_secret() -> None:
    first, second = (environments("-np", "2") for _ in range(2))
    for job in (first, second):
        assert job[0]["PERSEUS_RENDEZVOUS_ADDR"] == "127.0.0.1"
        assert job[0]["HOROVOD_GLOO_RENDEZVOUS_PORT"] == job[1]["PERSEUS_RENDEZVOUS_PORT"]
        assert job[0]["PERSEUS_SECRET"] == job[1]["PERSEUS_SECRET"]
        assert len(job[0]["PERSEUS_SECRET"]) == 64
    assert first[0]["PERSEUS_SECRET"] != second[0]["PERSEUS_SECRET"]


def test_environment_of_an_outer_job_is_not_inherited() -> None:
    outer = environment(
        PERSEUS_RANK="7", HOROVOD_SIZE="9", PERSEUS_SECRET="outer" * 8, KEEP="é\udcff",
        TORCHELASTIC_RUN_ID="outer", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1",
        MASTER_ADDR="10.0.0.1",
    )  # fmt: skip
    found = environments("-np", "1", env=outer)[0]
    assert (found["PERSEUS_RANK"], found["HOROVOD_SIZE"], found["KEEP"]) == ("0", "1", "é\udcff")
    assert found["PERSEUS_SECRET"] != outer["PERSEUS_SECRET"]
    assert "TORCHELASTIC_RUN_ID" not in found
    assert not found.keys() & {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}
    assert found["MASTER_ADDR"] == "10.0.0.1"  # the user's wish about where rank 0 listens


def test_flags_reach_the_ranks_and_beat_the_environment() -> None:
    flags = ["--fusion-threshold-mb", "32", "--gloo-timeout-seconds", "17", "--log-level", "ERROR"]
    flags += ["--timeline-filename", "Trace.json", "--timeline-mark-cycles"]
    flags += ["--autotune", "--autotune-log-file", "Tuned.csv"]
    env = environment(GLOO_TIMEOUT_SECONDS="99", HOROVOD_CYCLE_TIME="3")
    found = environments("-np", "1", *flags, "--no-stall-check", env=env)[0]
    assert found["HOROVOD_FUSION_THRESHOLD"] == str(32 << 20)
    assert found["GLOO_TIMEOUT_SECONDS"] == found["HOROVOD_GLOO_TIMEOUT_SECONDS"] == "17"
    assert found["PERSEUS_LOG_LEVEL"] == "error"
    assert found["HOROVOD_STALL_CHECK_DISABLE"] == "1"
    assert found["HOROVOD_TIMELINE"] == "Trace.json"
    assert (found["HOROVOD_AUTOTUNE"], found["HOROVOD_AUTOTUNE_LOG"]) == ("1", "Tuned.csv")
    assert found["HOROVOD_TIMELINE_MARK_CYCLES"] == "1"
    assert found["HOROVOD_CYCLE_TIME"] == "3"


def test_threads_are_shared_out_when_nobody_said_how_many() -> None:
    env = environment()
    del env["OMP_NUM_THREADS"]
    cores = len(os.sched_getaffinity(0))
    for flags, notes in (([], 0), (["--verbose"], 1)):
        result = perseusrun("-np", "3", *flags, "sh", "-c", "echo $OMP_NUM_THREADS", env=env)
        shown = {line.partition(":")[2] for line in result.stdout.splitlines()}
        assert len(shown) == 1 and 1 <= int(shown.pop()) <= max(1, cores // 3)
        assert sum("OMP_NUM_THREADS" in line for line in result.stderr.splitlines()) == notes
        assert flags or not result.stderr


def test_no_secret_is_on_any_command_line(tmp_path: Path) -> None:
    script = (
        "import os, pathlib; secret = os.environ['PERSEUS_SECRET'].encode();"
        "lines = [p.read_bytes() for p in pathlib.Path('/proc').glob('[0-9]*/cmdline')];"
        "print(len(lines), sum(secret in line for line in lines))"
    )
    result = perseusrun("-np", "1", sys.executable, "-c", script)
    seen, guilty = map(int, result.stdout.partition(":")[2].split())
    assert seen > 2 and guilty == 0


def test_first_failure_is_named_and_the_rest_ended(tmp_path: Path) -> None:
    wait_for_all = f"while [ $(ls {tmp_path} | wc -l) -lt 3 ]; do sleep 0.05; done"
    script = (
        f"{announce(tmp_path)}; "
        f"if [ $PERSEUS_RANK = 1 ]; then {wait_for_all}; exit 3; fi; sleep 600 & wait"
    )
    result = perseusrun("-np", "3", "sh", "-c", script)
    assert result.returncode == 3
    lines = result.stderr.splitlines()
    assert lines[0] == "Process 1 exit with status code 3."
    assert lines[1] == "Terminating remaining workers after failure of Process 1."
    assert "rank 1 on localhost was the first to fail, with exit code 3" in lines[2]
    assert len(lines) == 3
    assert not any(alive(pid) for pid in pids(tmp_path, 3))


def test_death_by_signal_is_reported_as_128_plus_its_number() -> None:
    result = perseusrun("-np", "2", "sh", "-c", "[ $PERSEUS_RANK = 0 ] && kill -SEGV $$; sleep 600")
    assert result.returncode == 139
    assert "Process 0 exit with status code 139." in result.stderr
    assert "139 (SIGSEGV)" in result.stderr


def test_rank_that_left_before_the_failure_is_named(tmp_path: Path) -> None:
    # A rank that has ended is a zombie until the job is over. How much earlier it left is reported,
    # so the next one lets some time pass.
    gone = f"grep -q ') Z' /proc/$(cat {tmp_path}/$1)/stat"
    script = (
        f"say() {{ echo $$ > {tmp_path}/t$1; mv {tmp_path}/t$1 {tmp_path}/$1; }}\n"
        f"left() {{ until [ -f {tmp_path}/$1 ] && {gone}; do sleep 0.01; done; sleep 0.2; }}\n"
        "case $PERSEUS_RANK in 1) say 1;; 0) left 1; say 0;; 2) left 0; exit 6;; esac"
    )
    result = perseusrun("-np", "3", "sh", "-c", script)
    assert result.returncode == 6
    assert re.search(
        r"rank 2 on localhost was the first to fail, with exit code 6; rank 1 on localhost had "
        r"left \d+\.\d s earlier, with exit code 0 \(and 1 more after it\)\n",
        result.stderr,
    ), result.stderr


def test_script_that_wants_horovod_is_told_how() -> None:
    missing = "raise ModuleNotFoundError(\"No module named 'horovod'\")"
    result = perseusrun("-np", "2", sys.executable, "-c", missing)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == (
        "perseusrun: the script imports horovod, which is not installed: with 'perseusrun "
        "--horovod' it finds Perseus under that name"
    )


# Replaces itself with a command that then ignores the ends of its children, as some shells do.
_IGNORING = """
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (["sh", "-c", "exit 3"], "was the first to fail, with exit code 3"),
        (["--host-discovery-script", "exit 3", "--elastic-timeout", "5", "true"], "exit status 3"),
    ],
)
def test_exit_statuses_are_known_where_ends_of_children_are_ignored(
    job: list[str], message: str
) -> None:
    command = [sys.executable, "-c", _IGNORING, *COMMAND]
    with Running("-np", "1", *job, command=command) as running:
        _, _, errors = running.finish(60)
    assert message in errors


def test_last_words_come_before_the_verdict() -> None:
    script = "import sys; sys.stderr.write('x' * 200_000 + '\\nlast words'); sys.exit(4)"
    result = perseusrun("-np", "1", sys.executable, "-c", script)
    lines = result.stderr.splitlines()
    assert lines[0] == "[0]<stderr>:" + "x" * 200_000
    assert lines[1] == "[0]<stderr>:last words"
    assert lines[2].startswith("Process 0 exit")


def test_success_of_all_is_success_whatever_the_order(tmp_path: Path) -> None:
    # The last rank is done first.
    wait = f"until [ $PERSEUS_RANK = 2 ] || [ -e {tmp_path}/$((PERSEUS_RANK + 1)) ]; do :; done"
    script = f"{wait}; echo done; > {tmp_path}/$PERSEUS_RANK"
    result = perseusrun("-np", "3", "sh", "-c", script)
    assert (result.returncode, result.stderr) == (0, "")
    expected = [f"[{rank}]<stdout>:done" for rank in range(3)]
    assert sorted(result.stdout.splitlines()) == expected


def test_output_comes_while_ranks_run() -> None:
    with Running("-np", "1", "sh", "-c", "echo early; sleep 60") as job:
        assert job.process.stdout is not None
        assert job.process.stdout.readline() == "[0]<stdout>:early\n"
        assert job.process.poll() is None


def test_nothing_is_lost_of_much_output() -> None:
    script = "import os\nfor i in range(50_000): print(os.environ['PERSEUS_RANK'], i, 'é' * 20)"
    result = perseusrun("-np", "2", sys.executable, "-c", script, timeout=300)
    assert result.returncode == 0
    for rank in range(2):
        head = f"[{rank}]<stdout>:"
        mine = [line for line in result.stdout.splitlines() if line.startswith(head)]
        assert mine == [f"{head}{rank} {i} {'é' * 20}" for i in range(50_000)]


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_interrupt_ends_everything_at_once_and_quietly(
    tmp_path: Path, number: int, status: int
) -> None:
    script = f"{announce(tmp_path)}; exec sleep 600"
    with Running("-np", "2", "sh", "-c", script, command=PATIENT) as job:
        ranks = pids(tmp_path, 2)
        job.signal(number)
        assert job.finish() == (status, "", "")
    assert not any(alive(pid) for pid in ranks)


# Says that it runs, and goes on when it is told to end, as its child does.
_STUBBORN = """
import os, pathlib, signal, sys
def note(event):
    pathlib.Path(sys.argv[1], f"{os.getpid()}.{event}").touch()
signal.signal(signal.SIGTERM, lambda *_: note("told"))
os.fork()
note("pid")
while True:
    signal.pause()
"""


def test_second_interrupt_kills_what_the_first_did_not_end(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _STUBBORN, str(tmp_path)]
    with Running("-np", "2", *command, command=PATIENT) as job:
        processes = pids(tmp_path, 4)
        job.signal(signal.SIGINT)
        assert eventually(lambda: len(list(tmp_path.glob("*.told"))) == 4)
        assert all(alive(pid) for pid in processes)
        job.signal(signal.SIGINT)
        assert job.finish()[0] == 130
    assert eventually(lambda: not any(alive(pid) for pid in processes))


def test_second_signal_of_the_same_event_lets_ranks_end_by_themselves(tmp_path: Path) -> None:
    # As when a terminal closes: the shell and the kernel tell perseusrun one after the other.
    script = f"trap 'sleep 0.5; touch {tmp_path}/$$.saved; exit 0' TERM; {announce(tmp_path)}"
    with Running("-np", "2", "sh", "-c", f"{script}; sleep 600 & wait", command=PATIENT) as job:
        ranks = pids(tmp_path, 2)
        job.signal(signal.SIGTERM)
        time.sleep(0.05)
        job.signal(signal.SIGHUP)
        assert job.finish()[0] == 143
    assert all((tmp_path / f"{pid}.saved").exists() for pid in ranks)


# Finishes its work when it is told to end, however often.
_SAVING = """
import os, pathlib, signal, sys, time
ends = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
signal.pthread_sigmask(signal.SIG_BLOCK, ends)
pathlib.Path(sys.argv[1], f"{os.getpid()}.pid").touch()
signal.sigwait(ends)
time.sleep(0.5)
print("saved")
"""


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_to_every_process_of_the_job_lets_ranks_end_by_themselves(
    tmp_path: Path, number: int
) -> None:
    # As service managers and batch systems send it.
    command = [sys.executable, "-c", _SAVING, str(tmp_path)]
    with Running("-np", "2", *command, command=PATIENT) as job:
        ranks = pids(tmp_path, 2)
        for pid in (parent(ranks[0]), *ranks):
            os.kill(pid, number)
        job.signal(number)
        status, output, errors = job.finish()
    assert sorted(output.splitlines()) == ["[0]<stdout>:saved", "[1]<stdout>:saved"]
    assert (status, errors) == (128 + number, "")


def test_signal_to_the_process_that_runs_the_ranks_is_no_success(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _SAVING, str(tmp_path)]
    with Running("-np", "2", *command, command=PATIENT) as job:
        agent_pid = parent(pids(tmp_path, 2)[0])
        os.kill(agent_pid, signal.SIGTERM)
        os.kill(agent_pid, signal.SIGHUP)
        status, output, errors = job.finish()
    assert sorted(output.splitlines()) == ["[0]<stdout>:saved", "[1]<stdout>:saved"]
    assert status in (128 + signal.SIGTERM, 128 + signal.SIGHUP), errors


def test_ranks_ignore_what_perseusrun_was_told_to_ignore() -> None:
    nohup = "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); "
    nohup += "os.execv(sys.argv[1], sys.argv[1:])"
    show = "import signal; print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)"
    rank = [sys.executable, "-c", show]
    with Running("-np", "1", *rank, command=[sys.executable, "-c", nohup, *COMMAND]) as job:
        assert job.finish() == (0, "[0]<stdout>:True\n", "")


def test_ranks_that_ignore_the_end_are_killed_when_the_grace_is_over(tmp_path: Path) -> None:
    wait_for_both = f"while [ $(ls {tmp_path} | wc -l) -lt 2 ]; do sleep 0.05; done"
    script = (
        f"trap '' TERM; {announce(tmp_path)}; "
        f"if [ $PERSEUS_RANK = 0 ]; then {wait_for_both}; exit 1; fi; while :; do sleep 1; done"
    )
    started = time.monotonic()
    result = perseusrun("-np", "2", "sh", "-c", script)
    assert result.returncode == 1
    assert time.monotonic() - started > 4
    assert not any(alive(pid) for pid in pids(tmp_path, 2))


def test_killed_launcher_takes_its_ranks_along(tmp_path: Path) -> None:
    script = f"{announce(tmp_path)}; sh -c '{announce(tmp_path)}; sleep 60'"
    with Running("-np", "2", "sh", "-c", script) as job:
        processes = pids(tmp_path, 4)
        job.signal(signal.SIGKILL)
        assert eventually(lambda: not any(alive(pid) for pid in processes))


def test_agents_get_heartbeats_while_other_hosts_are_connected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launcher = Launcher(Job(["true"], [], silence=0.06))
    beaten = threading.Event()
    host: Any = SimpleNamespace(
        send_heartbeat=beaten.set,
        kill=lambda: None,
        process=SimpleNamespace(wait=lambda: None),
        close=lambda: None,
    )

    def connect_others() -> None:
        launcher._hosts.append(host)
        assert beaten.wait(30)

    monkeypatch.setattr(launcher, "_prepare", connect_others)
    monkeypatch.setattr(launcher, "_start_and_wait", lambda: None)
    assert launcher.run() == 0


def test_answer_that_arrives_while_perseusrun_is_stopped_is_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launcher = Launcher(Job(["true"], []))
    host: Any = SimpleNamespace(
        name="b", hello=None, gone=False, given_job=False, start_by=math.inf, close=lambda: None
    )
    launcher._hosts.append(host)
    lost: list[str] = []
    monkeypatch.setattr(
        launcher, "_on_lost_hosts", lambda hosts, _: lost.extend(host.name for host in hosts)
    )
    rounds = iter(["stopped", "continued"])

    def select(_: float) -> list[Any]:
        if next(rounds) == "stopped":  # until it is too late; what has arrived is not reported
            host.start_by = time.monotonic()
        else:
            host.hello = "hello"
        return []

    with monkeypatch.context() as patch:
        patch.setattr(launcher, "_selector", SimpleNamespace(select=select))
        launcher._loop(lambda: host.hello is not None)
    launcher._release()
    assert lost == []


def test_what_a_rank_leaves_running_ends_with_it(tmp_path: Path) -> None:
    script = (
        f"sh -c '{announce(tmp_path)}; exec sleep 600' & while ! ls {tmp_path}/*.pid; do :; done"
    )
    result = perseusrun("-np", "1", "sh", "-c", script + " >/dev/null 2>&1")
    assert result.returncode == 0
    assert not alive(pids(tmp_path, 1)[0])


# Starts a process that leaves the session, and waits until it has said that it runs.
def detached(directory: Path) -> str:
    started = f"setsid -f sh -c '{announce(directory)}; exec sleep 600' >/dev/null 2>&1"
    return f"{started}; until ls {directory}/*.pid >/dev/null 2>&1; do sleep 0.02; done"


def test_what_has_left_the_session_of_a_rank_ends_with_the_job(tmp_path: Path) -> None:
    result = perseusrun("-np", "1", "sh", "-c", detached(tmp_path))
    assert result.returncode == 0
    assert not alive(pids(tmp_path, 1)[0])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_what_has_left_the_session_ends_when_the_job_is_ended(tmp_path: Path, number: int) -> None:
    script = f"{detached(tmp_path)}; sleep 600 & wait"
    with Running("-np", "1", "sh", "-c", script) as job:
        (process,) = pids(tmp_path, 1)
        job.signal(number)
        assert eventually(lambda: not alive(process), 60)


# Starts processes whose parents end at once, and waits until nobody of them is left as a zombie.
_ORPHANS = """
import os, subprocess, sys, time
from pathlib import Path
for _ in range(5):
    subprocess.run(["setsid", "-f", "true"])
def adopted():
    tasks = Path("/proc", str(os.getppid()), "task").glob("*/children")
    return {pid for task in tasks for pid in task.read_text().split()} - {str(os.getpid())}
while adopted():
    time.sleep(0.02)
"""


def test_adopted_processes_that_end_while_the_job_runs_are_no_zombies() -> None:
    assert perseusrun("-np", "1", sys.executable, "-c", _ORPHANS, timeout=60).returncode == 0


# Ends its worker, which has a session of its own, when it is told to end.
_KEEPER = """
import os, pathlib, signal, sys
directory = pathlib.Path(sys.argv[1])
def end_worker(*_):
    os.kill(worker, signal.SIGUSR1)
    os.waitpid(worker, 0)
    os._exit(0)
signal.signal(signal.SIGTERM, end_worker)
worker = os.fork()
if worker == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, lambda *_: (directory / "told").touch())
    signal.signal(signal.SIGUSR1, lambda *_: os._exit(0))
    (directory / f"{os.getpid()}.pid").touch()
while True:
    signal.pause()
"""


def test_a_worker_in_a_session_of_its_own_is_ended_by_its_parent(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _KEEPER, str(tmp_path)]
    with Running("-np", "1", *command, command=PATIENT) as job:
        pids(tmp_path, 1)
        job.signal(signal.SIGTERM)
        assert job.finish()[0] == 143
    assert not (tmp_path / "told").exists()


def test_processes_in_groups_of_their_own_end_with_the_job(tmp_path: Path) -> None:
    script = f"timeout 600 sh -c '{announce(tmp_path)}; exec sleep 600'; echo done"
    for number in (signal.SIGINT, signal.SIGKILL):
        with Running("-np", "2", "sh", "-c", script) as job:
            processes = pids(tmp_path, 2)
            job.signal(number)
            assert eventually(lambda pids=processes: not any(alive(pid) for pid in pids), 30)
        for file in tmp_path.iterdir():
            file.unlink()


_FILTER = """
exec > >(cat > "$0/text$PERSEUS_RANK"; sleep 0.3; cat "$0/text$PERSEUS_RANK") 2>&1
for i in 1 2 3; do echo "step $i"; done
[ $PERSEUS_RANK = 1 ] || $1
echo "last words" >&2
exit $PERSEUS_RANK
"""


def test_a_filter_behind_the_output_of_a_rank_passes_on_all_of_it(tmp_path: Path) -> None:
    """Rank 1 fails while rank 0 still runs, which is ended at once."""
    expected = [
        f"[{rank}]<stdout>:{line}"
        for rank in (0, 1)
        for line in ("step 1", "step 2", "step 3", "last words")
    ]
    alone = perseusrun("-np", "1", "bash", "-c", _FILTER, str(tmp_path), "true", timeout=60)
    assert (alone.returncode, alone.stdout.splitlines()) == (0, expected[:4])
    failed = perseusrun("-np", "2", "bash", "-c", _FILTER, str(tmp_path), "sleep 60", timeout=30)
    assert failed.returncode == 1
    assert [line for line in failed.stdout.splitlines() if line[1] == "1"] == expected[4:]


@pytest.mark.parametrize("status", [0, 3])
def test_what_keeps_the_output_of_a_rank_open_ends_soon_after_it(status: int) -> None:
    script = f"sleep 600 & echo $PERSEUS_RANK; exit {status}"
    begun = time.monotonic()
    result = perseusrun("-np", "1", "sh", "-c", script, timeout=60)
    assert (result.returncode, result.stdout) == (status, "[0]<stdout>:0\n")
    assert time.monotonic() - begun < 20


def test_what_a_rank_leaves_running_cannot_hide_its_end_by_talking() -> None:
    result = perseusrun("-np", "2", "sh", "-c", "yes & exit 3", timeout=60)
    assert result.returncode == 3


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&-", "<&- >&- 2>&-"])
def test_closed_standard_descriptors_do_no_harm(tmp_path: Path, closed: str) -> None:
    job = " ".join([*COMMAND, "-np", "2", "sh", "-c", f"'echo hi; touch {tmp_path}/$PERSEUS_RANK'"])
    done = subprocess.run(["sh", "-c", f"exec {job} {closed}"], timeout=60, check=False)
    assert done.returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_job_that_needs_many_descriptors_raises_its_own_limit(tmp_path: Path) -> None:
    limit = "ulimit -Sn"
    command = f"{limit} 64; exec {' '.join(COMMAND)} -np 40 --output-filename {tmp_path}"
    done = subprocess.run(
        ["sh", "-c", f"{command} sh -c '{limit}'"], env=environment(),
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(f"[{n}]<stdout>:64" for n in range(40))


def test_too_few_descriptors_are_named_with_what_to_do(tmp_path: Path) -> None:
    command = f"ulimit -n 64; exec {' '.join(COMMAND)} -np 40 --output-filename {tmp_path} true"
    done = subprocess.run(["sh", "-c", command], capture_output=True, timeout=60, check=False)
    assert done.returncode == 1
    assert b"Too many open files: raise the limit (ulimit -n) of 64" in done.stderr


def test_reader_that_goes_away_ends_the_job() -> None:
    job = " ".join([*COMMAND, "-np", "2", "yes"])
    result = perseusrun("-np", "1", "bash", "-c", f"{job} | head -1; echo ${{PIPESTATUS[0]}}")
    assert result.stdout.splitlines()[1] == "[0]<stdout>:141"


def test_output_files_hold_what_the_console_shows(tmp_path: Path) -> None:
    result = perseusrun(
        "-np", "11", "--output-filename", str(tmp_path / "logs"),
        "sh", "-c", "echo out $PERSEUS_RANK; echo err $PERSEUS_RANK >&2",
    )  # fmt: skip
    assert result.returncode == 0
    for rank in range(11):
        directory = tmp_path / "logs" / f"rank.{rank:02}"
        assert (directory / "stdout").read_text() == f"[{rank}]<stdout>:out {rank}\n"
        assert (directory / "stderr").read_text() == f"[{rank}]<stderr>:err {rank}\n"
        assert f"[{rank}]<stdout>:out {rank}\n" in result.stdout


@pytest.mark.parametrize(
    ("full", "name"), [("stdout", "standard output"), ("stderr", "standard error")]
)
def test_full_disk_under_the_console_costs_lines_and_one_warning(
    tmp_path: Path, full: str, name: str
) -> None:
    script = f"for i in 1 2 3; do echo out $i; echo err $i >&2; done; {announce(tmp_path)}; exit 9"
    with open("/dev/full", "wb") as device:
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        streams[full] = device
        command = [*COMMAND, "-np", "1", "sh", "-c", script]
        job = subprocess.run(
            command, **streams, env=environment(), text=True, timeout=300, check=False
        )
    assert job.returncode == 9
    assert len(list(tmp_path.iterdir())) == 1
    lines = [line for line in (job.stdout or job.stderr).splitlines() if line.startswith("perse")]
    assert lines[0] == (
        f"perseusrun: warning: cannot write {name}: No space left on device; the job goes on, and "
        "output that cannot be written is lost"
    )
    other = "err" if full == "stdout" else "out"
    for i in range(1, 4):
        assert f"[0]<std{other}>:{other} {i}\n" in (job.stdout or job.stderr)
    assert sum("warning" in line for line in lines) == 1


def test_full_disk_under_output_files_costs_lines_and_one_warning(tmp_path: Path) -> None:
    count = 200
    script = f"for i in $(seq {count}); do echo $PERSEUS_RANK $i; done"
    limited = 'ulimit -f 1; exec "$@"'
    job = subprocess.run(
        ["sh", "-c", limited, "sh", *COMMAND, "-np", "2", "--output-filename", tmp_path,
         "sh", "-c", script],
        capture_output=True, env=environment(), text=True, timeout=300, check=False,
    )  # fmt: skip
    assert job.returncode == 0
    (warning,) = job.stderr.splitlines()
    assert f"cannot write {tmp_path}/rank." in warning and "File too large" in warning
    for rank in range(2):
        expected = [f"[{rank}]<stdout>:{rank} {i + 1}" for i in range(count)]
        head = f"[{rank}]"
        assert [line for line in job.stdout.splitlines() if line.startswith(head)] == expected
        written = (tmp_path / f"rank.{rank}" / "stdout").read_text()
        assert len(written) >= 512 and "\n".join(expected).startswith(written)


def test_ranks_run_in_the_current_directory_without_input(tmp_path: Path) -> None:
    result = perseusrun("-np", "1", "sh", "-c", "pwd; cat; echo end", cwd=tmp_path)
    expected = f"[0]<stdout>:{tmp_path}\n[0]<stdout>:end\n"
    assert (result.returncode, result.stdout) == (0, expected), result.stderr


def test_launcher_starts_without_loading_a_framework() -> None:
    script = (
        "import sys, perseus.run.cli; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    result = perseusrun("-np", "1", sys.executable, "-c", script)
    assert result.stdout == "[0]<stdout>:[]\n"

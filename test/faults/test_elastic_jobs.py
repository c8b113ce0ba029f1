"""Elastic jobs of perseusrun on this host: ranks fail, hosts come and go, and no step is lost."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from live_ranks import PATIENT_PERSEUSRUN

RANK = Path(__file__).with_name("elastic_rank.py")
DISCOVERY = "#!/bin/sh\ncat {}/hosts\n"


class Entry(NamedTuple):
    """A rank that entered a world. place: rank, local_rank, local_size, cross_rank, cross_size."""

    place: tuple[int, ...]
    size: int
    step: int
    pid: int
    moment: float


class Job(NamedTuple):
    """What became of a job. worlds: the entries of each, by rank. ends: steps and digests."""

    status: int
    output: str
    worlds: list[list[Entry]]
    ends: list[tuple[int, str]]


def start(
    tmp_path: Path,
    *flags: object,
    perseusrun: Sequence[str] = (sys.executable, "-m", "perseus.run"),
    **plan: Any,
) -> subprocess.Popen[str]:
    plan = {"steps": 30, "size": 0, "worlds": 1, "events": [], **plan}
    command = [*perseusrun, *map(str, flags)]
    command += [sys.executable, str(RANK), str(tmp_path), json.dumps(plan)]
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("PERSEUS_", "HOROVOD_"))}
    variables |= {"GLOO_TIMEOUT_SECONDS": "2", "TMPDIR": str(tmp_path)}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables
    )


def lives(pid: int) -> bool:
    """Whether a process runs: an orphan may be a zombie for as long as nobody collects it."""
    try:
        state = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in {"Z", "X"}


def run(tmp_path: Path, *flags: object, **plan: Any) -> Job:
    job = start(tmp_path, *flags, **plan)
    try:
        output, _ = job.communicate(timeout=90)
    except subprocess.TimeoutExpired:
        job.send_signal(signal.SIGINT)
        pytest.fail(job.communicate()[0])
    status = job.returncode
    worlds: list[list[Entry]] = []
    for line in re.findall(r"<stdout>:enter (.*)", output):
        *numbers, moment = line.split()
        rank, size, *others, step, pid = map(int, numbers)
        entry = Entry((rank, *others), size, step, pid, float(moment))
        if not worlds or len(worlds[-1]) == worlds[-1][0].size:
            worlds.append([])
        worlds[-1].append(entry)
    found = re.findall(r"<stdout>:finished \d+ \d+ (\d+) (\w+)", output)
    ends = [(int(step), digest) for step, digest in found]
    for pid in {entry.pid for world in worlds for entry in world}:
        assert not lives(pid), f"rank {pid} is left"
    return Job(status, output, [sorted(world) for world in worlds], ends)


def expect_success(job: Job, *sizes: int) -> None:
    """The worlds had these sizes, and all ranks of the last one ended with the same weights."""
    assert job.status == 0, job.output
    assert [len(world) for world in job.worlds] == list(sizes), job.output
    for world in job.worlds:
        assert [entry.place[0] for entry in world] == list(range(len(world)))
        assert len({entry.step for entry in world}) == 1
    assert len(job.ends) == sizes[-1] and len(set(job.ends)) == 1, job.output


def pids(world: list[Entry]) -> list[int]:
    return [entry.pid for entry in world]


def discover(tmp_path: Path, hosts: str) -> Path:
    (tmp_path / "hosts").write_text(hosts)
    script = tmp_path / "discover"
    script.write_text(DISCOVERY.format(tmp_path))
    script.chmod(0o755)
    return script


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} does not come"
        time.sleep(0.02)


@pytest.mark.parametrize("rank", [0, 2])
def test_survivors_go_on_from_the_commit_when_a_rank_is_killed(tmp_path: Path, rank: int) -> None:
    events = [{"step": 5, "what": "kill", "rank": rank}]
    job = run(tmp_path, "-np", 3, "--min-np", 2, events=events)
    expect_success(job, 3, 2)
    before, after = job.worlds
    assert pids(after) == [entry.pid for entry in before if entry.place[0] != rank]
    assert after[0].step == 4  # the step in which it was killed is done again
    # The survivor that was local rank 1 stays that, and the other one has what is left.
    local_ranks = [1, 0] if rank == 0 else [0, 1]
    assert [entry.place[1:3] for entry in after] == [(local, 2) for local in local_ranks]
    killed_at = float(re.findall(r"event kill at (\S+)", job.output)[0])
    assert after[0].moment - killed_at < 10
    assert f"rank {rank} on localhost failed with exit code 137" in job.output


def test_a_slot_is_used_again_after_its_cooldown(tmp_path: Path) -> None:
    """The new rank is not rank 0, whose slot it has, and gets the state from a survivor."""
    events = [
        {"step": 5, "what": "kill"},
        {"step": 10, "what": "raise", "rank": 1, "size": 3},
    ]
    flags = ["-np", 3, "--min-np", 2, "--blacklist-cooldown-range", 1, 2]
    job = run(tmp_path, *flags, events=events, size=3, worlds=5)
    expect_success(job, 3, 2, 3, 2, 3)
    first, without, again, *_ = job.worlds
    assert pids(without) == pids(first)[1:]
    assert pids(again)[:2] == pids(without) and pids(again)[2] not in pids(first)
    assert [entry.place[1] for entry in again] == [1, 2, 0]  # as the killed one's
    assert "ValueError: on purpose" in job.output


def test_a_stopped_rank_is_given_up(tmp_path: Path) -> None:
    events = [{"step": 5, "what": "stop", "rank": 1}]
    job = run(tmp_path, "-np", 3, "--min-np", 1, events=events)
    expect_success(job, 3, 2)
    assert "rank 1 on localhost is stopped (SIGSTOP) while others wait" in job.output


def test_survivors_go_on_without_a_host_that_is_gone(tmp_path: Path) -> None:
    events = [{"step": 5, "what": "agent", "rank": 1}]
    job = run(tmp_path, "-H", "localhost:2,127.0.0.1:2", "-np", 4, "--min-np", 1, events=events)
    expect_success(job, 4, 2)
    assert pids(job.worlds[1]) == pids(job.worlds[0])[2:]
    assert "the process that runs the ranks ended" in job.output


def test_a_busy_rank_is_waited_for(tmp_path: Path) -> None:
    """Rank 2 is at work when the world ends, for longer than GLOO_TIMEOUT_SECONDS."""
    events = [{"step": 5, "what": "fail"}, {"step": 5, "what": "wait", "rank": 2}]
    job = run(tmp_path, "-np", 3, "--min-np", 2, events=events)
    expect_success(job, 3, 3)
    assert pids(job.worlds[0]) == pids(job.worlds[1])


def test_hosts_come_and_go_between_steps(tmp_path: Path) -> None:
    """No step is done again, and ranks that are not needed any more end without an error."""
    events = [
        {"step": 5, "what": "hosts", "text": "localhost:2\n127.0.0.1:1\n"},
        {"step": 10, "what": "hosts", "text": "127.0.0.1:1\n", "size": 3},
    ]
    script = discover(tmp_path, "localhost:2\n")
    flags = ["-np", 2, "--min-np", 1, "--host-discovery-script", script]
    job = run(tmp_path, *flags, events=events, size=1, worlds=3)
    expect_success(job, 2, 3, 1)
    first, more, last = job.worlds
    assert pids(more)[:2] == pids(first) and pids(last) == pids(more)[2:]
    assert [entry.place[3:] for entry in more] == [(0, 2), (0, 1), (1, 2)]
    assert job.output.count("this rank leaves: localhost does not have its slot any more") == 2
    assert "failed" not in job.output


@pytest.mark.parametrize(("quirk", "size"), [("gate", 4), ("broken", 3)])
def test_processes_of_a_new_host_join_one_world(tmp_path: Path, quirk: str, size: int) -> None:
    """Its second process is ready, or fails, long after the first one is ready."""
    events = [
        {"step": 5, "what": "hosts", "text": "localhost:2\n127.0.0.1:2\n"},
        {"step": 200, "what": "open"},
    ]
    flags = ["-np", 2, "--reset-limit", 1, "--host-discovery-script"]
    flags += [discover(tmp_path, "localhost:2\n")]
    patient: dict[str, Any] = {"perseusrun": PATIENT_PERSEUSRUN}
    job = run(tmp_path, *flags, **patient, events=events, size=size, worlds=2, quirk=quirk)
    expect_success(job, 2, size)


def test_a_process_of_a_new_host_that_hangs_does_not_keep_the_other_one_out(tmp_path: Path) -> None:
    events = [
        {"step": 5, "what": "hosts", "text": "localhost:1\n127.0.0.1:2\n"},
        {"step": 5, "what": "open", "size": 2},
    ]
    flags = ["-np", 1, "--host-discovery-script", discover(tmp_path, "localhost:1\n")]
    job = run(tmp_path, *flags, events=events, size=3, worlds=3, quirk="gate")
    expect_success(job, 1, 2, 3)


def test_no_rank_joins_a_job_whose_ranks_are_in_their_second_loop(tmp_path: Path) -> None:
    """It would begin with the first one, and the others would wait for it."""
    events = [{"step": 5, "what": "hosts", "text": "localhost:2\n127.0.0.1:1\n"}]
    script = discover(tmp_path, "localhost:2\n")
    flags = ["-np", 2, "--min-np", 1, "--host-discovery-script", script]
    job = run(tmp_path, *flags, events=events, steps=150, quirk="phases")
    expect_success(job, 2)
    assert job.output.count("warning: no new rank can join the job any more") == 1, job.output


@pytest.mark.parametrize("limit", [[], ["--max-np", 1]])
def test_a_host_that_takes_the_place_of_all_others_gets_the_state(
    tmp_path: Path, limit: list[object]
) -> None:
    """Its process cannot ask for a world before the only rank with the state has to leave."""
    script = discover(tmp_path, "localhost:1\n")
    flags = ["-np", 1, *limit, "--host-discovery-script", script]
    events = [{"step": 5, "what": "hosts", "text": "127.0.0.1:1\n"}]
    job = run(tmp_path, *flags, events=events, size=1, worlds=2)
    expect_success(job, 1, 2, 1)
    first, both, last = job.worlds
    assert pids(both)[:1] == pids(first) and pids(last) == pids(both)[1:]
    assert 0 < both[0].step < last[0].step
    assert job.output.count("this rank leaves: localhost does not have its slot any more") == 1


def test_no_more_ranks_than_max_np_and_no_fewer_than_np_at_the_start(tmp_path: Path) -> None:
    script = discover(tmp_path, "")
    flags = ["-np", 2, "--min-np", 1, "--max-np", 3, "--slots-per-host", 1]
    job = start(tmp_path, *flags, "--host-discovery-script", script, size=3)
    for hosts in ("localhost\n", "localhost:9\n"):
        time.sleep(1.5)
        (tmp_path / "hosts").write_text(hosts)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 0, output
    entered = re.findall(r"<stdout>:enter (\d) (\d)", output)
    assert entered and all(size == "3" for _, size in entered), output


@pytest.mark.parametrize(
    ("flags", "events", "status", "expected"),
    [
        (
            ["--min-np", 2, "--reset-limit", 0],
            [{"step": 3, "what": "fail"}],
            1,
            "number of resets during elastic job exceeded limit: 0",
        ),
        (
            ["--min-np", 2],
            [{"step": 3, "what": "kill", "rank": 1}],
            137,
            "1 slots are left that have not failed, instead of 2",
        ),
        (
            ["--min-np", 1],
            [{"step": 3, "what": "raise", "rank": 0}, {"step": 3, "what": "raise", "rank": 1}],
            1,
            "nobody has the training's state",
        ),
    ],
)
def test_a_job_ends_that_cannot_go_on(
    tmp_path: Path, flags: list[object], events: list[dict[str, Any]], status: int, expected: str
) -> None:
    job = run(tmp_path, "-np", 2, *flags, events=events)
    assert job.status == status, job.output
    assert expected in job.output
    assert not job.ends


def test_too_few_slots_for_too_long_end_the_job(tmp_path: Path) -> None:
    script = discover(tmp_path, "localhost:1\n")
    flags = ["-np", 2, "--elastic-timeout", 1, "--host-discovery-script", script]
    job = run(tmp_path, *flags)
    assert job.status == 1, job.output
    assert "1 slots can be used after 1 s (--elastic-timeout), instead of 2" in job.output


def test_slots_that_fail_and_return_for_ever_end_the_job_before_its_first_world() -> None:
    command = [sys.executable, "-m", "perseus.run", "-np", "2", "--min-np", "1"]
    command += ["--blacklist-cooldown-range", "1", "1", "--elastic-timeout", "2"]
    done = subprocess.run(
        [*command, "sh", "-c", "exit 3"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 3, done.stderr
    limit = "2 s after the first failure (--elastic-timeout), instead of 2"
    assert f"0 ranks asked to join and 0 slots can be used {limit}" in done.stderr
    assert "was the first to fail, with exit code 3" in done.stderr


def test_rank_0_is_one_that_has_the_state(tmp_path: Path) -> None:
    """Of two ranks that are left, the one on the first host has joined, but has no state yet."""
    flags = ["-H", "localhost:2,127.0.0.1:1", "-np", 3, "--min-np", 2]
    events = [{"step": 5, "what": "kill", "rank": 1}]
    flags += ["--blacklist-cooldown-range", 1, 2]
    job = run(tmp_path, *flags, events=events, size=3, worlds=5, quirk="reset")
    assert job.status == 0, job.output
    # Nobody has entered the third world, whose sync() failed.
    first, without, after, *_ = job.worlds
    assert [len(first), len(without), len(after)] == [3, 2, 2], job.output
    assert after[0].pid == first[2].pid and after[1].pid not in pids(first)
    assert after[0].step > 4


@pytest.mark.parametrize("killed", [0, 1])
def test_process_sets_have_the_ranks_that_exist(tmp_path: Path, killed: int) -> None:
    events = [{"step": 5, "what": "kill", "rank": killed}]
    flags = ["-np", 3, "--min-np", 2, "--blacklist-cooldown-range", 1, 1]
    job = run(tmp_path, *flags, events=events, size=3, worlds=3, quirk="sets")
    expect_success(job, 3, 2, 3)
    found = Counter(re.findall(r"<stdout>:set (\d \d .*)", job.output))
    # The sum over the set, and the gradient: a rank that is no member keeps its own.
    whole = ["0 3 1 [0, 2] 4 4", "0 3 2 [1, 2] None 1", "1 3 1 [0, 2] None 2"]
    whole += ["1 3 2 [1, 2] 5 5", "2 3 1 [0, 2] 4 4", "2 3 2 [1, 2] 5 5"]
    smaller = ["0 2 1 [0] 1 1", "0 2 2 [1] None 1", "1 2 1 [0] None 2", "1 2 2 [1] 2 2"]
    assert found == Counter([*whole, *whole, *smaller]), job.output


def test_a_rank_that_dies_as_a_world_begins_is_not_waited_for(tmp_path: Path) -> None:
    job = run(tmp_path, "-np", 3, "--min-np", 2, quirk="start")
    expect_success(job, 2)
    assert "world 0 did not begin" in job.output


def test_a_rank_that_dies_when_a_world_has_just_begun_is_not_waited_for(tmp_path: Path) -> None:
    job = run(tmp_path, "-np", 3, "--min-np", 2, quirk="meet")
    expect_success(job, 2)
    assert "world 0 did not begin" in job.output


def test_a_rank_that_stops_when_a_world_has_just_begun_is_not_waited_for(tmp_path: Path) -> None:
    job = run(tmp_path, "-np", 3, "--min-np", 2, quirk="halt")
    expect_success(job, 2)
    assert "world 0 did not begin" in job.output


@pytest.mark.parametrize("quirk", ["early", "last"])
def test_a_process_that_ends_before_the_first_world_costs_its_slot(
    tmp_path: Path, quirk: str
) -> None:
    job = run(tmp_path, "-np", 2, "--min-np", 2, "-H", "localhost:3", quirk=quirk)
    expect_success(job, 2)
    assert "process 2 on localhost ended before it asked to join a world" in job.output


def test_a_command_that_asks_for_no_world_runs_on_all_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh = tmp_path / "ssh"
    late = 'sleep 1.5\nfor last; do :; done\nexec sh -c "$last"'
    ssh.write_text(f"#!/bin/sh\n[ $1 = -G ] && exit 1\n{late}\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    command = [sys.executable, "-m", "perseus.run", "-np", "2", "--min-np", "2"]
    command += ["-H", "localhost:1,b:1", "--network-interface", "lo"]
    command += ["sh", "-c", "echo $HOROVOD_HOSTNAME"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert sorted(line.partition(":")[2] for line in done.stdout.splitlines()) == ["b", "localhost"]


def test_a_job_whose_discovery_never_answers_ends(tmp_path: Path) -> None:
    script = tmp_path / "discover"
    script.write_text("#!/bin/sh\nsleep 300\n")
    script.chmod(0o755)
    job = start(tmp_path, "-np", 2, "--elastic-timeout", 1, "--host-discovery-script", script)
    output, _ = job.communicate(timeout=20)
    assert job.returncode == 1, output
    assert "the discovery of hosts has not answered within 1 s (--elastic-timeout)" in output


def test_extra_rank_that_loads_slowly_does_not_end_a_job_that_has_enough(tmp_path: Path) -> None:
    flags = ["-np", 2, "--min-np", 2, "--start-timeout", 3, "-H", "localhost:3"]
    job = run(tmp_path, *flags, quirk="slow", size=3, worlds=2)
    expect_success(job, 2, 3)


def test_a_rank_that_stops_as_a_world_begins_is_not_waited_for(tmp_path: Path) -> None:
    begun = time.monotonic()
    job = run(tmp_path, "-np", 3, "--min-np", 2, quirk="pause")
    expect_success(job, 2)
    assert "is stopped (SIGSTOP) while others wait" in job.output
    assert "HOROVOD_START_TIMEOUT" not in job.output  # whose end is 60 s away
    assert time.monotonic() - begun < 45


@pytest.mark.parametrize(
    ("quirk", "message"),
    [
        ("late", "ended before it asked to join a world"),
        ("asleep", "is stopped (SIGSTOP) and has not asked for a world: it is killed"),
    ],
)
def test_a_process_that_does_not_come_to_join_is_replaced(
    tmp_path: Path, quirk: str, message: str
) -> None:
    events = [{"step": 5, "what": "kill", "rank": 1}]
    flags = ["-np", 2, "--min-np", 1, "--blacklist-cooldown-range", 1, 1]
    job = run(tmp_path, *flags, events=events, size=2, worlds=3, quirk=quirk)
    expect_success(job, 2, 1, 2)
    assert message in job.output


def test_a_rank_that_does_not_leave_is_ended(tmp_path: Path) -> None:
    events = [{"step": 5, "what": "hosts", "text": "127.0.0.1:1\n"}]
    script = discover(tmp_path, "localhost:1\n127.0.0.1:1\n")
    flags = ["-np", 2, "--min-np", 1, "--host-discovery-script", script]
    job = run(tmp_path, *flags, events=events, size=1, worlds=2, quirk="thread")
    expect_success(job, 2, 1)


def test_a_new_rank_that_cannot_start_costs_no_more_than_its_slot(tmp_path: Path) -> None:
    """Worlds that do not begin because of it are no resets."""
    events = [{"step": 5, "what": "hosts", "text": "localhost:2\n"}]
    script = discover(tmp_path, "localhost:1\n")
    flags = ["-np", 1, "--min-np", 1, "--reset-limit", 1, "--host-discovery-script", script]
    job = run(tmp_path, *flags, events=events, worlds=5, quirk="limit")
    expect_success(job, 1, 1)
    assert pids(job.worlds[0]) == pids(job.worlds[1])
    assert job.worlds[1][0].step > 5  # none is done again
    why = "rank 1 on localhost leaves: 3 worlds did not begin because of it; its slot is not used"
    assert job.output.count(why) == 1, job.output
    assert job.output.count("<stderr>:[elastic] world ") == 6  # three, of two ranks


def test_a_rank_of_the_last_world_that_fails_makes_the_job_fail(tmp_path: Path) -> None:
    job = run(tmp_path, "-np", 2, "--min-np", 1, steps=5, quirk="status")
    assert job.status == 7, job.output
    assert "rank 1 on localhost was the first to fail, with exit code 7" in job.output


def test_a_host_that_cannot_be_reached_costs_nothing_but_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\n[ $1 = -G ] || exec sleep 60\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    events = [{"step": 5, "what": "hosts", "text": "localhost:2\nnowhere:1\n"}]
    script = discover(tmp_path, "localhost:2\n")
    flags = ["-np", 2, "--start-timeout", 2, "--host-discovery-script", script]
    job = run(tmp_path, *flags, events=events, steps=250)
    expect_success(job, 2)
    assert "no answer from nowhere within 2 s (--start-timeout)" in job.output


def test_descriptors_of_processes_that_have_ended_are_closed(tmp_path: Path) -> None:
    """Process 1 fails again and again."""
    command = [sys.executable, "-m", "perseus.run", "-np", "2", "--min-np", "2"]
    command += ["--blacklist-cooldown-range", "1", "1", "--output-filename", str(tmp_path)]
    command += ["sh", "-c", "[ $HOROVOD_LOCAL_RANK = 0 ] && sleep 60 || exit 3"]
    job = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        counts = []
        for number in (2, 5):
            while not (tmp_path / f"rank.{number}").exists():
                time.sleep(0.05)
            time.sleep(0.5)
            counts.append(len(os.listdir(f"/proc/{job.pid}/fd")))
    finally:
        job.terminate()
        job.communicate(timeout=20)
    assert counts[0] == counts[1]


def test_a_signal_ends_a_job_whose_discovery_hangs(tmp_path: Path) -> None:
    script = tmp_path / "discover"
    script.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nsleep 300\n")
    script.chmod(0o755)
    job = start(tmp_path, "-np", 2, "--host-discovery-script", script)
    while not (tmp_path / "pid").exists():
        time.sleep(0.05)
    time.sleep(0.2)
    job.send_signal(signal.SIGTERM)
    output, _ = job.communicate(timeout=10)
    assert job.returncode == 128 + signal.SIGTERM, output
    assert not lives(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("ending", [[signal.SIGKILL], [signal.SIGTERM, signal.SIGINT]])
def test_no_end_of_perseusrun_leaves_its_discovery_behind(
    tmp_path: Path, ending: list[int]
) -> None:
    """Neither one that it cannot see coming, nor one by a second signal, for which a rank that
    SIGTERM does not end gives time. The script hangs in a program that it has started."""
    script = tmp_path / "discover"
    script.write_text(
        f"#!/bin/sh\necho localhost:1\n[ -e {tmp_path}/ready ] || exit 0\n"
        f"sleep 300 &\necho $$ $! > {tmp_path}/new\nmv {tmp_path}/new {tmp_path}/pids\nwait\n"
    )
    script.chmod(0o755)
    rank = f"trap 'echo > {tmp_path}/told' TERM; echo > {tmp_path}/ready; "
    rank += "while :; do sleep 0.1; done"
    command = [sys.executable, "-m", "perseus.run", "-np", "1", "--host-discovery-script", script]
    job = subprocess.Popen([*command, "sh", "-c", rank], stdout=subprocess.DEVNULL)
    left: list[int] = []
    try:
        wait_for(tmp_path / "pids")
        left = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        job.send_signal(ending[0])
        for number in ending[1:]:
            wait_for(tmp_path / "told")
            job.send_signal(number)
        job.wait(60)
        deadline = time.monotonic() + 30
        while any(map(lives, left)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not [pid for pid in left if lives(pid)]
    finally:
        job.kill()
        job.wait()
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_job_that_waits_for_hosts(tmp_path: Path, number: int) -> None:
    script, looked = tmp_path / "discover", tmp_path / "looked"
    script.write_text(f"#!/bin/sh\necho >> {looked}\necho localhost:1\n")
    script.chmod(0o755)
    job = start(tmp_path, "-np", 2, "--host-discovery-script", script)
    while not looked.exists() or looked.stat().st_size < 2:  # it has found too few, and waits
        assert job.poll() is None, job.communicate()[0]
        time.sleep(0.05)
    job.send_signal(number)
    output, _ = job.communicate(timeout=20)
    assert job.returncode == 128 + number, output

"""A rank of an elastic job that test_elastic_jobs.py starts: training whose end is known.

    perseusrun … python elastic_rank.py DIRECTORY PLAN

PLAN is JSON: {"steps": n, "size": ranks to have at the end, or 0, "worlds": n, "events": [event,
…]}. Training goes on until all three are reached. An event {"step", "what", "rank"} happens once:
the rank does it in that step, or in the first later one in which the world has the event's "size",
before it commits. `what` is one of

kill, stop: a signal.
raise, fail: ValueError, or HorovodInternalError.
wait: for 3 s, while others want the next world.
agent: kills the parent, with which all ranks of the host end.
hosts: writes the event's "text" into DIRECTORY/hosts.
open: lets a process in that the quirk "gate" holds up, or ends one that "broken" does.

"quirk", if it is there, is one of these, each of which one process has:

reset: rank 0 of the third world kills itself before it has taken part in state.sync().
late: the first process that comes after another one was killed ends before it joins.
start, pause: rank 2 kills or stops itself when it has its place in the first world, and the others
    wait for it.
meet, halt: rank 2 kills or stops itself when it has met the others of the first world, before all
    of them know that.
early, last: the third process ends before it joins, before or after the others have asked to join.
slow: the third process takes 5 s to load.
asleep: the first process that comes after another one was killed stops itself before it joins.
gate, broken: the second process of 127.0.0.1 waits for the event "open" before it joins, or fails
    then.
thread: a rank of localhost has a thread that does not end.
sets: there are the process sets 0, 2 and 1, 2; of each, all ranks print the ranks, their sum, and
    the gradient in a DistributedOptimizer that a process has had since it began.
limit: the second process of the host cannot make shared memory, which is the only transport.
phases: there are two loops, of which the first ends after a step.
status: rank 1 ends with exit status 7 after its last step, 2 s before the others.

Every rank adds the same gradient, a small whole number that differs per step and index. So the
weights at the end are the sum of all steps, whoever took part in them: none is lost or done twice.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import perseus.arrays as hvd
from perseus import basics, control, elastic, process_sets

DIRECTORY, PLAN = Path(sys.argv[1]), json.loads(sys.argv[2])
PLACE = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")


def happen(state: Any) -> None:
    for number, event in enumerate(PLAN["events"]):
        if state.step < event["step"] or hvd.rank() != event.get("rank", 0):
            continue
        if hvd.size() != event.get("size", hvd.size()):
            continue
        try:
            (DIRECTORY / f"event.{number}").touch(exist_ok=False)
        except FileExistsError:
            continue
        print(f"event {event['what']} at {time.time():.3f}", flush=True)
        if event["what"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif event["what"] == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif event["what"] == "raise":
            raise ValueError("on purpose")
        elif event["what"] == "fail":
            raise elastic.HorovodInternalError("on purpose")
        elif event["what"] == "agent":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(10)
        elif event["what"] == "wait":
            time.sleep(3)
        elif event["what"] == "open":
            (DIRECTORY / "gate").touch()
        else:
            new = DIRECTORY / "hosts.new"
            new.write_text(event["text"])
            new.rename(DIRECTORY / "hosts")


def train(state: Any) -> None:
    place = [getattr(hvd, name)() for name in PLACE]
    assert place == [int(os.environ[f"PERSEUS_{name.upper()}"]) for name in PLACE]
    assert os.environ["HOROVOD_ELASTIC"] == "1"
    print("enter", *place, state.step, os.getpid(), f"{time.time():.3f}", flush=True)
    for own in sets:
        sums = None
        if own.process_set_id is not None and own.included():
            sums = int(hvd.allreduce(np.array([hvd.rank() + 1]), op=hvd.Sum, process_set=own)[0])
        gradient = summed_in(own, hvd.rank() + 1)
        place = hvd.rank(), hvd.size(), own.process_set_id
        print("set", *place, own.ranks, sums, gradient, flush=True)
    control.barrier()  # whoever leaves earlier ends what others still do in their sets
    while (
        state.step < PLAN["steps"]
        or hvd.size() != (PLAN["size"] or hvd.size())
        or basics._world.epoch < PLAN["worlds"]
    ):
        gradient = np.arange(1000) % 7 + state.step % 5.0
        state.weights = state.weights + hvd.allreduce(gradient, "gradient")
        state.step += 1
        happen(state)
        time.sleep(0.02)
        state.commit()


def first_phase(state: Any) -> None:
    state.earlier = hvd.allreduce(np.ones(7), "earlier")
    state.commit()


def summed_in(own: Any, gradient: int) -> int:
    """Let the set's optimizer take a step; returns what the gradient has become."""
    parameter, optimizer = optimizers[own]
    optimizer.load_state_dict(optimizer.state_dict())  # as elastic states do
    optimizer.zero_grad()
    (parameter * gradient).backward()
    optimizer.step()
    return int(parameter.grad)


def kill_in_the_third_world() -> None:
    if basics._world.epoch == 3 and hvd.rank() == 0 and not marked("reset"):
        os.kill(os.getpid(), signal.SIGKILL)


def marked(name: str) -> bool:
    """Whether a process has asked before."""
    try:
        (DIRECTORY / f"quirk.{name}").touch(exist_ok=False)
    except FileExistsError:
        return True
    return False


QUIRK = PLAN.get("quirk")
if QUIRK == "late" and (DIRECTORY / "event.0").exists() and not marked("late"):
    sys.exit(0)
if QUIRK == "asleep" and (DIRECTORY / "event.0").exists() and not marked("asleep"):
    os.kill(os.getpid(), signal.SIGSTOP)
if QUIRK in ("start", "pause") and os.environ["HOROVOD_LOCAL_RANK"] == "2":
    number = signal.SIGKILL if QUIRK == "start" else signal.SIGSTOP
    basics._connect = lambda *_: os.kill(os.getpid(), number)
if QUIRK in ("meet", "halt") and os.environ["HOROVOD_LOCAL_RANK"] == "2":
    number = signal.SIGKILL if QUIRK == "meet" else signal.SIGSTOP
    process_sets._compare = lambda _: os.kill(os.getpid(), number)
if QUIRK in ("early", "last"):
    is_third = os.environ["HOROVOD_LOCAL_RANK"] == "2"
    time.sleep(1.5 if is_third == (QUIRK == "last") else 0)
    if is_third:
        sys.exit(0)
if QUIRK == "slow" and os.environ["HOROVOD_LOCAL_RANK"] == "2" and not marked("slow"):
    time.sleep(5)
is_held_up = os.environ["HOROVOD_HOSTNAME"] == "127.0.0.1"
if QUIRK in ("gate", "broken") and is_held_up and os.environ["HOROVOD_LOCAL_RANK"] == "1":
    while not (DIRECTORY / "gate").exists():
        time.sleep(0.02)
    if QUIRK == "broken":
        sys.exit(3)
if QUIRK == "thread" and os.environ["HOROVOD_HOSTNAME"] == "localhost":
    threading.Thread(target=time.sleep, args=[600]).start()
if QUIRK == "limit":
    os.environ["PERSEUS_TRANSPORT"] = "shm"
    if os.environ["HOROVOD_LOCAL_RANK"] == "1":
        resource.setrlimit(resource.RLIMIT_FSIZE, (10240, 10240))
sets = [hvd.ProcessSet([0, 2]), hvd.ProcessSet([1, 2])] if QUIRK == "sets" else []
hvd.init(process_sets=sets)
optimizers = {}
if sets:
    import torch

    from perseus.torch import DistributedOptimizer

    for each in sets:
        parameter = torch.nn.Parameter(torch.zeros(()))
        inner = torch.optim.SGD([parameter], lr=1.0)
        made = DistributedOptimizer(inner, [("p", parameter)], op=hvd.Sum, process_set=each)
        optimizers[each] = parameter, made
state = elastic.ObjectState(weights=np.zeros(1000), step=0)
if QUIRK == "reset":
    state.register_reset_callbacks([kill_in_the_third_world])
if QUIRK == "phases":
    earlier = elastic.ObjectState(earlier=np.zeros(7), step=0)
    elastic.run_fn(first_phase)(earlier)
elastic.run_fn(train)(state)
if QUIRK == "status":
    control.barrier()
    time.sleep(3 if hvd.rank() == 0 else 1)  # until rank 0 has passed the barrier, too
    if hvd.rank() == 1:
        os._exit(7)
expected = sum(np.arange(1000) % 7 + step % 5.0 for step in range(state.step))
assert np.array_equal(state.weights, expected)
digest = hashlib.sha256(state.weights.tobytes()).hexdigest()[:8]
print("finished", hvd.rank(), hvd.size(), state.step, digest, os.getpid(), flush=True)
hvd.shutdown()

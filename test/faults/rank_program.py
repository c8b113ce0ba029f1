"""What a rank does in these tests: `python rank_program.py SCENARIO DIRECTORY [WORD ...]`.

Needs no framework: vectors are arrays of the standard library, so that a rank starts in a blink.
What happens to it is noted, with the time, in DIRECTORY/RANK.notes, a line of JSON each.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import itertools
import json
import multiprocessing
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from perseus import basics

RANK = int(os.environ["PERSEUS_RANK"])
SIZE = int(os.environ["PERSEUS_SIZE"])
ALLREDUCE, BARRIER, SUM, FLOAT32 = 0, 5, 1, 2
PERIOD = 1024
BIG = 4096 * PERIOD  # 16 MiB
FOREVER = 120.0

operations: Any = None


def note(event: str, **facts: Any) -> None:
    line = json.dumps({"event": event, "at": time.monotonic(), **facts}) + "\n"
    with Path(sys.argv[2], f"{RANK}.notes").open("a", encoding="utf-8") as file:
        file.write(line)


def describe(vector: array.array[float]) -> tuple[int, tuple[int], tuple[int], int]:
    return vector.buffer_info()[0], (len(vector),), (1,), FLOAT32


def join() -> None:
    global operations
    note("ready", pid=os.getpid())
    while Path(sys.argv[2], "hold").exists():
        time.sleep(0.005)
    note("joining")
    basics.init()
    operations = basics.operations(lambda *_: None, describe)
    note("joined", descriptors=resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def submit(vector: array.array[float] | None, name: str) -> int:
    kind = BARRIER if vector is None else ALLREDUCE
    handle: int = operations.submit(kind, name, vector, vector, op=SUM)
    return handle


def synchronize(handle: int) -> None:
    operations.synchronize(handle)


def allreduce(vector: array.array[float], name: str) -> None:
    synchronize(submit(vector, name))


def barrier() -> None:
    synchronize(submit(None, "barrier.noname"))


def values(rank: int, step: int, count: int = PERIOD) -> array.array[float]:
    """Small whole numbers that differ per rank, step and index: their sums are exact."""
    period = array.array("f", [(index * 7 + rank * 31 + step * 3) % 257 for index in range(PERIOD)])
    return period * (count // PERIOD)


def check_sum(vector: array.array[float], step: int) -> None:
    parts = [values(rank, step) for rank in range(SIZE)]
    expected = array.array("f", map(sum, zip(*parts, strict=True)))
    assert vector.tobytes() == (expected * (len(vector) // PERIOD)).tobytes()


def reduce_and_check(step: int, name: str, count: int = PERIOD) -> None:
    vector = values(RANK, step, count)
    allreduce(vector, name)
    check_sum(vector, step)


def failure() -> str | None:
    return basics._context().failure()


# ---- scenarios ----------------------------------------------------------------------------------


def exchange() -> None:
    """Big allreduces without end."""
    for step in range(1_000_000):
        vector = values(RANK, step, BIG)
        allreduce(vector, "gradient")
        if step < 3:
            check_sum(vector, step)
        if step == 3:
            note("going")


def wait(*roles: str) -> None:
    """Each rank waits in its own way for what never comes."""
    reduce_and_check(0, "warm")
    barrier()
    role = roles[RANK]
    note("going")
    if role == "synchronize":
        allreduce(values(RANK, 1), "lonely")
    elif role == "barrier":
        barrier()
    elif role == "poll":
        handle = submit(values(RANK, 1), "polled")
        while not operations.poll(handle):
            time.sleep(0.01)
        synchronize(handle)
    elif role == "compute":
        while failure() is None:
            sum(range(50_000))
        note("noticed", text=failure())
        allreduce(values(RANK, 1), "afterwards")
    elif role == "sleep":
        while failure() is None:
            time.sleep(0.05)
        allreduce(values(RANK, 1), "afterwards")
    note("passed")


def be_late(*roles: str) -> None:
    """Some ranks submit much later than the others, and everything comes right."""
    reduce_and_check(0, "warm")
    begun = time.monotonic()
    role, _, seconds = roles[RANK].partition(":")
    if role == "sleep":
        time.sleep(int(seconds))
    elif role == "hold":
        # PyDLL keeps the GIL, as a long computation in C may.
        ctypes.PyDLL(None).sleep(int(seconds))
    reduce_and_check(1, "late.gradient", 64 * PERIOD)
    note("result", after=time.monotonic() - begun)
    barrier()


def start() -> None:
    reduce_and_check(0, "first")
    note("passed")


def keep_going() -> None:
    """Six steps or more, of small and large allreduces, until there is a file named enough.

    RANK.steps gets a byte for each.
    """
    step, more = 0, True
    steps = Path(sys.argv[2], f"{RANK}.steps")
    steps.touch()
    note("going")
    while more:
        reduce_and_check(step, "small")
        reduce_and_check(step, "large", 256 * PERIOD)
        vote = values(RANK, step)
        vote[0] = float(RANK == 0 and step >= 5 and Path(sys.argv[2], "enough").exists())
        allreduce(vote, "vote")
        more, step = vote[0] == 0, step + 1
        with steps.open("ab") as file:
            file.write(b".")
    barrier()
    note("passed")


def keep_pending() -> None:
    """Rank 0 waits for what the others submit once there is a file named enough."""
    reduce_and_check(0, "warm")
    vector = values(RANK, 1)
    if RANK == 0:
        handle = submit(vector, "pending")
        time.sleep(0.2)  # for the others to learn of it
        note("going")
    else:
        note("going")
        while not Path(sys.argv[2], "enough").exists():
            time.sleep(0.005)
        handle = submit(vector, "pending")
    synchronize(handle)
    check_sum(vector, 1)
    barrier()
    note("passed")


def fork(*_: str) -> None:
    """A forked child gets one clear error; the parent's world does not notice."""
    reduce_and_check(0, "warm")
    held = {int(entry) for entry in os.listdir("/proc/self/fd")}
    vector = values(RANK, 1)
    open_handle = submit(vector, "open")
    child = os.fork()
    if child == 0:
        uses = {
            "submit": lambda: submit(values(RANK, 2), "from.a.child"),
            "synchronize": lambda: operations.poll(open_handle) and synchronize(open_handle),
            "barrier": barrier,
        }
        for use, call in uses.items():
            try:
                call()
            except Exception as error:
                note("child", use=use, kind=type(error).__name__, text=str(error))
        links = []
        for fd in held:
            with contextlib.suppress(OSError):
                links.append(os.readlink(f"/proc/self/fd/{fd}"))
        note("child.holds", links=[link for link in links if "socket:" in link or "memfd" in link])
        sys.exit(0)  # runs exit handlers, which must not hang or disturb
    _, status = os.waitpid(child, 0)
    note("child.ended", status=status)
    synchronize(open_handle)
    check_sum(vector, 1)
    reduce_and_check(2, "after.the.child")
    note("passed")


def fork_while_synchronizing(way: str) -> None:
    """Rank 0 forks while a thread of its waits for rank 1; the child then ends in some way."""
    reduce_and_check(0, "warm")
    done = Path(sys.argv[2], "done")
    vector = values(RANK, 1)
    if RANK == 1:
        while not done.exists():
            time.sleep(0.005)
        allreduce(vector, "late")
        note("passed")
        return
    # The thread keeps the GIL until it waits inside the core, and holds it whenever it does not.
    sys.setswitchinterval(1000)
    begun = threading.Event()

    def wait_in_the_core() -> None:
        handle = submit(vector, "late")
        begun.set()
        synchronize(handle)

    thread = threading.Thread(target=wait_in_the_core)
    thread.start()
    begun.wait()
    {"load_data": _load_in_children, "pool": _pool_of_children}.get(way, _fork_child)(way)
    done.touch()
    thread.join()
    check_sum(vector, 1)
    note("passed")


def _fork_child(way: str) -> None:
    child = os.fork()
    if child == 0:
        ways: dict[str, Callable[[], object]] = {
            "exit": lambda: None,
            "collective": lambda: allreduce(values(RANK, 2), "from.a.child"),
            "shutdown": basics.shutdown,
        }
        try:
            ways[way]()
        except Exception as error:
            note("child", kind=type(error).__name__, text=str(error))
        sys.exit(7)
    _, status = os.waitpid(child, 0)
    note("child.ended", status=os.waitstatus_to_exitcode(status))


def _load_in_children(_: str) -> None:
    from torch.utils.data import DataLoader

    loader = DataLoader(range(64), batch_size=8, num_workers=2, multiprocessing_context="fork")
    assert [batch.tolist()[0] for batch in loader] == list(range(0, 64, 8))
    note("child.ended", status=7)


def _pool_of_children(_: str) -> None:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(abs, [-1, -2, -3]) == [1, 2, 3]
        pool.close()
        pool.join()
    note("child.ended", status=7)


def load_data() -> None:
    """Steps on batches that two worker processes per rank prepare."""
    from torch.utils.data import DataLoader

    loader = DataLoader(range(100_000), batch_size=8, num_workers=2, persistent_workers=True)
    for step, batch in enumerate(loader):
        reduce_and_check(step, "gradient")
        assert batch.tolist() == list(range(8 * step, 8 * step + 8))
        if step == 5:
            note("workers", pids=[process.pid for process in multiprocessing.active_children()])
            note("going")


def fail_alone(how: str) -> None:
    """The last rank ends in some way while the others wait for it."""
    reduce_and_check(0, "warm")
    barrier()
    if RANK < SIZE - 1:
        allreduce(values(RANK, 1), "lonely")
    note("failing")
    if how == "raise":
        raise KeyError("no such column")
    if how == "exit":
        sys.exit(3)
    elif how == "return":
        return
    elif how == "shutdown":
        basics.shutdown()
        time.sleep(FOREVER)
    elif how == "_exit":
        os._exit(0)
    elif how == "kill":
        os.kill(os.getpid(), 9)


def leave_descriptors(spare: int) -> None:
    """Let this process open only `spare` descriptors more."""
    taken = {int(entry) for entry in os.listdir("/proc/self/fd")}
    free = [number for number in range(4096) if number not in taken or not is_open(number)]
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[spare], hard))


def is_open(number: int) -> bool:
    with contextlib.suppress(OSError):
        os.fstat(number)
        return True
    return False


def run_short(what: str, spare: str) -> None:
    """Rank 1 has few descriptors left when all begin something new."""
    from perseus.process_sets import add_process_set

    barrier()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if RANK == 1:
        leave_descriptors(int(spare))
    try:
        if what == "add_process_set":
            add_process_set([0, 1])
        else:
            reduce_and_check(1, "new", BIG)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    note("passed")
    barrier()


def print_blindly() -> None:
    """Write where a library prints its warnings, whatever is open there, between allreduces."""
    standard = [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]
    for step in range(5):
        for number in (1, 2):
            os.write(number, b"W1129 a library warns\n")
        reduce_and_check(step, "small")
        reduce_and_check(step, "large", 256 * PERIOD)
    note("passed", standard=standard)


def use_many_sets() -> None:
    """Small allreduces, on all streams, of all process sets of two ranks or more."""
    from perseus.process_sets import add_process_set

    sizes = range(2, SIZE)
    sets = [
        add_process_set(ranks)
        for size in sizes
        for ranks in itertools.combinations(range(SIZE), size)
    ]
    for members in sets:
        if RANK not in members.ranks:
            continue
        for number in range(4):
            vector = array.array("f", [1.0]) * PERIOD
            group = members.process_set_id
            synchronize(
                operations.submit(ALLREDUCE, str(number), vector, vector, op=SUM, group=group)
            )
            assert set(vector) == {len(members.ranks)}
    barrier()
    note("passed", descriptors=len(os.listdir("/proc/self/fd")))


def warn_nobody() -> None:
    """Rank 0's standard error is a pipe that nobody reads, and it has to warn of rank 1."""
    if RANK == 0:
        os.set_blocking(2, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(2, b"." * 4096)
        os.set_blocking(2, True)
    barrier()
    if RANK == 1:
        time.sleep(10)  # late for as long as a few warnings take
    reduce_and_check(1, "late")
    note("passed")


def leave(how: str) -> None:
    """Ends right after (or, unfinished, without waiting for) what all ranks agree on."""
    for step in range(50):
        reduce_and_check(step, "small")
    vector = values(RANK, 99, BIG)
    handle = submit(vector, "last")
    if RANK == 1:
        time.sleep(0.5)  # late, so that the others leave while it is not yet done
    if how == "unfinished" and RANK == 0:
        note("passed")
        return
    synchronize(handle)
    check_sum(vector, 99)
    note("passed")


def begin_again(how: str) -> None:
    """The world ends twice, and each time all ranks make a new one in the same process."""
    for epoch in range(3):
        reduce_and_check(epoch, "same.name")
        if epoch == 2:
            break
        if RANK == 1 and how == "shutdown":
            basics.shutdown()
        elif RANK != 1 or how == "stall":
            try:
                if RANK == 1:
                    while failure() is None:
                        time.sleep(0.01)
                allreduce(values(RANK, 1), "lonely")
            except Exception as error:
                note("ended", text=str(error), kind=type(error).__name__)
            basics.init()  # does nothing while the old world is there
            basics.shutdown()
        join()
    note("passed")


SCENARIOS = {
    function.__name__: function
    for function in (
        exchange,
        wait,
        be_late,
        start,
        keep_going,
        keep_pending,
        fork,
        fork_while_synchronizing,
        load_data,
        fail_alone,
        run_short,
        print_blindly,
        use_many_sets,
        warn_nobody,
        leave,
        begin_again,
    )
}


def main() -> None:
    try:
        join()
        SCENARIOS[sys.argv[1]](*sys.argv[3:])
    except Exception as error:
        note("error", kind=type(error).__name__, text=str(error))
        if os.environ.get("FAULTS_RAISE"):
            raise
    except KeyboardInterrupt:
        note("interrupted")
        raise


if __name__ == "__main__":
    main()

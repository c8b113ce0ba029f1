"""perseus.run() calls a function on ranks: it returns what they return, raises what they raise."""

from __future__ import annotations

import errno
import inspect
import os
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from perseusrun_command import alive, environment, eventually

from perseus.run import agent, run

# horovod.run of 0.28.1: names and defaults.
HOROVODS = (
    "func, args=(), kwargs=None, num_proc=1, min_num_proc=None, max_num_proc=None, slots=None, "
    "reset_limit=None, cooldown_range=None, hosts=None, hostfile=None, host_discovery_script=None, "
    "start_timeout=None, ssh_port=None, ssh_identity_file=None, disable_cache=None, "
    "output_filename=None, verbose=None, use_gloo=None, use_mpi=None, mpi_args=None, "
    "network_interface=None, network_interfaces=None, executable=None, np=None, min_np=None, "
    "max_np=None"
)


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment().items():
        monkeypatch.setenv(name, value)


def rank() -> int:
    return int(os.environ["PERSEUS_RANK"])


def elastic_rank(value: str) -> tuple[str, int, int]:
    from perseus import basics

    basics.init()
    return value, basics.rank(), basics.size()


def two_slots() -> dict[str, int]:
    return {"localhost": 2}


def program(tmp_path: Path, code: str) -> list[str]:
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(code), encoding="utf-8")
    return [sys.executable, str(path)]


def output_of(tmp_path: Path, code: str) -> list[str]:
    """What a script prints that runs elsewhere than where it lies."""
    result = subprocess.run(
        program(tmp_path, code),
        capture_output=True, text=True, timeout=300, cwd="/", check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def announce_and_wait(directory: Path) -> None:
    (directory / f"{os.getpid()}.pid").touch()
    time.sleep(600)


def announced(directory: Path) -> list[int]:
    return [int(file.stem) for file in directory.glob("*.pid")]


@pytest.mark.parametrize("ranks", [1, 3])
def test_results_come_in_the_order_of_ranks(ranks: int, tmp_path: Path) -> None:
    offset = 1000

    def work(first: int, second: list[int], *, scale: float) -> tuple[int, float, list[int]]:
        while rank() < ranks - 1 and not (tmp_path / str(rank() + 1)).exists():
            time.sleep(0.01)
        (tmp_path / str(rank())).touch()  # the last rank is done first
        return rank(), offset + first * scale, [*second, rank()]

    found = run(work, (7, [5]), {"scale": 0.5}, num_proc=ranks)
    assert found == [(r, 1003.5, [5, r]) for r in range(ranks)]


def test_ranks_are_one_world() -> None:
    pytest.importorskip("torch")

    def work() -> tuple[list[float], int]:
        import torch

        import perseus.torch.horovod as hvd

        hvd.init()
        values = torch.arange(3.0) + 10.0 ** hvd.rank()
        return hvd.allreduce(values, op=hvd.Sum).tolist(), hvd.size()

    assert run(work, num_proc=2) == [([11.0, 13.0, 15.0], 2)] * 2


def test_large_arguments_and_results_arrive_whole() -> None:
    data = os.urandom(3 << 20)
    found = run(lambda block: bytes([rank()]) + block[::-1], (data,), num_proc=2)
    assert found == [bytes([r]) + data[::-1] for r in range(2)]


def test_function_finds_an_empty_standard_input_and_no_trace_of_the_call() -> None:
    def work() -> tuple[str, list[str]]:
        open_before = sorted(os.listdir("/proc/self/fd"))
        child = subprocess.run(["ls", "/proc/self/fd"], capture_output=True, text=True, check=True)
        assert "PERSEUS_ANSWER_FD" not in os.environ
        assert len(open_before) >= 4
        return sys.stdin.read(), child.stdout.split()

    (text, descriptors), = run(work)  # fmt: skip
    assert text == ""
    assert descriptors[:3] == ["0", "1", "2"] and len(descriptors) == 4  # the last is ls' own


def test_ranks_output_is_printed_with_the_rank(capfd: pytest.CaptureFixture[str]) -> None:
    run(lambda: print("é", rank() * 11), num_proc=2)
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0]<stdout>:é 0", "[1]<stdout>:é 11"]


def test_an_exception_is_raised_here_with_its_ranks_traceback(tmp_path: Path) -> None:
    def work() -> None:
        if rank() == 1:
            while len(announced(tmp_path)) < 1:
                time.sleep(0.01)
            raise LookupError(f"nothing for {rank()}")
        announce_and_wait(tmp_path)

    with pytest.raises(RuntimeError) as raised:
        run(work, num_proc=2)
    lines = str(raised.value).splitlines()
    assert lines[0] == "[run] rank 1 on localhost failed:"
    assert lines[-1] == "LookupError: nothing for 1"
    assert any("in work" in line for line in lines) and not any("_answer" in line for line in lines)
    assert isinstance(raised.value.__cause__, LookupError)
    assert raised.value.__cause__.args == ("nothing for 1",)
    assert not any(alive(pid) for pid in announced(tmp_path))


def test_an_exception_that_nobody_catches_is_shown_once(tmp_path: Path) -> None:
    code = """
        import perseus
        def work():
            raise LookupError("the reason")
        if __name__ == "__main__":
            perseus.run(work, num_proc=1)
    """
    result = subprocess.run(
        program(tmp_path, code), capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr.count("Traceback (most recent call last)") == 1
    assert result.stderr.count(", in work\n") == 1
    assert result.stderr.endswith('raise LookupError("the reason")\nLookupError: the reason\n\n')


def test_a_rank_that_returns_129_ended_no_signal() -> None:
    with pytest.raises(RuntimeError, match="exit code 129 and without a result"):
        run(lambda: os._exit(129))


def test_a_call_needs_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room() -> None:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "TemporaryFile", no_room)
    with agent._file_with(b"the call") as file:
        assert file.read() == b"the call"
    monkeypatch.delattr(os, "memfd_create")  # Python 3.7
    with pytest.raises(FileNotFoundError) as raised:
        agent._file_with(b"the call")
    job = {"command": ["python"], "directory": "/"}
    assert agent._explain(raised.value, job) == "126 python: No usable temporary directory found"


def test_the_rank_that_failed_first_is_named_even_when_it_ends_last(tmp_path: Path) -> None:
    answered = tmp_path / "answered"

    def work() -> None:
        if rank() == 1:
            import atexit

            atexit.register(time.sleep, 600)
            atexit.register(answered.touch)  # comes first
            raise KeyError("the reason")
        while not answered.exists():
            time.sleep(0.01)
        raise OSError("a consequence")

    with pytest.raises(RuntimeError, match="rank 1 on localhost failed") as raised:
        run(work, num_proc=2)
    assert isinstance(raised.value.__cause__, KeyError)


class _UnfriendlyError(Exception):
    """Cannot be made again from its arguments."""

    def __init__(self, text: str, number: int) -> None:
        super().__init__(text)


class _DisguisedError(Exception):
    """Is a str when it arrives."""

    def __reduce__(self) -> tuple[Any, ...]:
        return str, ("disguised",)


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (lambda: os._exit(7), "rank 0 on localhost ended with exit code 7 and without a result"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "exit code 137 and without a result"),
        (lambda: sys.exit(0), r"rank 0 on localhost ended without a result: .* sys\.exit\(\)"),
        (lambda: sys.exit(5), "exit code 5 and without a result"),
        (threading.Lock, "rank 0 on localhost failed:\n.*TypeError: cannot pickle"),
    ],
)
def test_a_rank_without_a_result_is_an_error(work: Callable[[], Any], expected: str) -> None:
    with pytest.raises(RuntimeError, match=f"(?s){expected}"):
        run(work)


def test_a_rank_that_is_ended_while_it_says_why() -> None:
    def work() -> None:
        from perseus.run.agent import ANSWER_VARIABLE
        from perseus.run.function import FAILED

        assert ANSWER_VARIABLE not in os.environ
        pipes = [fd for fd in range(3, 100) if _is_pipe(fd)]
        os.write(pipes[-1], FAILED + b"\x80\x04")
        os._exit(1)

    with pytest.raises(RuntimeError, match=r"rank 0 on localhost failed:\n.it was ended before"):
        run(work)


def _is_pipe(fd: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(fd).st_mode)
    except OSError:
        return False


def test_an_exception_that_cannot_travel_arrives_as_text() -> None:
    def holds_a_lock() -> None:
        raise ValueError("locked", threading.Lock())

    def unfriendly() -> None:
        raise _UnfriendlyError("text", 3)

    def disguised() -> None:
        raise _DisguisedError("text")

    for work, text in (
        (holds_a_lock, "ValueError: ('locked'"),
        (unfriendly, "_UnfriendlyError: text"),
        (disguised, "_DisguisedError: text"),
    ):
        with pytest.raises(RuntimeError) as raised:
            run(work)
        assert text in str(raised.value) and raised.value.__cause__ is None


@pytest.mark.parametrize(
    ("number", "ending"), [(signal.SIGINT, "KeyboardInterrupt"), (signal.SIGTERM, "handled 15")]
)
def test_signals_end_the_ranks_and_reach_the_caller(
    tmp_path: Path, number: int, ending: str
) -> None:
    code = f"""
        import os, pathlib, signal, time
        import perseus
        def work():
            pathlib.Path({str(tmp_path)!r}, f"{{os.getpid()}}.pid").touch()
            time.sleep(600)
        def handle(number, frame):
            print("handled", number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, handle)
        try:
            perseus.run(work, num_proc=2)
        except (KeyboardInterrupt, RuntimeError) as error:
            print(type(error).__name__)
        assert signal.getsignal(signal.SIGTERM) is handle
    """
    process = subprocess.Popen(program(tmp_path, code), stdout=subprocess.PIPE, text=True)
    try:
        assert eventually(lambda: len(announced(tmp_path)) == 2)
        ranks = announced(tmp_path)
        process.send_signal(number)
        output, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert ending in output.splitlines(), output
    assert process.returncode == 0
    assert not any(alive(pid) for pid in ranks)


def test_nothing_stays_behind_in_the_caller(tmp_path: Path) -> None:
    run(rank)  # what is loaded once
    before = sorted(os.listdir("/proc/self/fd")), dict(os.environ), signal.set_wakeup_fd(-1)
    handler = signal.getsignal(signal.SIGINT)
    run(rank, num_proc=2, start_timeout=50)
    with pytest.raises(RuntimeError):
        run(lambda: 1 // 0)
    with pytest.raises(RuntimeError, match=r"\[run\] /no/python: command not found"):
        run(rank, executable="/no/python")
    after = sorted(os.listdir("/proc/self/fd")), dict(os.environ), signal.set_wakeup_fd(-1)
    assert before == after
    assert signal.getsignal(signal.SIGINT) is handler


def test_threads_may_run_too() -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(run(rank, num_proc=2)))
    thread.start()
    thread.join(300)
    assert found == [[0, 1]]


@pytest.mark.parametrize(
    "name",
    ["max_num_proc", "slots", "reset_limit", "cooldown_range"],
)
def test_elastic_arguments_alone_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is for elastic jobs: give --min-np"):
        run(rank, **{name: 1})


@pytest.mark.parametrize("elastic", [{"min_num_proc": 1}, {"host_discovery_script": two_slots}])
def test_an_elastic_job_returns_the_results_of_the_last_world(elastic: dict[str, Any]) -> None:
    results = run(elastic_rank, ("x",), num_proc=2, **elastic)
    assert results == [("x", 0, 2), ("x", 1, 2)]


def test_the_exception_of_an_elastic_jobs_first_failure_is_raised() -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        run(lambda: 1 / 0, num_proc=2, min_num_proc=1)


@pytest.mark.parametrize(
    ("arguments", "kind", "expected"),
    [
        ({"use_mpi": True}, NotImplementedError, "use_mpi: Perseus starts the ranks by itself"),
        ({"mpi_args": "-x A"}, NotImplementedError, "mpi_args: Perseus starts"),
        ({"use_mpi": True, "use_gloo": True}, ValueError, "use_gloo and use_mpi"),
        ({"hosts": "a:1", "hostfile": "b"}, ValueError, "hosts and hostfile"),
        ({"num_proc": 0}, ValueError, "num_proc=0: expected 1 or more"),
        ({"hosts": "localhost:1", "num_proc": 2}, ValueError, "Requested more processes"),
        ({"hosts": "a b:1"}, ValueError, "Invalid host input"),
        ({"network_interfaces": ["none0"]}, RuntimeError, "none0"),
    ],
)
def test_arguments_that_do_not_fit(
    arguments: dict[str, Any], kind: type[Exception], expected: str
) -> None:
    with pytest.raises(kind, match=expected):
        run(rank, **arguments)


def test_variables_that_make_no_sense_are_a_value_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "soon")
    with pytest.raises(ValueError, match="HOROVOD_CYCLE_TIME"):
        run(rank)


def test_old_names_of_arguments_work_and_warn() -> None:
    with pytest.warns(DeprecationWarning, match="use num_proc"):
        assert run(rank, np=2) == [0, 1]
    with pytest.warns(DeprecationWarning, match="use network_interfaces"):
        found = run(lambda: os.environ["PERSEUS_GLOO_NETWORK_INTERFACE"], network_interface="lo")
    assert found == ["lo"]


def test_output_also_goes_to_files(tmp_path: Path) -> None:
    run(lambda: print("here", rank()), num_proc=2, output_filename=str(tmp_path))
    assert (tmp_path / "rank.1" / "stdout").read_text() == "[1]<stdout>:here 1\n"


def test_parameters_are_horovods() -> None:
    expected = [entry.partition("=") for entry in HOROVODS.split(", ")]
    actual = inspect.signature(run).parameters.values()
    assert [parameter.name for parameter in actual] == [name for name, _, _ in expected]
    for parameter, (_, given, default) in zip(actual, expected, strict=True):
        assert parameter.default == (eval(default) if given else inspect.Parameter.empty)


def test_the_package_is_the_function_wherever_it_was_imported_first(tmp_path: Path) -> None:
    import perseus.run.cli

    assert perseus.run(rank) == [0] == perseus.run.run(rank)
    assert perseus.run.cli.main is not None
    code = """
        import sys
        import perseus
        assert "perseus.run" not in sys.modules
        import neighbour
        if __name__ == "__main__":
            from perseus import run
            print(run(neighbour.answer, (4,)), run(lambda: neighbour.answer(5)))
    """
    (tmp_path / "neighbour.py").write_text("def answer(x): return 10 * x\n")
    assert output_of(tmp_path, code) == ["[40] [50]"]


def test_under_horovods_name_the_ranks_find_perseus_as_horovod_too(tmp_path: Path) -> None:
    code = """
        import perseus.compat.horovod
        import horovod, horovod.runner
        from horovod.runner import run
        assert horovod.run is horovod.runner.run is run
        def work(x):
            import horovod
            from horovod.common.basics import HorovodBasics
            return x, horovod.__version__, HorovodBasics.__module__
        if __name__ == "__main__":
            print(horovod.run(work, args=(3,), num_proc=2))
    """
    expected = [(3, "0.28.1", "perseus.compat.common.basics")] * 2
    assert output_of(tmp_path, code) == [str(expected)]
    if find_spec("horovod") is None:
        message = "(?s)No module named 'horovod'.*python -m perseus.compat.horovod"
        with pytest.raises(RuntimeError, match=message):
            run(lambda: __import__("horovod"))

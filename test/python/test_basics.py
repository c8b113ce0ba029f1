"""Importing, identity and configuration of a process that no launcher started."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from perseus import basics, config, errors

ROOT = Path(__file__).parent.parent.parent
GAVE_UP = (
    "[rendezvous] world 2 did not begin: [tcp] interrupted while connecting; "
    "rank 1 has given up this start: why"
)


@pytest.fixture
def world():
    basics.init()
    yield
    basics.shutdown()


def _python(code: str, **environment: str) -> str:
    import os

    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_loads_no_framework_and_no_native_code():
    code = (
        "import perseus, sys; "
        "print([m for m in ('torch', 'numpy', 'perseus._core') if m in sys.modules])"
    )
    assert _python(code) == "[]"


def test_import_leaves_hooks_and_environment_alone_but_for_the_one_that_waits_for_ddp():
    code = (
        "import sys, os; state = lambda: (list(sys.meta_path), dict(os.environ)); "
        "before = state(); import perseus; finders, environment = state(); "
        "print(type(finders[0]).__module__, before == (finders[1:], environment))"
    )
    assert _python(code) == "perseus.ddp True"


@pytest.mark.parametrize("has_begun", [False, True])
def test_only_a_new_rank_of_an_elastic_job_ends_when_its_settings_differ_from_others(
    monkeypatch: pytest.MonkeyPatch, has_begun: bool
):
    """Those that have trained go on without it."""
    faults, outcomes = [], iter([ValueError("other settings"), RuntimeError(GAVE_UP), None])
    member = SimpleNamespace(has_begun=has_begun, is_at_fault=None, tell_begun=lambda: None)

    def join(_: object) -> SimpleNamespace:
        faults.append(member.is_at_fault)
        return SimpleNamespace(epoch=len(faults))

    def connect(*_: object) -> None:
        if (outcome := next(outcomes)) is not None:
            raise outcome

    monkeypatch.setattr(basics, "membership", lambda: member)
    monkeypatch.setattr(basics, "_place_of", join)
    monkeypatch.setattr(basics, "_rendezvous", lambda _: None)
    monkeypatch.setattr(basics, "_connect", connect)
    monkeypatch.setattr(basics, "_enter", lambda *_: None)
    monkeypatch.setattr(basics._world, "epoch", 0)
    if has_begun:
        basics.init()
        assert faults == [None, True, False]
    else:
        with pytest.raises(errors.InitializationError, match="other settings"):
            basics.init()
        assert faults == [None]


def test_version_is_the_builds():
    import perseus
    from perseus import _core

    assert perseus.__version__ == _core.version()
    with pytest.raises(AttributeError, match="no_such_thing"):
        perseus.no_such_thing  # noqa: B018


def test_before_init_everything_says_so():
    assert not basics.is_initialized()
    for question in (
        basics.rank,
        basics.size,
        basics.local_rank,
        basics.local_size,
        basics.cross_rank,
        basics.cross_size,
        basics.is_homogeneous,
        basics.stats,
        basics.mpi_threads_supported,
    ):
        with pytest.raises(
            ValueError, match=r"Horovod has not been initialized; use hvd\.init\(\)\."
        ):
            question()
    assert not basics.gloo_enabled()
    basics.shutdown()  # nothing to do


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def test_without_a_launcher_the_world_is_this_process(world):
    assert (basics.rank(), basics.size()) == (0, 1)
    assert (basics.local_rank(), basics.local_size()) == (0, 1)
    assert (basics.cross_rank(), basics.cross_size()) == (0, 1)
    assert basics.is_homogeneous()
    assert basics.gloo_built() and basics.gloo_enabled()
    assert basics.nccl_built() == 0 and type(basics.nccl_built()) is int
    for built in ("mpi_built", "mpi_enabled", "ddl_built", "ccl_built", "rocm_built"):
        assert getattr(basics, built)() is False
    assert basics.cuda_built() is _has_driver()
    with pytest.raises(ValueError, match="Horovod MPI is not enabled"):
        basics.mpi_threads_supported()


def test_init_twice_is_one_world(world):
    basics.init()
    assert basics.size() == 1


def test_sets_that_init_makes_dynamic_stay_so_without_a_word_in_the_environment():
    code = """
import os
from perseus import basics, process_sets

def refusal():
    try:
        process_sets.add_process_set([0])
    except ValueError as error:
        return str(error).split(":")[0].split(" (")[0]

before = dict(os.environ)
basics.init()
print(refusal())
for sets in ("Dynamic", None):
    basics.shutdown()
    basics.init(process_sets=sets)
    print(refusal())
print(os.environ == before)
"""
    assert _python(code).splitlines() == [
        "Dynamic process sets are disabled",
        "Attempted to add a duplicate process set",
        "Attempted to add a duplicate process set",
        "True",
    ]


def test_communicators_of_old_scripts():
    basics.init(comm=[0])
    basics.shutdown()
    basics.init([])
    basics.shutdown()
    with pytest.raises(ValueError, match="use process sets for subsets of ranks"):
        basics.init(comm=[0, 1])
    assert not basics.is_initialized()


@pytest.mark.parametrize(
    ("reason", "text"), [("\udcff", "?"), ("\N{SNOWMAN}", "\N{SNOWMAN}"), (ValueError("x"), "x")]
)
def test_any_reason_ends_the_world(world, reason, text):
    basics.abort(reason)
    assert basics.world_failure() == f"rank 0 called abort(): {text}"


def test_a_bad_variable_fails_init_with_its_name(monkeypatch):
    monkeypatch.setenv("PERSEUS_ALLREDUCE_STREAMS", "many")
    with pytest.raises(ValueError, match="Horovod initialization failed") as caught:
        basics.init()
    assert isinstance(caught.value, errors.HorovodInternalError)
    assert "PERSEUS_ALLREDUCE_STREAMS='many'" in str(caught.value)
    assert not basics.is_initialized()


def test_half_an_identity_fails_init(monkeypatch):
    monkeypatch.setenv("HOROVOD_RANK", "3")
    with pytest.raises(ValueError, match="HOROVOD_RANK"):
        basics.init()


def test_ranks_that_do_not_come_are_named(monkeypatch):
    from perseus import _core

    server = _core.StoreServer("127.0.0.1", 0, False, b"s" * 32)
    for name, value in {
        "PERSEUS_RANK": "0",
        "PERSEUS_SIZE": "3",
        "PERSEUS_RENDEZVOUS_ADDR": "127.0.0.1",
        "PERSEUS_RENDEZVOUS_PORT": str(server.port),
        "PERSEUS_SECRET": "s" * 32,
        "HOROVOD_START_TIMEOUT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(errors.InitializationError, match=r"(?s)rank.*1.*2"):
        basics.init()
    server.close()


def test_ctrl_c_ends_init():
    code = """
import os, signal, threading, time
from perseus import _core, basics
server = _core.StoreServer("127.0.0.1", 0, False, b"s" * 32)
os.environ.update(PERSEUS_RANK="0", PERSEUS_SIZE="2", PERSEUS_RENDEZVOUS_ADDR="127.0.0.1",
                  PERSEUS_RENDEZVOUS_PORT=str(server.port), PERSEUS_SECRET="s" * 32)
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
start = time.monotonic()
try:
    basics.init()
except KeyboardInterrupt:
    print(0.3 < time.monotonic() - start < 20)
"""
    assert _python(code) == "True"


def test_statistics_count(world):
    import perseus

    assert set(perseus.stats()) == {
        "shm_bytes_sent",
        "tcp_bytes_sent",
        "shm_bytes_received",
        "tcp_bytes_received",
        "rounds",
        "buckets",
        "operations",
        "sleeps",
        "staging_bytes",
        "messages",
    }


def test_the_configuration_table_is_the_cores():
    table = {variable.name: variable for variable in config.variables()}
    streams = table["PERSEUS_ALLREDUCE_STREAMS"]
    assert (streams.type, streams.default, streams.allowed) == ("int", "4", "1..12")
    assert "HOROVOD_NUM_NCCL_STREAMS" in streams.aliases
    assert all(variable.help for variable in table.values())


def test_configuration_check_names_variable_and_value(monkeypatch):
    config.check()
    monkeypatch.setenv("PERSEUS_TRANSPORT", "pigeon")
    with pytest.raises(
        errors.InvalidArgumentError, match=r"PERSEUS_TRANSPORT='pigeon'.*auto\|shm\|tcp"
    ):
        config.check()


def test_errors_are_what_horovod_users_catch():
    for kind in (
        errors.MismatchError,
        errors.TransportError,
        errors.DeadlineError,
        errors.AbortedError,
        errors.InitializationError,
    ):
        assert issubclass(kind, errors.HorovodInternalError)
    assert issubclass(errors.HorovodInternalError, RuntimeError)
    assert issubclass(errors.InvalidArgumentError, ValueError)
    assert errors.HostsUpdatedInterrupt(True).skip_sync is True
    assert errors.HostsUpdatedInterrupt().skip_sync is False

"""The variables about ranks, links, buckets and clocks; others are in mx_setting_checks."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
from pathlib import Path

import gradient_settings as settings
import mxnet as mx
from mx_values import assert_equal, everyone, mine, raised, usable
from worlds import world_with

import perseus
import perseus.mxnet as hvd
from perseus import basics, control
from perseus.errors import InitializationError
from perseus.gradients.plan import Plan
from perseus.mxnet.reducer import GradientReducer

TCP = {"PERSEUS_TRANSPORT": "tcp", "PERSEUS_GLOO_NETWORK_INTERFACE": "lo"}
COUNT, ELEMENTS, STEPS = 8, 1024, 6


def _steps(count: int = STEPS, *, together: bool = True) -> int:
    """Reduce eight gradients of 4 KiB in some steps; the buckets that this took, but for a few.

    Counting may be some operations late.
    """
    reducer = GradientReducer(Plan(op=hvd.Sum))
    before = perseus.stats()["buckets"]
    for step in range(count):
        gradients = [mine((ELEMENTS,), salt=step + index) for index in range(COUNT)]
        names = [f"gradient{index}" for index in range(COUNT)]
        reducer(gradients, names, None, [tuple(range(COUNT))] if together else None)
        for index, gradient in enumerate(gradients):
            assert_equal(gradient, everyone((ELEMENTS,), step + index).sum(axis=0))
    return perseus.stats()["buckets"] - before


def check_buckets_are_as_large_as_they_are_told_to_be() -> None:
    """PERSEUS_ALLREDUCE_FUSION and TIACC_TRAINING_FUSION_THRESHOLD."""
    for variables in (
        {"TIACC_TRAINING_FUSION_THRESHOLD": 4 * ELEMENTS},
        {"PERSEUS_ALLREDUCE_FUSION": COUNT},
    ):
        with world_with(**variables):
            assert _steps() > COUNT * (STEPS - 2), variables
    for variables in (
        {"TIACC_TRAINING_FUSION_THRESHOLD": 4 * ELEMENTS * COUNT},
        {"PERSEUS_ALLREDUCE_FUSION": 1},
    ):
        with world_with(**variables):
            assert _steps() < COUNT * 2, variables


def _sockets() -> int:
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            found += os.readlink(link).startswith("socket:")
        except FileNotFoundError:  # that of the folder
            continue
    return found


def check_every_stream_has_a_connection() -> None:
    """PERSEUS_ALLREDUCE_STREAMS, TIACC_TRAINING_NUM_NCCL_STREAMS; over the named interface."""
    found = {}
    for name in ("PERSEUS_ALLREDUCE_STREAMS", "TIACC_TRAINING_NUM_NCCL_STREAMS"):
        for streams in (1, 3):
            with world_with(HOROVOD_AUTOTUNE=0, **TCP, **{name: streams}):
                _steps(2, together=False)
                found[name, streams] = _sockets()
                assert perseus.stats()["tcp_bytes_sent"] > 0
        assert found[name, 3] - found[name, 1] == 2, found


def check_the_stream_tuner_can_be_switched_off() -> None:
    """PERSEUS_ALLREDUCE_DISABLE_STREAM_TUNING: which numbers of streams were tried."""
    tried = []
    for disabled in (0, 1):
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "tuner.csv"  # rank 0 alone writes one
            with world_with(
                HOROVOD_AUTOTUNE=1, HOROVOD_AUTOTUNE_LOG=log,
                PERSEUS_ALLREDUCE_DISABLE_STREAM_TUNING=disabled, **TCP,
            ):  # fmt: skip
                _steps(30)
            if hvd.rank() == 0:
                rows = [line.split(",") for line in log.read_text().splitlines()]
                column = rows[0].index("streams")
                tried.append({row[column] for row in rows[1:]})
    if hvd.rank() == 0:
        assert len(tried[0]) > 1 and len(tried[1]) == 1, tried


def check_what_starts_with_a_wrong_value_says_so() -> None:
    """PERSEUS_GLOO_NETWORK_INTERFACE, by its other name too; STREAMS, GLOO_TIMEOUT_SECONDS."""
    hvd.shutdown()
    for name, value, words in (
        ("PERSEUS_GLOO_NETWORK_INTERFACE", "nope0", "_INTERFACE names 'nope0', which does not"),
        ("PERSEUS_NCCL_NETWORK_INTERFACE", "nope1", "_INTERFACE names 'nope1', which does not"),
        ("PERSEUS_ALLREDUCE_STREAMS", "13", "PERSEUS_ALLREDUCE_STREAMS='13': expected a whole"),
        ("GLOO_TIMEOUT_SECONDS", "soon", "GLOO_TIMEOUT_SECONDS='soon': expected a whole number"),
        ("LIGHT_INTRA_SIZE", "0", "LIGHT_INTRA_SIZE='0': expected a whole number 1.."),
    ):
        os.environ |= {name: value, "PERSEUS_TRANSPORT": "tcp"}
        message = raised(InitializationError, hvd.create)
        assert words in message, message
        del os.environ[name], os.environ["PERSEUS_TRANSPORT"]
    hvd.init()
    usable()


def check_two_kinds_of_link_are_asked_for_by_their_names() -> None:
    """PERSEUS_NCCL_ENABLE alone says what to do; with names it is silent (nothing goes by TCP)."""
    for variables, says in (
        ({}, True),
        ({"PERSEUS_GLOO_NETWORK_INTERFACE": "lo,lo"}, True),
        ({"PERSEUS_GLOO_NETWORK_INTERFACE": "lo,eth0"}, False),
    ):
        with settings.captured_stderr() as text:
            with world_with(PERSEUS_NCCL_ENABLE=1, **variables):
                _steps(2)
            written = text()
        said = "PERSEUS_NCCL_ENABLE" in written
        assert said == (says and hvd.rank() == 0), written


def check_a_rank_that_gives_no_sign_of_life_is_given_up() -> None:
    """GLOO_TIMEOUT_SECONDS; rank 1 is stopped meanwhile."""
    hvd.shutdown()
    os.environ["GLOO_TIMEOUT_SECONDS"] = "4"
    hvd.init()
    pids = hvd.allgather_object(os.getpid())
    _steps(2)
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    message = raised(mx.MXNetError, lambda: _steps(1))
    if hvd.rank() == 0:
        assert "no sign of life from rank 1" in message, message
        os.kill(pids[1], signal.SIGCONT)
    del os.environ["GLOO_TIMEOUT_SECONDS"]
    hvd.shutdown()
    hvd.init()
    usable()


def check_ranks_of_torchs_launcher_meet_at_a_port() -> None:
    """PERSEUS_MASTER_PORT; PERSEUS_USE_DDP_LAUNCHER changes nothing for a KVStore."""
    place, before = (hvd.rank(), hvd.size()), dict(os.environ)
    for says in ("", "0", "1"):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = int(control.gather_lines(str(free.getsockname()[1]), "port")[0])
        control.barrier()
        hvd.shutdown()
        for name in before:
            if name.startswith(("PERSEUS_", "HOROVOD_")) and name != "PERSEUS_SECRET":
                os.environ.pop(name, None)
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        places = map(str, (*place, *place))
        os.environ |= dict(zip(names, places, strict=True))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        os.environ |= {"PERSEUS_MASTER_PORT": str(port), "PERSEUS_USE_DDP_LAUNCHER": says}
        store = hvd.create()
        assert (store.rank, store.num_workers, store.local_rank) == (*place, place[0])
        assert basics._world.met[0].launcher == "torch"
        assert basics._world.met[1].port == port
        usable()
        control.barrier()
        hvd.shutdown()
        os.environ.clear()
        os.environ.update(before)
        hvd.init()
    usable()

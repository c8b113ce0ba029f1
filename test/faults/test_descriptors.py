"""Processes that run out of descriptors: an error that says so on every rank, or none at all."""

from __future__ import annotations

import subprocess
import sys

import pytest
from live_ranks import PATIENCE, SECRET, Ranks, clean_environment

SETTINGS = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1", "GLOO_TIMEOUT_SECONDS": "60"}


@pytest.mark.parametrize(
    ("transport", "what"),
    [("shm", "allreduce"), ("shm", "add_process_set"), ("tcp", "allreduce")],
)
def test_shortage_is_named_on_every_rank(tmp_path, transport, what):
    words = ["run_short", what, "0"]
    with Ranks(tmp_path, words, 3, PERSEUS_TRANSPORT=transport, **SETTINGS) as ranks:
        for rank in range(3):
            text = ranks.note(rank, "error")["text"]
            assert "Too many open files: this process has opened all of the " in text, text
            assert "descriptors that its limit allows" in text
            assert "`ulimit -n`" in text
            assert "memory limit" not in text
            assert ranks.finish(rank) == 0


@pytest.mark.parametrize("what", ["allreduce", "add_process_set"])
@pytest.mark.parametrize("spare", [1, 2])
def test_one_descriptor_is_enough_for_links_inside_a_host(tmp_path, what, spare):
    words = ["run_short", what, str(spare)]
    with Ranks(tmp_path, words, 3, PERSEUS_TRANSPORT="shm", **SETTINGS) as ranks:
        ranks.all_note("passed")
        assert [ranks.finish(rank) for rank in range(3)] == [0, 0, 0]


def test_soft_limit_is_raised_at_the_start(tmp_path):
    with Ranks(tmp_path, ["start"], 3, start=False, PERSEUS_TRANSPORT="tcp") as ranks:
        for rank in range(3):
            ranks.start(rank, ["prlimit", "--nofile=40:4096"])
        ranks.all_note("passed")
        assert [ranks.finish(rank) for rank in range(3)] == [0, 0, 0]
        assert [ranks.output(rank) for rank in range(3)] == ["", "", ""]
        limits = [ranks.note(rank, "joined")["descriptors"] for rank in range(3)]
        assert all(40 < limit < 4096 for limit in limits), limits


def test_process_sets_raise_it_for_their_connections(tmp_path):
    size = 5
    environment = SETTINGS | {"PERSEUS_TRANSPORT": "tcp"}
    with Ranks(tmp_path, ["use_many_sets"], size, start=False, **environment) as ranks:
        for rank in range(size):
            ranks.start(rank, ["prlimit", "--nofile=40:4096"])
        ranks.all_note("passed")
        assert [ranks.finish(rank) for rank in range(size)] == [0] * size
        for rank in range(size):
            joined, passed = (
                ranks.note(rank, event)["descriptors"] for event in ("joined", "passed")
            )
            assert passed > joined, "what the start makes room for is enough: nothing was tested"


def test_hard_limit_that_is_too_low_is_said_once(tmp_path):
    with Ranks(tmp_path, ["start"], 3, start=False, PERSEUS_TRANSPORT="tcp") as ranks:
        for rank in range(3):
            ranks.start(rank, ["prlimit", "--nofile=60:60"])
        ranks.all_note("passed")
        assert [ranks.finish(rank) for rank in range(3)] == [0, 0, 0]
        said = "".join(ranks.output(rank) for rank in range(3))
        assert said.count("descriptors are needed, and the hard limit of this process is 60") == 1


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_what_is_printed_where_nothing_was_open_reaches_no_link(tmp_path, transport):
    with Ranks(tmp_path, ["print_blindly"], 3, start=False, PERSEUS_TRANSPORT=transport) as ranks:
        for rank in range(3):
            ranks.start(rank, ["sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-'])
        for rank in range(3):
            assert ranks.note(rank, "passed")["standard"] == ["/dev/null"] * 3
            assert ranks.finish(rank) == 0


SERVING = """
import os
from perseus import _core

os.close(0)
os.close(2)
server = _core.StoreServer("127.0.0.1", 0, False, b"0123456789abcdef" * 2)
print(*[os.readlink(f"/proc/self/fd/{number}") for number in (0, 2)])
server.close()
"""


def test_what_is_printed_where_nothing_was_open_does_not_reach_the_store():
    done = subprocess.run([sys.executable, "-c", SERVING], capture_output=True, text=True)
    assert done.stdout.split() == ["/dev/null"] * 2


# As a user to whom the kernel's limit applies: root may pass as many as it likes. What is imported
# later, this user may not be able to read.
AS_A_USER = """
import encodings.idna, os, resource, sys
import perseus.errors
from perseus import _core

rank, size, port, soft, hard = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
if os.getuid() == 0:
    try:
        os.setgid(65534)
        os.setuid(65534)
    except OSError as error:
        sys.exit(f"cannot become another user: {error}")
context = _core.Context(
    rank=rank, size=size, store_host="127.0.0.1", store_port=port, secret=b"0123456789abcdef" * 2,
    overrides=["PERSEUS_TRANSPORT=shm", "HOROVOD_START_TIMEOUT=60", "PERSEUS_LOG_LEVEL=error"],
)
print(context.transport((rank + 1) % size), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
context.close()
"""


@pytest.mark.parametrize(("soft", "hard"), [(100, 100), (100, 4096)])
def test_descriptors_on_their_way_wait_for_each_other(soft, hard):
    from perseus._core import StoreServer

    size = 16
    assert size * (size - 1) > soft, "what may be on its way at once"
    server = StoreServer("127.0.0.1", 0, False, SECRET.encode())
    words = [str(word) for word in (size, server.port, soft, hard)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", AS_A_USER, str(rank), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=clean_environment(),
            text=True,
        )
        for rank in range(size)
    ]
    said = [rank.communicate(timeout=2 * PATIENCE)[0] for rank in ranks]
    server.close()
    if any("cannot become another user" in text for text in said):
        pytest.skip(f"the limit is not root's: {said[0]}")
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(said)
    limits = [int(text.removeprefix("shm ")) for text in said]
    if hard == soft:
        assert limits == [hard] * size
    else:
        assert all(size * (size - 1) < limit < hard for limit in limits)

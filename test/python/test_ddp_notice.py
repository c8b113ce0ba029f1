"""`import perseus` above a script for torch.distributed says that it does nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")

NOTICE = "`import perseus` does not change torch.distributed yet"
GROUP = """
import torch.distributed as dist
for times in range(2):
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank={rank}, world_size={size})
    dist.destroy_process_group()
"""


def said(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
    )
    return done.stderr


@pytest.mark.parametrize("first", ["import perseus, torch", "import torch.distributed, perseus"])
def test_a_script_without_perseus_is_told_once(first):
    assert said(first + GROUP.format(rank=0, size=1)).count(NOTICE) == 1


def test_other_ranks_are_silent():
    program = """
import perseus, threading, torch.distributed as dist
dist.get_rank = lambda: 1
"""
    assert NOTICE not in said(program + GROUP.format(rank=0, size=1))


@pytest.mark.parametrize(
    "first",
    [
        "import perseus.torch.horovod as hvd; hvd.init()",
        "import perseus; from perseus import basics; basics.init()",
        "import torch",
    ],
)
def test_a_script_that_uses_perseus_is_not_told(first):
    assert NOTICE not in said(first + GROUP.format(rank=0, size=1))


def test_the_import_loads_no_framework_and_changes_no_result():
    program = """
import sys, perseus
assert not {"torch", "tensorflow", "mxnet", "keras", "perseus._core"} & set(sys.modules)
import torch.distributed as dist
assert dist.init_process_group.__name__ == "init_process_group"
try:
    dist.init_process_group("no such backend", store=dist.HashStore(), rank=0, world_size=1)
except Exception as error:
    print(repr(error), file=sys.stderr)
"""
    found = said(program)
    assert NOTICE not in found
    assert "backend" in found

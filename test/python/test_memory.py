"""What is freed is there for the next step, without page faults."""

from __future__ import annotations

import pytest
from freed_memory import GIVEN_BACK, KEPT, page_faults

KEEP = """
from perseus import basics, memory
basics.init()
memory.keep_freed_memory()
"""
TRAIN = """
import torch
import perseus.torch.horovod as hvd
hvd.init()
model = torch.nn.Linear(2, 2)
hvd.DistributedOptimizer(torch.optim.SGD(model.parameters()), model.named_parameters())
"""


def test_without_it_memory_is_given_back():
    assert page_faults("") in GIVEN_BACK


def test_freed_memory_is_kept():
    assert page_faults(KEEP) in KEPT


@pytest.mark.parametrize(("value", "faults"), [("1", KEPT), ("off", GIVEN_BACK)])
def test_a_variable_decides_whether_it_is_kept(value, faults):
    assert page_faults(KEEP, PERSEUS_KEEP_FREED_MEMORY=value) in faults


def test_a_later_world_may_decide_to_keep_it():
    later = "os.environ['PERSEUS_KEEP_FREED_MEMORY'] = '1'"
    again = f"import os\n{KEEP}\nbasics.shutdown()\n{later}\n{KEEP}"
    assert page_faults(again, PERSEUS_KEEP_FREED_MEMORY="0") in KEPT


def test_a_distributed_optimizer_keeps_it():
    pytest.importorskip("torch")
    # So that there is something to do for a rank that is alone.
    settings = {"PERSEUS_ACCUMULATE_N_STEPS": "2"}
    assert page_faults(TRAIN, **settings) in KEPT
    assert page_faults(TRAIN, PERSEUS_KEEP_FREED_MEMORY="0", **settings) in GIVEN_BACK


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MALLOC_TRIM_THRESHOLD_", "131072"),
        ("MALLOC_MMAP_THRESHOLD_", "131072"),
        ("MALLOC_MMAP_MAX_", "65536"),
        ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=131072"),
    ],
)
def test_what_the_user_says_of_malloc_holds(name, value):
    assert page_faults(KEEP, **{name: value}) in GIVEN_BACK

"""What is freed is there for the next step, without page faults."""

from __future__ import annotations

import pytest
from freed_memory import GIVEN_BACK, KEPT, page_faults

KEEP = "from perseus.memory import keep_freed_memory; keep_freed_memory()"
TRAIN = """
import torch
import perseus.torch.horovod as hvd
hvd.init()
model = torch.nn.Linear(2, 2)
hvd.DistributedOptimizer(torch.optim.SGD(model.parameters()), model.named_parameters())
"""


def test_without_it_memory_is_given_back():
    least, most = GIVEN_BACK
    assert least < page_faults("") < most


def test_freed_memory_is_kept():
    least, most = KEPT
    assert least < page_faults(KEEP) < most


def test_a_distributed_optimizer_keeps_it():
    pytest.importorskip("torch")
    least, most = KEPT
    # So that there is something to do for a rank that is alone.
    assert least < page_faults(TRAIN, PERSEUS_ACCUMULATE_N_STEPS="2") < most


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
    least, most = GIVEN_BACK
    assert least < page_faults(KEEP, **{name: value}) < most

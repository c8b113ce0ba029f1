"""PyTorch's own tests of torch.distributed on gloo, which its wheel contains, on this backend.

Four ranks run each. Those of them that need GPUs or other backends are skipped, as on gloo.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import shutil
import tempfile
from pathlib import Path

import pytest

if not os.environ.get("PERSEUS_TEST_FULL"):
    pytest.skip("importing these tests alone takes 10 s: make test-all", allow_module_level=True)

_FOLDER = Path(tempfile.mkdtemp())
atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)
for _each in ("barrier", "test_dir"):
    (_FOLDER / _each).mkdir()
os.environ.update(BACKEND="gloo", WORLD_SIZE="4", TEMP_DIR=str(_FOLDER))
os.environ.setdefault("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "120")

import perseus  # noqa: F401  - takes the place of gloo

pytest.importorskip("expecttest", reason="PyTorch's tests need it, and PyTorch does not install it")
from torch.testing._internal.distributed import distributed_test


class TestTorchOwn(
    distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase
):
    """See above."""

    def setUp(self) -> None:
        """Start the ranks by fork: each would import these tests anew by spawn."""
        super().setUp()
        self._start_processes(multiprocessing.get_context("fork").Process)


# What Perseus does otherwise on purpose.
for _name in (
    "test_get_backend",  # "perseus"
    # The message is Horovod's, and says "(timeout= of init_process_group or new_group)".
    "test_barrier_timeout_full_group",
    "test_monitored_barrier_gloo",  # all ranks name the missing one, not rank 0 alone
    "test_monitored_barrier_gloo_rank_0_timeout",  # names the ranks that are missing, not rank 0
):
    setattr(TestTorchOwn, _name, None)

"""The checks of test/parallel/checks on 2 or 3 real ranks, on 2, 3 and 4 where all is tested."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from ranks.launch import checks_of
from slow_tests import OTHER_HALF

MODULES = [
    "collective_checks",
    "form_checks",
    "mismatch_checks",
    "autograd_checks",
    "optimizer_checks",
    "optimizer_state_checks",
    "gradient_scaler_checks",
    "master_weights_checks",
    "gradient_memory_checks",
    "sparse_checks",
    "state_checks",
    "compiled_checks",
    "sync_batch_norm_checks",
    "process_set_checks",
    "set_form_checks",
    "join_checks",
    "adasum_checks",
    "sharded_checks",
    "multistep_checks",
    "parameter_checks",
    "compression_checks",
    "powersgd_checks",
    "lossless_checks",
    "rotation_checks",
    "rotation_life_checks",
    "local_steps_checks",
    "local_steps_state_checks",
    "timeline_checks",
    "elastic_checks",
    "feeding_checks",
    "schedule_checks",
    "bench_checks",
    "c10d_checks",
    "c10d_group_checks",
    "c10d_pending_checks",
    "ddp_checks",
    "ddp_hooks_checks",
    "ddp_forms_checks",
    "ddp_gradient_checks",
    "ddp_rate_checks",
    "ddp_rotation_checks",
    "point_to_point_checks",
]
CASES = [
    pytest.param(
        module, check, id=f"{module.removesuffix('_checks')}-{check.removeprefix('check_')}"
    )
    for module in MODULES
    for check in checks_of(module)
]


# Their subjects are interfaces of PyTorch, which its versions change. The others' are those of the
# core, for which a tensor is a place in memory: one version will do.
OF_PYTORCH = {
    "autograd_checks",
    "c10d_checks",
    "c10d_group_checks",
    "c10d_pending_checks",
    "collective_checks",
    "compiled_checks",
    "ddp_checks",
    "ddp_forms_checks",
    "ddp_gradient_checks",
    "ddp_hooks_checks",
    "ddp_rate_checks",
    "ddp_rotation_checks",
    "gradient_memory_checks",
    "gradient_scaler_checks",
    "master_weights_checks",
    "optimizer_checks",
    "optimizer_state_checks",
    "sparse_checks",
    "state_checks",
    "sync_batch_norm_checks",
}


def _chosen(module: str, number: int) -> int:
    """The number of ranks: of one launch with the newest PyTorch, and of two with the oldest."""
    if module in OF_PYTORCH:
        return 3 if OTHER_HALF else 2
    return 0 if OTHER_HALF else 2 + number % 2


RANKS = [
    pytest.param(
        *case.values,
        ranks,
        id=f"{case.id}-{ranks}",
        marks=[] if ranks == _chosen(case.values[0], number) else [pytest.mark.full],
    )
    for number, case in enumerate(CASES)
    for ranks in (2, 3, 4)
]


@pytest.mark.parametrize(("module", "check", "ranks"), RANKS)
def test_on_ranks(expect_check, module, check, ranks):
    expect_check(module, check, ranks)

"""The checks of test/parallel/checks on 2 and 3 real ranks, and on 4 where all is tested."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from ranks.launch import checks_of

MODULES = [
    "collective_checks",
    "form_checks",
    "mismatch_checks",
    "autograd_checks",
    "optimizer_checks",
    "sparse_checks",
    "state_checks",
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
    "schedule_checks",
    "bench_checks",
    "c10d_checks",
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


# Each check on 2 or 3 ranks in turn: enough for one more version of PyTorch.
RANKS = [
    pytest.param(*case.values, ranks, id=f"{case.id}-{ranks}", marks=marks)
    for number, case in enumerate(CASES)
    for ranks, marks in (
        (2, [pytest.mark.twice] if number % 2 else []),
        (3, [] if number % 2 else [pytest.mark.twice]),
        (4, [pytest.mark.full]),
    )
]


@pytest.mark.parametrize(("module", "check", "ranks"), RANKS)
def test_on_ranks(expect_check, module, check, ranks):
    expect_check(module, check, ranks)

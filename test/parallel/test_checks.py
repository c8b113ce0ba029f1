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


# They look at the core, for which a tensor is a place in memory: one version of PyTorch will do.
OF_THE_CORE = {
    "adasum_checks",
    "bench_checks",
    "join_checks",
    "lossless_checks",
    "mismatch_checks",
    "process_set_checks",
    "schedule_checks",
    "set_form_checks",
    "timeline_checks",
}


def _marks(module: str, number: int, ranks: int) -> list[pytest.MarkDecorator]:
    """Half of the checks run on 2 ranks, the others on 3; with another PyTorch the other way."""
    left_out = OTHER_HALF and module in OF_THE_CORE
    return [] if ranks == 2 + (number + OTHER_HALF) % 2 and not left_out else [pytest.mark.full]


RANKS = [
    pytest.param(
        *case.values, ranks, id=f"{case.id}-{ranks}", marks=_marks(case.values[0], number, ranks)
    )
    for number, case in enumerate(CASES)
    for ranks in (2, 3, 4)
]


@pytest.mark.parametrize(("module", "check", "ranks"), RANKS)
def test_on_ranks(expect_check, module, check, ranks):
    expect_check(module, check, ranks)

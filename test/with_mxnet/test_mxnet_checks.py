"""The checks of test/with_mxnet/checks on 2 real ranks through perseusrun, in one launch."""

from __future__ import annotations

import importlib

import pytest

pytest.importorskip("mxnet")
pytest.importorskip("sklearn")  # the examples' digits

from run_checks import checks_of

MODULES = [
    "mx_op_checks",
    "mx_failure_checks",
    "mx_gradient_checks",
    "mx_state_checks",
    "mx_trainer_checks",
    "mx_optimizer_checks",
    "mx_setting_checks",
    "mx_kvstore_checks",
    "mx_kvstore_training_checks",
    "mx_sync_batch_norm_checks",
    "mx_sync_batch_norm_order_checks",
    "mx_sharded_checks",
    "mx_example_checks",
]
CASES = [
    pytest.param(module, check, id=f"{module.removesuffix('_checks')}-{check}")
    for module in MODULES
    for check in checks_of(importlib.import_module(module))
]


@pytest.mark.parametrize("ranks", [2])
@pytest.mark.parametrize(("module", "check"), CASES)
def test_on_ranks(outcome_of, module, check, ranks):
    outcome_of(module, ranks).expect(check)

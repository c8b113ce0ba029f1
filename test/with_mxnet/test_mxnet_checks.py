"""The checks of test/with_mxnet/checks on 2 real ranks through perseusrun, in one launch.

Those that are about several hosts are on 4, in another one.
"""

from __future__ import annotations

import pytest

pytest.importorskip("mxnet")
pytest.importorskip("sklearn")  # the examples' digits

from ranks.launch import checks_of

MODULES = [
    "mx_op_checks",
    "mx_staging_checks",
    "mx_failure_checks",
    "mx_gradient_checks",
    "mx_state_checks",
    "mx_trainer_checks",
    "mx_parameter_checks",
    "mx_optimizer_checks",
    "mx_setting_checks",
    "mx_launch_setting_checks",
    "mx_kvstore_checks",
    "mx_kvstore_anew_checks",
    "mx_kvstore_training_checks",
    "mx_kvstore_nan_checks",
    "mx_rotation_checks",
    "mx_kvstore_rotation_checks",
    "mx_residual_checks",
    "mx_elastic_checks",
    "mx_sync_batch_norm_checks",
    "mx_sync_batch_norm_order_checks",
    "mx_sharded_checks",
    "mx_example_checks",
]
CASES = [
    pytest.param(module, check, ranks, id=f"{module.removesuffix('_checks')}-{check}")
    for ranks, modules in ((2, MODULES), (4, ["mx_host_checks", "mx_rotation_host_checks"]))
    for module in modules
    for check in checks_of(module)
]


@pytest.mark.parametrize(("module", "check", "ranks"), CASES)
def test_on_ranks(expect_check, module, check, ranks):
    expect_check(module, check, ranks)

"""The checks of test/with_tensorflow/checks on 2 real ranks through perseusrun, in one launch."""

from __future__ import annotations

import importlib

import pytest

pytest.importorskip("tensorflow")
pytest.importorskip("sklearn")  # the examples' digits

from run_checks import checks_of

MODULES = [
    "tensorflow_op_checks",  # its first check is about TensorFlow's start
    "tensorflow_graph_checks",
    "tensorflow_gradient_checks",
    "tensorflow_failure_checks",
    "keras_checks",
    "keras_callback_checks",
    "tf_keras_checks",
    "tf_tape_checks",
    "tf_optimizer_checks",
    "tf_state_checks",
    "tf_sync_batch_norm_checks",
    "tf_bench_checks",
    "tf_example_checks",
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

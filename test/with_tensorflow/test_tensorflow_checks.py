"""The checks of test/with_tensorflow/checks on 2 real ranks through perseusrun, in one launch."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

pytest.importorskip("tensorflow")
pytest.importorskip("sklearn")  # the examples' digits

from ranks.launch import Launch, checks_of

from perseus.keras.library import KERAS_2

KERAS_3_MODULES = [
    "keras_checks",
    "keras_fit_checks",
    "keras_callback_checks",
    "keras_setting_checks",
    "keras_residual_checks",
    "keras_step_checks",
    "keras_parameter_checks",
    "tf_keras_checks",
]
KERAS_2_MODULES = [
    ["keras2_checks", "keras2_residual_checks", "keras2_step_checks", "keras_parameter_checks"],
    ["keras2_graph_checks"],
]
MODULES = [
    "tensorflow_op_checks",  # its first check is about TensorFlow's start
    "tensorflow_graph_checks",
    "tensorflow_gradient_checks",
    "tensorflow_failure_checks",
    *([] if KERAS_2 else KERAS_3_MODULES),
    "tf_tape_checks",
    "tf_optimizer_checks",
    "tf_residual_checks",
    "tf_loss_scale_checks",
    "tf_state_checks",
    "tf_sync_batch_norm_checks",
    "tf_setting_checks",
    "tf_parameter_checks",
    "tf_xla_checks",
    "tf_bench_checks",
    "tf_example_checks",
]
# They take longest of all, and others that are as good a sign run.
FULL = {"check_sparse_gradients_learn_words"}
CASES = [
    pytest.param(
        module,
        check,
        id=f"{module.removesuffix('_checks')}-{check}",
        marks=[pytest.mark.full] if check in FULL else [],
    )
    for module in MODULES
    for check in checks_of(module)
]


@pytest.mark.parametrize("ranks", [2])
@pytest.mark.parametrize(("module", "check"), CASES)
def test_on_ranks(expect_check, module, check, ranks):
    expect_check(module, check, ranks)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.skipif(not (KERAS_2 or find_spec("tf_keras")), reason="needs Keras 2")
@pytest.mark.parametrize("modules", KERAS_2_MODULES, ids=["eager", "graph"])
def test_keras_2_on_ranks(monkeypatch, modules):
    if not KERAS_2:
        monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")
    checks = {module: checks_of(module) for module in modules}
    launch = Launch(checks, 2)
    for module, names in checks.items():
        for check in names:
            launch.expect(module, check)

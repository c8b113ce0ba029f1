"""The checks of Keras 3 on PyTorch, on 2 real ranks; with_tensorflow/ has them on TensorFlow."""

from __future__ import annotations

import os
import re
import sys

import pytest
from ranks.launch import PARALLEL, checks_of, needs, run_ranks

needs("torch", "keras", "sklearn")  # the example's digits
# Keras would choose TensorFlow, and the ranks inherit this.
os.environ.setdefault("KERAS_BACKEND", "torch")

CASES = [
    pytest.param(module, check, id=f"{module.removesuffix('_checks')}-{check}")
    for module in (
        "keras_checks",
        "keras_fit_checks",
        "keras_callback_checks",
        "keras_setting_checks",
        "keras_residual_checks",
        "keras_step_checks",
        "keras_parameter_checks",
        "keras_example_checks",
    )
    for check in checks_of(module)
]


@pytest.mark.parametrize("ranks", [2])
@pytest.mark.parametrize(("module", "check"), CASES)
def test_on_ranks(expect_check, module, check, ranks):
    expect_check(module, check, ranks)


@pytest.mark.full
def test_the_example_is_a_script():
    example = PARALLEL.parent.parent / "examples" / "keras_torch_mnist.py"
    status, output = run_ranks(2, [sys.executable, str(example)])
    assert status == 0, output
    found = re.findall(r"test accuracy: (\d\.\d+)", output)
    assert len(found) == 1, output  # rank 0 alone
    assert float(found[0]) >= 0.97


@pytest.mark.full
def test_training_goes_on_in_another_process(tmp_path):
    command = [sys.executable, str(PARALLEL / "programs" / "keras_resume.py"), str(tmp_path)]
    for times in range(2):
        status, output = run_ranks(2, command)
        assert status == 0, output
        assert output.count("went on") == 2 * times

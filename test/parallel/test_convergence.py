"""Training with every codec on two real ranks, in the launch that the other checks have."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")
pytest.importorskip("tqdm")


@pytest.mark.parametrize(
    "check",
    [
        # The one that takes longest; test_accuracy.py has digits with top-k.
        pytest.param("check_digits_are_learned", marks=pytest.mark.full),
        "check_text_is_learned",
    ],
)
@pytest.mark.parametrize("ranks", [2])
@pytest.mark.parametrize(
    "module",
    [
        "convergence_checks",
        pytest.param("convergence_grid_checks", marks=pytest.mark.full),
    ],
)
def test_every_codec_converges(expect_check, module, check, ranks):
    expect_check(module, check, ranks)

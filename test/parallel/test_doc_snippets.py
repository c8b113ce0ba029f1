"""Snippets of the documentation for PyTorch run as they are, on 2 ranks."""

from __future__ import annotations

import sys

import pytest
from doc_snippets import assert_trained, snippets
from ranks.launch import run_ranks

pytest.importorskip("torch")


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (0, ["rank 0 took 3 of 3 steps", "rank 1 took 3 of 4 steps"]),
        (1, ["epoch 0: loss ", "epoch 1: loss ", " of 56 samples"]),
    ],
)
def test_ranks_with_different_numbers_of_batches(number, said, tmp_path):
    script = tmp_path / "snippet.py"
    script.write_text(snippets("docs/uneven.md", "torch")[number])
    status, output = run_ranks(2, [sys.executable, str(script)], timeout=120)
    assert status == 0, output
    assert all(text in output for text in said), output


def test_the_script_of_the_readme_trains(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(snippets("README.md", "torch")[0])
    status, output = run_ranks(2, [sys.executable, str(script)], timeout=120)
    assert status == 0, output
    assert_trained(output)


def test_the_script_of_the_readme_trains_without_numpy(tmp_path):
    script = tmp_path / "train.py"
    blocked = 'import sys\n\nsys.modules["numpy"] = None\n'
    script.write_text(blocked + snippets("README.md", "torch")[0])
    status, output = run_ranks(2, [sys.executable, str(script)], timeout=120)
    assert status == 0, output
    assert_trained(output)

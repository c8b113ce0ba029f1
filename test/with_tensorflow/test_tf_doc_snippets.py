"""Snippets of the documentation for TensorFlow run as they are, on 2 ranks."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("tensorflow")

from doc_snippets import assert_trained, snippets


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (0, ["rank 0 took 15 steps, loss ", "rank 1 took 15 steps, loss "]),
        (1, ["rank 0: [", "rank 1: [", ", rank 1 was last"]),
    ],
)
def test_ranks_with_different_numbers_of_batches(run_ranks, number, said, tmp_path):
    script = tmp_path / "snippet.py"
    script.write_text(snippets("docs/uneven.md", "tensorflow")[number])
    status, output = run_ranks(2, [sys.executable, str(script)], timeout=120)
    assert status == 0, output
    assert all(text in output for text in said), output


def test_the_settings_for_memory_of_gpus(run_ranks, tmp_path):
    for number, said in ((0, "rank 1 sees "), (1, "rank 1: 2 ranks")):
        script = tmp_path / "snippet.py"
        script.write_text(snippets("docs/troubleshooting.md", "tensorflow")[number])
        status, output = run_ranks(2, [sys.executable, str(script)], timeout=120)
        assert status == 0, output
        assert said in output, output


@pytest.mark.parametrize("module", ["keras", "tensorflow"])
def test_the_script_of_the_readme_trains(run_ranks, module, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(snippets("README.md", module)[0])
    status, output = run_ranks(2, [sys.executable, str(script)], timeout=120)
    assert status == 0, output
    assert_trained(output)

"""Snippets of the documentation for MXNet run as they are, on 2 ranks."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("mxnet")

from doc_snippets import assert_trained, snippets


def test_ranks_with_different_numbers_of_batches(run_ranks, tmp_path):
    script = tmp_path / "snippet.py"
    script.write_text(snippets("docs/uneven.md", "mxnet")[0])
    status, output = run_ranks(2, [sys.executable, str(script)], timeout=120)
    assert status == 0, output
    assert "rank 0 took 4 steps" in output and "rank 1 took 4 steps" in output


def test_the_script_of_the_readme_trains(run_ranks, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(snippets("README.md", "mxnet")[0])
    status, output = run_ranks(2, [sys.executable, str(script)], timeout=120)
    assert status == 0, output
    assert_trained(output)

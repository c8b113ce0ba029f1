"""Snippets of the documentation for PyTorch run as they are, on 2 ranks."""

from __future__ import annotations

import sys

import pytest
from doc_snippets import WAYS, assert_trained, outputs, snippets
from ranks.launch import run_ranks

pytest.importorskip("torch")


@pytest.fixture(scope="module", params=WAYS)
def printed(request, tmp_path_factory):
    uneven = snippets("docs/uneven.md", "torch")
    readme = snippets("README.md", "torch")[0]
    elastic = snippets("docs/elastic.md", "numpy")[0]
    scripts = {"steps": uneven[0], "join": uneven[1], "readme": readme, "elastic": elastic}
    return outputs(request.param, scripts, tmp_path_factory.mktemp("snippets"))


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("steps", ["rank 0 took 3 of 3 steps", "rank 1 took 3 of 4 steps"]),
        ("join", ["epoch 0: loss ", "epoch 1: loss ", " of 56 samples"]),
    ],
)
def test_ranks_with_different_numbers_of_batches(printed, script, said):
    assert all(text in printed[script] for text in said), printed[script]


def test_an_elastic_script_without_a_framework(printed):
    assert all(f"rank {rank}: 0.5000" in printed["elastic"] for rank in (0, 1))


def test_the_script_of_the_readme_trains(printed):
    assert_trained(printed["readme"])


def test_the_script_of_the_readme_trains_without_numpy(tmp_path):
    script = tmp_path / "train.py"
    blocked = 'import sys\n\nsys.modules["numpy"] = None\n'
    script.write_text(blocked + snippets("README.md", "torch")[0])
    status, output = run_ranks(2, [sys.executable, str(script)], timeout=120)
    assert status == 0, output
    assert_trained(output)

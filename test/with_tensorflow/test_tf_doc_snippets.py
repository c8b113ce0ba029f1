"""Snippets of the documentation for TensorFlow run as they are, on 2 ranks."""

from __future__ import annotations

import pytest

pytest.importorskip("tensorflow")

from doc_snippets import WAYS, assert_trained, outputs, snippets


@pytest.fixture(scope="module", params=WAYS)
def printed(request, tmp_path_factory):
    uneven = snippets("docs/uneven.md", "tensorflow")
    gpus = snippets("docs/troubleshooting.md", "tensorflow")
    scripts = {
        "gpus": gpus[0],  # before anything else has begun to use them
        "gpus of a session": gpus[1],
        "steps": uneven[0],
        "join": uneven[1],
        "keras": snippets("README.md", "keras")[0],
        "tensorflow": snippets("README.md", "tensorflow")[0],
    }
    return outputs(request.param, scripts, tmp_path_factory.mktemp("snippets"))


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("steps", ["rank 0 took 15 steps, loss ", "rank 1 took 15 steps, loss "]),
        ("join", ["rank 0: [", "rank 1: [", ", rank 1 was last"]),
    ],
)
def test_ranks_with_different_numbers_of_batches(printed, script, said):
    assert all(text in printed[script] for text in said), printed[script]


def test_the_settings_for_memory_of_gpus(printed):
    assert "rank 1 sees " in printed["gpus"], printed
    assert "rank 1: 2 ranks" in printed["gpus of a session"], printed


@pytest.mark.parametrize("module", ["keras", "tensorflow"])
def test_the_script_of_the_readme_trains(printed, module):
    assert_trained(printed[module])

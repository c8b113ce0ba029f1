"""Snippets of the documentation for MXNet run as they are, on 2 ranks."""

from __future__ import annotations

import pytest

pytest.importorskip("mxnet")

from doc_snippets import WAYS, assert_trained, outputs, snippets


@pytest.fixture(scope="module", params=WAYS)
def printed(request, tmp_path_factory):
    pages = {"uneven": "docs/uneven.md", "readme": "README.md"}
    scripts = {name: snippets(page, "mxnet")[0] for name, page in pages.items()}
    return outputs(request.param, scripts, tmp_path_factory.mktemp("snippets"))


def test_ranks_with_different_numbers_of_batches(printed):
    output = printed["uneven"]
    assert "rank 0 took 4 steps" in output and "rank 1 took 4 steps" in output, output


def test_the_script_of_the_readme_trains(printed):
    assert_trained(printed["readme"])

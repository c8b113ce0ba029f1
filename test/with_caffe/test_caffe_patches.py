"""The patches apply in every combination that has the first; their source is the pinned one."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from caffe_jobs import ROOT

_specification = importlib.util.spec_from_file_location("ci_caffe", ROOT / ".ci" / "caffe.py")
assert _specification is not None and _specification.loader is not None
ci = importlib.util.module_from_spec(_specification)
_specification.loader.exec_module(ci)

_ARCHIVE = ROOT / "build" / "caffe" / ci.ARCHIVE


@pytest.mark.parametrize("numbers", ["1", "12", "13", "132"])
def test_patches_apply(numbers: str, tmp_path: Path) -> None:
    by_number = {path.name[0]: path for path in ci.PATCHES}
    assert set(by_number) == {"1", "2", "3"}
    ci.patched(_ARCHIVE, tmp_path / "caffe", [by_number[number] for number in numbers])
    layers = tmp_path / "caffe" / "src" / "caffe" / "layers"
    assert (layers / "cudnn_batch_norm_layer.cu").exists() == ("2" in numbers)
    proto = (tmp_path / "caffe" / "src" / "caffe" / "proto" / "caffe.proto").read_text()
    assert ("message AugmentationParameter" in proto) == ("3" in numbers)


def test_another_archive_is_not_taken(tmp_path: Path) -> None:
    other = tmp_path / ci.ARCHIVE
    other.write_bytes(_ARCHIVE.read_bytes() + b"\0")
    assert ci.is_archive(_ARCHIVE)
    assert not ci.is_archive(other)

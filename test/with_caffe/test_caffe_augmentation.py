"""The third patch: photographs are changed at random while training, and by how much was asked."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
import sklearn.datasets
from caffe_jobs import CAFFE, finish, start, write_solver
from caffe_nets import input_layer
from numpy.typing import NDArray

_PHOTOGRAPH = Path(sklearn.datasets.__file__).parent / "images" / "flower.jpg"
_COUNT, _HEIGHT, _WIDTH = 24, 60, 90


def _seen(folder: Path, augmentation: str, more: str = "", color: bool = True) -> NDArray:
    """(count, channels, height, width): what a net is given of the same photograph, again and
    again.
    """
    (folder / "list.txt").write_text(f"{_PHOTOGRAPH} 0\n")
    source = f'source: "list.txt" batch_size: {_COUNT} new_height: {_HEIGHT} new_width: {_WIDTH}'
    source += f" is_color: {'true' if color else 'false'}"
    transform = f"{more} augmentation {{ {augmentation} }}" if augmentation else more
    write_solver(
        folder,
        input_layer("ImageData", f"image_data_param {{ {source} }}", transform)
        + 'layer { name: "out" type: "HDF5Output" bottom: "data" bottom: "label" '
        'hdf5_output_param { file_name: "out.h5" } }',
        max_iter=1,
        snapshot_after_train="false",
    )
    command = [str(CAFFE), "train", "--solver=solver.prototxt"]
    status, output = finish(start(folder, command))
    assert status == 0, output
    with h5py.File(folder / "out.h5") as file:
        return file["data"][()]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> NDArray:
    images = _seen(tmp_path_factory.mktemp("original"), "")
    assert images.shape == (_COUNT, 3, _HEIGHT, _WIDTH)
    assert (images == images[0]).all()
    assert images[0].std() > 20
    return images[0]


def test_nothing_asked_for_changes_nothing(original: NDArray, tmp_path: Path) -> None:
    assert (_seen(tmp_path, "min_area: 1") == original).all()


def test_brightness_is_one_factor_for_an_image(original: NDArray, tmp_path: Path) -> None:
    factors = []
    for image in _seen(tmp_path, "brightness: 0.5"):
        unclipped = (original > 60) & (image < 255)
        ratios = image[unclipped] / original[unclipped]
        assert np.ptp(ratios) < 0.03
        factors.append(float(ratios.mean()))
    assert 0.48 < min(factors) < 0.75
    assert 1.25 < max(factors) < 1.52
    assert len({round(factor, 3) for factor in factors}) > _COUNT / 2


def test_contrast_keeps_the_mean(original: NDArray, tmp_path: Path) -> None:
    spreads = []
    for image in _seen(tmp_path, "contrast: 0.4"):
        assert abs(image.mean() - original.mean()) < 8  # some is clipped
        spreads.append(float(image.std() / original.std()))
    assert 0.58 < min(spreads) < 0.85
    assert 1.1 < max(spreads) < 1.42


def _gray(image: NDArray) -> NDArray:
    return 0.114 * image[0] + 0.587 * image[1] + 0.299 * image[2]


def test_saturation_keeps_greys(original: NDArray, tmp_path: Path) -> None:
    spreads = []
    own = np.abs(original - _gray(original)).mean()
    for image in _seen(tmp_path, "saturation: 0.5"):
        assert np.abs(_gray(image) - _gray(original)).mean() < 4
        spreads.append(float(np.abs(image - _gray(image)).mean() / own))
    assert 0.45 < min(spreads) < 0.8
    assert 1.1 < max(spreads) < 1.52


def test_hue_keeps_the_largest_of_the_colours(original: NDArray, tmp_path: Path) -> None:
    images = _seen(tmp_path, "hue: 180")
    assert max(np.abs(image.max(0) - original.max(0)).max() for image in images) <= 2
    assert max(np.abs(image - original).mean() for image in images) > 10


def test_a_zoomed_image_is_a_part_of_it(original: NDArray, tmp_path: Path) -> None:
    """A quarter of the area with its proportions: half as wide and high, resized by two."""
    for image in _seen(tmp_path, "min_area: 0.25 max_area: 0.25"):
        halved = image.reshape(3, _HEIGHT // 2, 2, _WIDTH // 2, 2).mean((2, 4))
        errors = [
            np.abs(original[:, y : y + _HEIGHT // 2, x : x + _WIDTH // 2] - halved).mean()
            for y in range(_HEIGHT // 2 + 1)
            for x in range(_WIDTH // 2 + 1)
        ]
        assert min(errors) < np.median(errors) / 4


def test_rotation_turns_around_the_centre(original: NDArray, tmp_path: Path) -> None:
    images = _seen(tmp_path, "max_rotation: 30")
    changes = np.abs(images - original).mean((0, 1))
    centre = changes[_HEIGHT // 2 - 1 : _HEIGHT // 2 + 1, _WIDTH // 2 - 1 : _WIDTH // 2 + 1]
    assert centre.mean() < changes.mean() / 2
    assert len({image.tobytes() for image in images}) > _COUNT / 2
    assert np.abs(images.mean((2, 3)) - original.mean((1, 2))).max() < 15


def test_probability_leaves_some_alone_and_crops_follow(original: NDArray, tmp_path: Path) -> None:
    images = _seen(tmp_path, "probability: 0.5 brightness: 0.5")
    same = sum(bool((image == original).all()) for image in images)
    assert 2 < same < _COUNT - 2
    folder = tmp_path / "crops"
    folder.mkdir()
    cropped = _seen(folder, "min_area: 0.5 max_aspect_ratio: 1.3", "crop_size: 32 mirror: true")
    assert cropped.shape == (_COUNT, 3, 32, 32)


def test_grey_images_have_no_colours_to_change(tmp_path: Path) -> None:
    images = _seen(tmp_path, "saturation: 0.5 hue: 90", color=False)
    assert images.shape == (_COUNT, 1, _HEIGHT, _WIDTH)
    assert (images == images[0]).all()


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="expected 0 < min_area <= max_area <= 1"):
        _seen(tmp_path, "min_area: 0.8 max_area: 0.5")

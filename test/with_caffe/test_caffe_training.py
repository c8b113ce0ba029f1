"""Training by several processes of the patched Caffe gives what one process gives."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from caffe_jobs import (
    CAFFE,
    TOLERANCE,
    distance,
    finish,
    launched,
    replicas,
    start,
    train,
    weights,
    write_solver,
)
from caffe_nets import digits_input, input_layer, lenet, lenet_on, odd_net

CASES = [
    ("perseusrun", "HDF5Data", 1),
    ("perseusrun", "Data", 2),
    ("openmpi", "HDF5Data", 1),
    ("mpich", "Data", 1),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_two_processes_learn_what_one_learns(
    case: tuple[str, str, int], alone: Callable[..., Path], digits: Path, tmp_path: Path
) -> None:
    launcher, kind, passes = case
    one_lenet = alone(lenet(digits, 64, kind), snapshot=15)
    write_solver(
        tmp_path, lenet(digits, 64 // 2 // passes, kind), iter_size=passes, snapshot=15, display=10
    )
    # What another training held back does not belong to this one's state.
    (tmp_path / f"weights_iter_15.solverstate.h5.rank{passes % 2}").write_text("old")
    output = train(tmp_path, 2, launcher=launcher)
    assert distance(weights(tmp_path, 15), weights(one_lenet, 15)) <= TOLERANCE
    assert distance(weights(tmp_path), weights(one_lenet)) <= TOLERANCE
    # Rank 0 alone reports, and leaves files.
    assert output.count("Iteration 20 (") == 1, output
    assert output.count("Optimization Done") == 2, output
    left = {path.name for path in tmp_path.iterdir()} - {"net.prototxt", "solver.prototxt"}
    assert left == {
        f"weights_iter_{iteration}.{kind}.h5"
        for iteration in (15, 30)
        for kind in ("caffemodel", "solverstate")
    }


@pytest.mark.parametrize("name", ["", "same"])
def test_layers_may_have_the_same_name_or_none(name: str, digits: Path, tmp_path: Path) -> None:
    trained = []
    for renamed in ((), ("conv1", "ip1", "ip2")):
        net = lenet(digits, 32)
        for layer in renamed:
            net = net.replace(f'layer {{ name: "{layer}"', f'layer {{ name: "{name}"')
        folder = tmp_path / str(len(renamed))
        folder.mkdir()
        write_solver(folder, net, max_iter=5, snapshot_after_train="false")
        trained.append(replicas(folder, 2, "float"))
    assert np.array_equal(*trained)
    assert np.array_equal(trained[0][0], trained[0][1])


def test_shared_and_frozen_weights_and_clipping(
    alone: Callable[..., Path], digits: Path, tmp_path: Path
) -> None:
    solver = {"clip_gradients": 0.5, "type": '"Nesterov"'}
    write_solver(tmp_path, odd_net(digits_input(digits, 32)), **solver)
    output = train(tmp_path, 2)
    assert "scaling down gradients" in output
    expected = weights(alone(odd_net(digits_input(digits, 64)), **solver))
    assert distance(weights(tmp_path), expected) <= TOLERANCE


def test_a_snapshot_of_rank_0_is_resumed_by_all(
    alone: Callable[..., Path], digits: Path, tmp_path: Path
) -> None:
    begun = alone(lenet(digits, 64), snapshot=15)
    resumed = tmp_path / "alone"
    resumed.mkdir()
    for folder, batch, ranks in ((resumed, 64, 0), (tmp_path, 32, 2)):
        # The state names the file of the weights, which lies where it was written.
        shutil.copy(begun / "weights_iter_15.caffemodel.h5", folder)
        shutil.copy(begun / "weights_iter_15.solverstate.h5", folder / "state0.h5")
        write_solver(folder, lenet(digits, batch), max_iter=40)
        # Only rank 0 has the file.
        script = (
            f'exec "{CAFFE}" train --solver=solver.prototxt --snapshot=state${{PERSEUS_RANK:-0}}.h5'
        )
        status, output = finish(start(folder, [*launched(ranks), "sh", "-c", script]))
        assert status == 0, output
    assert distance(weights(tmp_path, 40), weights(resumed, 40)) <= TOLERANCE
    assert distance(weights(tmp_path, 40), weights(begun)) > 1e-3


def _images_net(images: Path, batch: int, phase: str = "") -> str:
    source = f'source: "{images}/list.txt" batch_size: {batch} is_color: false'
    skip = "shuffle: true rand_skip: 5"
    parameters = f"{phase} image_data_param {{ {source} {skip} }}"
    return lenet_on(input_layer("ImageData", parameters, "scale: 0.0625"))


def _windows_net(images: Path, batch: int, phase: str = "") -> str:
    source = f'source: "{images}/windows.txt" batch_size: {batch} scale: 0.0625'
    parameters = f"{phase} window_data_param {{ {source} }}"
    return lenet_on(input_layer("WindowData", parameters, "crop_size: 8 mirror: true"))


_DRAWN = {"images": _images_net, "windows": _windows_net}


@pytest.mark.parametrize("name", _DRAWN)
def test_what_is_drawn_is_what_one_process_draws_and_shared_out(
    name: str, alone: Callable[..., Path], images: Path, tmp_path: Path
) -> None:
    """101 images: the processes' parts are other ones after every round."""
    net = _DRAWN[name]
    write_solver(tmp_path, net(images, 16))
    train(tmp_path, 2)
    assert distance(weights(tmp_path), weights(alone(net(images, 32)))) <= TOLERANCE


@pytest.mark.parametrize("name", _DRAWN)
def test_a_test_net_may_have_a_layer_of_the_training_phase(
    name: str, alone: Callable[..., Path], images: Path, tmp_path: Path
) -> None:
    """Rank 0 alone builds it, and so draws alone; the training net is still drawn by all."""
    net = _DRAWN[name]
    write_solver(tmp_path, net(images, 16, "phase: TRAIN"), test_iter=1, test_interval=10)
    output = train(tmp_path, 2)
    assert output.count("Test net output #0: loss") == 4, output
    assert distance(weights(tmp_path), weights(alone(net(images, 32)))) <= TOLERANCE


_LEFT = {
    "a sum": {"PERSEUS_ACCUMULATE_N_STEPS": "2"},
    "what is held back": {
        "PERSEUS_ALLREDUCE_CODEC": "int8",
        "LIGHT_2D_ALLREDUCE": "1",
        "LIGHT_INTRA_SIZE": "1",
    },
}


@pytest.mark.parametrize("left", _LEFT)
def test_a_training_has_nothing_of_an_earlier_one_in_its_processes(
    left: str, digits: Path, tmp_path: Path
) -> None:
    write_solver(tmp_path, lenet(digits, 32), max_iter=6, snapshot_after_train="false")
    first = (tmp_path / "solver.prototxt").read_text().replace("max_iter: 6", "max_iter: 3")
    (tmp_path / "first.prototxt").write_text(first)
    by_itself = replicas(tmp_path, 2, "float", **_LEFT[left])
    after_another = replicas(tmp_path, 2, "float", first="first.prototxt", **_LEFT[left])
    assert np.array_equal(after_another, by_itself)


def test_several_files_of_digits_are_shuffled_as_one_process_does(
    alone: Callable[..., Path], digits: Path, tmp_path: Path
) -> None:
    def net(batch: int) -> str:
        source = f'source: "{digits}/parts.txt" batch_size: {batch} shuffle: true'
        return lenet_on(input_layer("HDF5Data", f"hdf5_data_param {{ {source} }}"))

    write_solver(tmp_path, net(32))
    train(tmp_path, 2)
    assert distance(weights(tmp_path), weights(alone(net(64)))) <= TOLERANCE

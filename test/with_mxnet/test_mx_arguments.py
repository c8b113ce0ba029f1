"""MXNet: an argument that cannot work is answered by what is wrong and what to write."""

from __future__ import annotations

import pytest

mx = pytest.importorskip("mxnet")

import perseus.mxnet as hvd


@pytest.fixture(autouse=True)
def world():
    hvd.init()
    yield
    hvd.shutdown()


def _parameters():
    net = mx.gluon.nn.Dense(2, in_units=2)
    net.initialize()
    return net.collect_params()


def test_an_optimizer_is_wrapped_once():
    wrapped = hvd.DistributedOptimizer(mx.optimizer.create("sgd"))
    with pytest.raises(ValueError, match=r"\[mxnet\] the optimizer is a DistributedOptimizer alre"):
        hvd.DistributedOptimizer(wrapped)


@pytest.mark.parametrize("given", [None, "sgd"])
def test_what_is_no_optimizer_is_named_with_an_example(given):
    with pytest.raises(ValueError, match=r"expected an mx\.optimizer\.Optimizer, got .*create\('s"):
        hvd.DistributedOptimizer(given)


def test_what_is_no_optimizer_of_a_trainer_is_named():
    with pytest.raises(ValueError, match=r"expected an optimizer or its name, such as 'sgd', got "):
        hvd.DistributedTrainer(_parameters(), None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"compression": "fp16"}, r"write compression=hvd\.Compression\.fp16$"),
        ({"gradient_predivide_factor": 0}, r"gradient_predivide_factor=0: expected a number oth"),
    ],
)
def test_arguments_of_a_trainer(arguments, message):
    with pytest.raises(ValueError, match=message):
        hvd.DistributedTrainer(_parameters(), "sgd", **arguments)


@pytest.mark.parametrize("process_set", [1, [0]])
def test_a_process_set_is_an_object(process_set):
    optimizer = mx.optimizer.create("sgd")
    for call in (
        lambda: hvd.DistributedOptimizer(optimizer, process_set=process_set),
        lambda: hvd.DistributedTrainer(_parameters(), "sgd", process_set=process_set),
        lambda: hvd.allreduce(mx.nd.ones(2), process_set=process_set),
    ):
        with pytest.raises(TypeError, match=r"expected a ProcessSet; keep what hvd\.add_process"):
            call()


@pytest.mark.parametrize("op", ["sum", 9])
def test_operations_say_which_reductions_there_are(op):
    for call in (
        lambda: hvd.allreduce(mx.nd.ones(2), op=op),
        lambda: hvd.grouped_allreduce([mx.nd.ones(2)], op=op),
        lambda: hvd.reducescatter(mx.nd.ones(2), op=op),
    ):
        with pytest.raises(ValueError, match=r"op=\S+ expected hvd\.Average"):
            call()


@pytest.mark.parametrize("root", ["0", None])
def test_a_root_is_a_number(root):
    for call in (
        lambda: hvd.broadcast(mx.nd.ones(2), root),
        lambda: hvd.broadcast_object({}, root),
        lambda: hvd.broadcast_parameters(_parameters(), root),
    ):
        with pytest.raises(TypeError, match=r"root_rank=\S+ expected the number of a rank"):
            call()


def test_what_is_no_array_is_named():
    for call in (hvd.allreduce, hvd.allreduce_, hvd.allgather):
        with pytest.raises(ValueError, match=r"expected mx\.nd\.NDArray or mx\.np\.ndarray, got"):
            call("x")


def test_a_store_takes_optimizers_only():
    with pytest.raises(ValueError, match=r"set_optimizer expected an mx\.optimizer\.Optimizer"):
        hvd.create().set_optimizer("sgd")


@pytest.mark.parametrize(
    "name",
    ["dist_sync_persues", "Dist_Sync_Perseus2", "dist-sync_perseus", "perseus", "sync_perseus"],
)
def test_a_misspelt_store_is_named(name):
    message = rf"^\[kvstore\] Unknown store '{name}'; did you mean 'dist_sync_perseus'\?$"
    with pytest.raises(ValueError, match=message):
        mx.kvstore.create(name)


@pytest.mark.parametrize("name", ["dist_sync", "dist_async", "dist_sync_device", "dist"])
def test_a_store_on_servers_that_nobody_started_is_an_error(name):
    """Within a training loop, too."""
    message = rf"'{name}' is MXNet's store on parameter servers.*did you mean 'dist_sync_perseus'"
    for call in (
        lambda: mx.kv.create(name),
        lambda: mx.gluon.Trainer(_parameters(), "sgd", kvstore=name)._init_kvstore(),
        lambda: mx.model._create_kvstore(name, 1, {}),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_mxnets_own_stores_are_made_as_before():
    assert mx.kvstore.create().type == mx.kvstore.create("local").type == "local"
    assert mx.kvstore.create("device").type == "device"
    with pytest.raises(TypeError, match="name must be a string"):
        mx.kvstore.create(7)


@pytest.mark.parametrize("more", [{}, {"threshold": 0.25}])
def test_two_bit_compression_says_what_is_used_instead(more):
    with pytest.warns(UserWarning, match="'2bit' is not available: .*as int8") as caught:
        hvd.create().set_gradient_compression({"type": "2bit", **more})
    assert ("threshold=0.25 has no effect" in str(caught[0].message)) == bool(more)
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, "None: expected a dictionary"),
        ("int8", "'int8': expected a dictionary"),
        ({"type": ["2bit"]}, r"\['2bit'\]: 'type' is one of"),
        ({"type": "fp16", "ratio": 1}, "'fp16' does not take ratio$"),
        ({"type": "topk", "ratio": 0.1, "n": 2, 3: 4}, "'topk' does not take n, 3$"),
        ({"type": "topk", "ratio": "0.1"}, r"topk\('0.1'\): expected a fraction"),
        ({"type": "topk", "ratio": [0.1]}, r"topk\(\[0.1\]\): expected a fraction"),
        ({"type": "rotate", "n": [2]}, r"rotate\(\[2\]\): expected a whole number"),
        ({"type": "powersgd", "rank": "4"}, r"powersgd\('4'\): expected a whole number"),
    ],
)
def test_what_is_no_compression_of_gradients_is_named(given, words):
    """The argument that is wrong, too, and none that is right."""
    with pytest.raises(ValueError, match=rf"^\[(kvstore|compression)\] .*{words}"):
        hvd.create().set_gradient_compression(given)

"""TensorFlow and Keras: an argument that cannot work is answered by what to write."""

from __future__ import annotations

import pytest

tf = pytest.importorskip("tensorflow")

import perseus.keras as keras_hvd
import perseus.tensorflow.horovod as hvd
from perseus.keras.library import keras
from perseus.tensorflow.verdicts import Verdicts


@pytest.fixture(autouse=True)
def world():
    hvd.init()
    yield
    hvd.shutdown()


def _v1():
    return tf.compat.v1.train.GradientDescentOptimizer(0.1)


def _keras():
    return keras.optimizers.SGD(0.1)


def test_verdicts_are_those_of_the_last_gradients_of_each_variable():
    verdicts = Verdicts()
    head, body, other = (tf.Variable(0.0) for _ in range(3))
    yes, no = tf.constant(True), tf.constant(False)
    verdicts.give([(yes, head)], yes)
    assert bool(verdicts.on([(yes, head)]))
    verdicts.give([(yes, head), (yes, body)], no)
    verdicts.give([(yes, other)], yes)
    for variables, applies in (
        ([head], False),
        ([head, body], False),
        ([other], True),
        ([other, head], False),
    ):
        assert bool(verdicts.on([(yes, each) for each in variables])) == applies, variables


def test_an_iterator_of_gradients_reaches_the_closure():
    helper = hvd.LocalGradientAggregationHelper(2, None, False, True, 0, "optimizer_type_keras")
    pairs = iter([(tf.constant(1.0), tf.Variable(0.0))])
    assert len(helper.apply_gradients(lambda: list(pairs), None, pairs)) == 1


CASES = [
    pytest.param(hvd.DistributedOptimizer, _v1, id="v1"),
    pytest.param(hvd.DistributedOptimizer, _keras, id="tf-keras"),
    pytest.param(keras_hvd.DistributedOptimizer, _keras, id="keras"),
]


@pytest.mark.parametrize(("wrap", "make"), CASES)
def test_an_optimizer_is_wrapped_once(wrap, make):
    with pytest.raises(ValueError, match=r"the optimizer is a DistributedOptimizer already"):
        wrap(wrap(make()))


@pytest.mark.parametrize("given", [None, "sgd"])
@pytest.mark.parametrize(("wrap", "make"), CASES)
def test_what_is_no_optimizer_is_named_with_an_example(wrap, make, given):
    with pytest.raises(ValueError, match=r"expected an optimizer of Keras.*optimizers\.SGD\(0"):
        wrap(given)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"op": "sum"}, r"op='sum': expected hvd\.Average.*write op=hvd\.Sum$"),
        ({"compression": "fp16"}, r"write compression=hvd\.Compression\.fp16$"),
        ({"compression": None}, r"leave it out, or write compression=hvd\.Compression\.none"),
        ({"backward_passes_per_step": "2"}, r"backward_passes_per_step='2': expected a whole"),
        ({"gradient_predivide_factor": 0}, r"gradient_predivide_factor=0: expected a number oth"),
    ],
)
@pytest.mark.parametrize(("wrap", "make"), CASES)
def test_arguments_of_optimizers(wrap, make, arguments, message):
    with pytest.raises(ValueError, match=message):
        wrap(make(), **arguments)


@pytest.mark.parametrize(("wrap", "make"), CASES)
def test_a_process_set_is_an_object(wrap, make):
    for process_set in (1, [0]):
        for call in (
            lambda given: wrap(make(), process_set=given),
            lambda given: hvd.DistributedGradientTape(tf.GradientTape(), process_set=given),
            lambda given: hvd.allreduce(tf.ones(2), process_set=given),
        ):
            with pytest.raises(TypeError, match=r"expected a ProcessSet; keep what hvd\.add_p"):
                call(process_set)


def test_a_tape_is_wrapped_once():
    with pytest.raises(ValueError, match=r"the tape is a DistributedGradientTape already"):
        hvd.DistributedGradientTape(hvd.DistributedGradientTape(tf.GradientTape()))


def test_what_is_no_tape_is_named():
    with pytest.raises(ValueError, match=r"expected a tf\.GradientTape, got None; write"):
        hvd.DistributedGradientTape(None)


def test_operations_say_which_reductions_there_are():
    for call in (lambda: hvd.allreduce(tf.ones(2), op="sum"), lambda: hvd.allreduce([1.0], op=9)):
        with pytest.raises(ValueError, match=r"op=\S+ expected hvd\.Average"):
            call()


@pytest.mark.parametrize("root", ["0", None])
def test_a_root_is_a_number(root):
    for call in (
        lambda: hvd.broadcast(tf.ones(2), root),
        lambda: hvd.broadcast_variables([tf.Variable(1.0)], root),
        lambda: hvd.broadcast_object({}, root),
        lambda: keras_hvd.callbacks.BroadcastGlobalVariablesCallback(root),
    ):
        with pytest.raises(TypeError, match=r"root_rank=\S+ expected the number of a rank"):
            call()


def test_broadcast_variables_says_what_it_takes():
    model = keras.Sequential([keras.layers.Dense(1)])
    for given in (model, None):
        with pytest.raises(ValueError, match=r"expected a list of variables, such as model\.var"):
            hvd.broadcast_variables(given, 0)
    with pytest.raises(ValueError, match=r"expected variables, got"):
        hvd.broadcast_variables([tf.ones(2)], 0)

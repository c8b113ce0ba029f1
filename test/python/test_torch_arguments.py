"""PyTorch: an argument that cannot work is answered by what is wrong and what to write."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import perseus.torch.horovod as hvd
from perseus.gradients.plan import Plan


@pytest.fixture(autouse=True)
def world():
    hvd.init()
    yield
    hvd.shutdown()


@pytest.fixture
def optimizer():
    return torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
def test_an_optimizer_is_wrapped_once(optimizer, op):
    wrapped = hvd.DistributedOptimizer(optimizer, op=op)
    with pytest.raises(ValueError, match=r"\[torch\] the optimizer is a DistributedOptimizer alr"):
        hvd.DistributedOptimizer(wrapped)


@pytest.mark.parametrize(
    ("given", "got"), [(None, "None"), ("sgd", "str"), (torch.nn.Linear(1, 1), r"torch.*\.Linear")]
)
def test_what_is_no_optimizer_is_named_with_an_example(given, got):
    expected = rf"expected an optimizer of torch\.optim, got {got}; .*torch\.optim\.SGD\("
    with pytest.raises(ValueError, match=expected):
        hvd.DistributedOptimizer(given)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"op": "sum"}, r"op='sum': expected hvd\.Average, hvd\.Sum.*; write op=hvd\.Sum$"),
        ({"op": "mean"}, r"write op=hvd\.Average$"),
        ({"op": None}, r"op=None: expected hvd\.Average"),
        ({"op": 6}, r"op=6: expected hvd\.Average"),
        ({"op": True}, r"op=True: expected hvd\.Average"),
        ({"compression": "fp16"}, r"write compression=hvd\.Compression\.fp16$"),
        ({"compression": "gzip"}, r"compression='gzip'.*for example, compression=hvd\.Comp"),
        ({"compression": None}, r"leave it out, or write compression=hvd\.Compression\.none"),
        ({"compression": hvd.Compression.topk}, r"call it: compression=.*topk\(0\.01\)$"),
        ({"compression": hvd.Compression.rotate}, r"call it: compression=.*rotate\(4\)$"),
        (
            {"compression": hvd.Compression.rotate(4), "op": hvd.Max},
            r"^\[torch\] Compression\.rotate averages parameters, which is not what op=Max does to",
        ),
        ({"backward_passes_per_step": "2"}, r"backward_passes_per_step='2': expected a whole"),
        ({"backward_passes_per_step": 1.5}, r"backward_passes_per_step=1\.5: expected a whole"),
        ({"gradient_predivide_factor": 0}, r"gradient_predivide_factor=0: expected a number oth"),
        ({"gradient_predivide_factor": True}, r"gradient_predivide_factor=True: expected a num"),
        ({"gradient_predivide_factor": "2"}, r"gradient_predivide_factor='2': expected a number"),
        ({"gradient_predivide_factor": math.nan}, r"gradient_predivide_factor=nan: expected a n"),
        ({"gradient_predivide_factor": -math.inf}, r"=-inf: .* other than 0 that is finite$"),
        ({"named_parameters": ["a", "b"]}, r"sequence of tuples \(name, parameter\)"),
        ({"named_parameters": torch.nn.Linear(2, 2)}, r"model\.named_parameters\(\)"),
        ({"named_parameters": [("a", 1, 2)]}, r"sequence of tuples \(name, parameter\)"),
        ({"named_parameters": [("a", "b")]}, r"sequence of tuples \(name, parameter\)"),
    ],
)
def test_arguments_of_the_optimizer(optimizer, arguments, message):
    with pytest.raises(ValueError, match=message):
        hvd.DistributedOptimizer(optimizer, **arguments)


@pytest.mark.parametrize("factor", [4, np.float32(3), np.int64(-2), Fraction(1, 2)])
def test_a_predivide_factor_is_any_real_number(optimizer, factor):
    hvd.DistributedOptimizer(optimizer, gradient_predivide_factor=factor)
    plan = Plan(predivide_factor=factor)
    assert (plan.prescale, plan.postscale) == (1.0 / float(factor), float(factor))
    assert type(plan.prescale) is type(plan.postscale) is float


@pytest.mark.parametrize("process_set", [0, 1, [0], None])
def test_a_process_set_is_an_object(optimizer, process_set):
    tensor = torch.ones(2)
    for call in (
        lambda: hvd.DistributedOptimizer(optimizer, process_set=process_set),
        lambda: hvd.allreduce(tensor, op=hvd.Sum, process_set=process_set),
        lambda: hvd.allreduce_(tensor, op=hvd.Sum, process_set=process_set),
        lambda: hvd.grouped_allreduce([tensor], process_set=process_set),
        lambda: hvd.allgather(tensor, process_set=process_set),
        lambda: hvd.broadcast(tensor, 0, process_set=process_set),
        lambda: hvd.barrier(process_set),
    ):
        with pytest.raises(TypeError, match=r"expected a ProcessSet; keep what hvd\.add_process"):
            call()


@pytest.mark.parametrize("op", ["sum", 9, 1.0])
def test_operations_say_which_reductions_there_are(op):
    tensor = torch.ones(2)
    for call in (hvd.allreduce, hvd.allreduce_, hvd.allreduce_async):
        with pytest.raises(
            (TypeError, ValueError), match=rf"op: expected hvd\.Average.*got '?{op}"
        ):
            call(tensor, op=op)


@pytest.mark.parametrize("root", ["0", None, 0.0])
def test_a_root_is_a_number(optimizer, root):
    for call in (
        lambda: hvd.broadcast(torch.ones(2), root),
        lambda: hvd.broadcast_parameters({"a": torch.ones(2)}, root),
        lambda: hvd.broadcast_object({}, root),
        lambda: hvd.broadcast_optimizer_state(optimizer, root),
    ):
        with pytest.raises(TypeError, match=r"root_rank\S* expected the number of a rank"):
            call()


def test_a_name_is_a_text():
    with pytest.raises(TypeError, match=r"name=3: expected a str"):
        hvd.allreduce(torch.ones(2), name=3)


@pytest.mark.parametrize("compression", ["fp16", None])
def test_compression_of_an_operation_is_a_class(compression):
    with pytest.raises(ValueError, match=r"expected a class of hvd\.Compression"):
        hvd.allreduce(torch.ones(2), compression=compression)
    with pytest.raises(ValueError, match=r"expected a class of hvd\.Compression"):
        hvd.grouped_allreduce([torch.ones(2)], compression=compression)


def test_a_model_is_no_optimizer():
    with pytest.raises(ValueError, match=r"broadcast_parameters\(model\.state_dict\(\)"):
        hvd.broadcast_optimizer_state(torch.nn.Linear(1, 1), 0)

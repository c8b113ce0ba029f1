"""PyTorch on one rank: collectives are copies, and arguments are checked all the same."""

from __future__ import annotations

import copy
import pickle

import pytest

torch = pytest.importorskip("torch")

import perseus.torch.horovod as hvd
from perseus import objects
from perseus.torch import functions, hooks, sparse


@pytest.fixture(autouse=True)
def world():
    hvd.init()
    yield
    hvd.shutdown()


def test_collectives_of_one_rank_copy():
    x = torch.arange(6.0).reshape(2, 3)
    for result in (
        hvd.allreduce(x),
        hvd.allgather(x),
        hvd.broadcast(x, 0),
        hvd.alltoall(x),
        hvd.alltoall(x, [2])[0],
        hvd.reducescatter(x),
        hvd.grouped_allreduce([x])[0],
        hvd.grouped_allgather([x])[0],
        hvd.grouped_reducescatter([x])[0],
    ):
        assert torch.equal(result, x)
        assert result.data_ptr() != x.data_ptr()
    assert hvd.allreduce_(x) is x
    hvd.barrier()


def test_before_init_and_after_shutdown_collectives_fail():
    hvd.shutdown()
    for call in (
        lambda: hvd.allreduce(torch.ones(1)),
        lambda: hvd.reducescatter(torch.ones(1)),
        lambda: hvd.alltoall(torch.ones(1)),
        hvd.barrier,
    ):
        with pytest.raises(hvd.HorovodInternalError, match=r"hvd\.init\(\)"):
            call()


@pytest.mark.parametrize(
    "name", ["allreduce", "allreduce_", "allgather", "alltoall", "reducescatter", "broadcast_async"]
)
def test_what_is_not_a_tensor_is_named(name):
    arguments = [0] if "broadcast" in name else []
    for thing in ([1.0], "x", 3):
        with pytest.raises(TypeError, match=type(thing).__name__):
            getattr(hvd, name)(thing, *arguments)
    with pytest.raises(TypeError, match="expected a tensor, got int"):
        hvd.grouped_allreduce([torch.ones(1), 3])


def test_sparse_tensors_are_sent_elsewhere():
    sparse = torch.eye(2).to_sparse()
    with pytest.raises(ValueError, match=r"is not supported\. Use sparse_allreduce_async"):
        hvd.allreduce(sparse)
    total = hvd.sparse_allreduce_async(sparse, "eye", hvd.Average)()
    assert torch.equal(total.to_dense(), torch.eye(2))


def test_an_unregistered_process_set_is_refused():
    foreign = hvd.ProcessSet([0])
    for call in (hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter):
        with pytest.raises(ValueError, match="does not exist, or has not been registered"):
            call(torch.ones(2), process_set=foreign)
    assert foreign.size() is None and foreign.rank() is None and foreign.included() is True
    with pytest.raises(ValueError, match="list of ranks"):
        hvd.ProcessSet(["0"])


def test_the_distributed_optimizer_is_an_optimizer_of_the_same_class():
    model = torch.nn.Linear(2, 1)
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    assert isinstance(optimizer, torch.optim.SGD)
    assert type(optimizer).__name__ == "SGD"
    assert optimizer.param_groups[0] is plain.param_groups[0]
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert not plain.state
    assert len(optimizer.state) == 2
    saved = pickle.loads(pickle.dumps(optimizer.state_dict()))
    optimizer.load_state_dict(copy.deepcopy(saved))
    optimizer.zero_grad()
    assert model.weight.grad is None


def test_an_optimizer_whose_constructor_needs_more_arguments():
    class Picky(torch.optim.Optimizer):
        def __init__(self, params, lr, *, colour):
            super().__init__(params, {"lr": lr, "colour": colour})

        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.sub_(group["lr"] * p.grad)

    model = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = hvd.DistributedOptimizer(Picky(model.parameters(), 0.25, colour="red"))
    model(torch.ones(1, 1)).backward()
    optimizer.step()
    assert model.weight.item() == 0.75


def test_an_optimizer_whose_constructor_makes_state():
    class Tracking(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})
            for p in self.param_groups[0]["params"]:
                self.state[p] = {"sum": torch.full_like(p, 2.0), "of": p, "steps": 0}

        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                state = self.state[p]
                state["steps"] += 1
                state["sum"] += p.grad
                state["of"].data.sub_(state["sum"])

    parameter = torch.nn.Parameter(torch.tensor([1.0, 5.0]))
    plain = Tracking([parameter])
    optimizer = hvd.DistributedOptimizer(plain)
    (parameter * torch.tensor([3.0, 4.0])).sum().backward()
    optimizer.step()
    assert parameter.tolist() == [-4.0, -1.0]
    assert optimizer.state[parameter]["sum"].tolist() == [5.0, 6.0]
    assert optimizer.state[parameter]["steps"] == 1
    assert plain.state[parameter]["sum"].tolist() == [2.0, 2.0]


def test_received_splits_are_where_the_splits_are():
    class Elsewhere(torch.Tensor):
        @property
        def device(self):
            return torch.device("meta")

    splits = torch.tensor([2], dtype=torch.int32).as_subclass(Elsewhere)
    for tensor in (torch.ones(2, 3), torch.ones(2, 3, requires_grad=True)):
        output, received = hvd.alltoall(tensor, splits)
        assert received.device.type == "meta" and output.device.type == "cpu"
    output.sum().backward()
    assert tensor.grad.tolist() == [[1.0] * 3] * 2
    handles = [hvd.alltoall_async(tensor, splits), hvd.alltoall_async(tensor, [2])]
    for handle, device in zip(handles, ("meta", "cpu"), strict=True):
        assert hvd.synchronize(handle)[1].device.type == device


def test_state_that_the_root_has_in_host_memory_is_there_on_all_ranks():
    parameter = torch.nn.Parameter(torch.empty(3, device="meta"))
    for shape in ((), (3,)):
        slot = functions._TensorSlot(torch.zeros(shape))
        present = torch.zeros(shape, device="meta")
        room = functions._room_for(slot, present, parameter, is_root=False)
        assert room.device.type == "cpu" and room.shape == present.shape
        here = torch.zeros(shape)
        assert functions._room_for(slot, here, parameter, is_root=False) is here


def test_schedulers_and_step_hooks_see_each_step_once():
    model = torch.nn.Linear(1, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 1)).backward()
        optimizer.step()
        scheduler.step()
    assert len(calls) == 2
    assert optimizer.param_groups[0]["lr"] == 0.25


def _diloco(optimizer):
    return hvd.DiLoCo(optimizer, every=2)


def _adasum(optimizer):
    from perseus.compression import NoneCompressor
    from perseus.torch.adasum import adasum_optimizer
    from perseus.torch.functions import parameters_of

    names = {p: str(number) for number, p in enumerate(parameters_of(optimizer))}
    return adasum_optimizer(optimizer, names, NoneCompressor, 1, hvd.global_process_set)


@pytest.mark.parametrize("wrap", [hvd.DistributedOptimizer, _diloco, _adasum])
def test_step_hooks_run_once_after_a_state_has_been_loaded(wrap):
    model = torch.nn.Linear(1, 1)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=1.0))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    model(torch.ones(1, 1)).backward()
    optimizer.step()
    assert calls == ["before", "after"]


class _OwnZeros(torch.optim.SGD):
    """Keeps gradients, as zeros."""

    def zero_grad(self):
        super().zero_grad(set_to_none=False)


class _NamedZeros(torch.optim.SGD):
    """Has an option of its own."""

    def zero_grad(self, set_to_none=False, *, to=0.0):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None if set_to_none else torch.full_like(p, to)


def test_an_interrupted_sparse_reduction_is_not_waited_for_again(monkeypatch):
    asked = []

    def synchronize(handle):
        asked.append(handle)
        if asked == [7, 8]:
            raise KeyboardInterrupt
        return 10 * handle

    monkeypatch.setattr(sparse, "synchronize", synchronize)
    wait = sparse._both((7, 8))
    with pytest.raises(KeyboardInterrupt):
        wait()
    assert wait() == [70, 80]
    assert asked == [7, 8, 8]


@pytest.mark.parametrize(
    ("owners", "last"),
    [
        ([False, False], [True, True]),
        ([True], [True]),
        ([True, True], [False, False]),
        ([False, True], [False, True]),
        ([True, False], [True, False]),
        ([True, None], [False]),
        ([None, True], [True]),
    ],
)
def test_only_hooks_that_may_change_a_gradient_delay_its_reduction(owners, last):
    """Of owners that reduce in place or not, and of the script (None)."""

    class Owner:
        pass

    weight = torch.nn.Parameter(torch.ones(2))
    living, seen = [], []
    for in_place in owners:
        if in_place is None:
            weight.register_post_accumulate_grad_hook(lambda _: None)
            continue
        living.append(Owner())
        hooks.on_gradient(
            weight, living[-1], lambda *given: seen.append(given[-1]), None, in_place=in_place
        )
    weight.sum().backward()
    assert seen == last


def test_zero_grad_passes_on_what_it_is_given():
    def gradient_after(kind, *args, **kwargs):
        model = torch.nn.Linear(1, 1, bias=False)
        optimizer = hvd.DistributedOptimizer(kind(model.parameters(), lr=1.0))
        model(torch.ones(1, 1)).backward()
        optimizer.step()
        optimizer.zero_grad(*args, **kwargs)
        return None if model.weight.grad is None else model.weight.grad.item()

    assert gradient_after(_OwnZeros) == 0.0
    assert gradient_after(_NamedZeros) == 0.0
    assert gradient_after(_NamedZeros, to=3.0) == 3.0
    assert gradient_after(_NamedZeros, True) is None
    assert gradient_after(torch.optim.SGD, set_to_none=False) == 0.0
    assert gradient_after(torch.optim.SGD) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"named_parameters": ["weight"]}, "sequence of tuples"),
        ({"named_parameters": "double"}, "Found duplicates"),
        ({"named_parameters": []}, "were not named"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step must be > 0"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "gradient_predivide_factor"),
        ({"groups": 0}, "positive integer"),
        ({"groups": -1}, "positive integer"),
        ({"groups": "abc"}, "positive integer"),
        ({"groups": "twice"}, "only appear once"),
    ],
)
def test_arguments_that_do_not_fit(options, message):
    model = torch.nn.Linear(2, 1)
    if options.get("named_parameters") == "double":
        options = {"named_parameters": [("p", model.weight), ("p", model.bias)]}
    if options.get("groups") == "twice":
        options = {"groups": [[model.weight], [model.weight, model.bias]]}
    with pytest.raises(ValueError, match=message):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)


@pytest.mark.parametrize(
    "base", [hvd.compression.Compressor, hvd.Compression.none, hvd.Compression.fp16, object]
)
def test_a_compressor_from_any_class_is_used(base):
    class Negated(base):
        @staticmethod
        def compress(tensor):
            return -tensor, "minus"

        @staticmethod
        def decompress(tensor, ctx):
            assert ctx == "minus"
            return -tensor * 3

    x = torch.tensor([1.0, -2.0])
    assert hvd.allreduce(x, compression=Negated).tolist() == [3.0, -6.0]
    (result,) = hvd.grouped_allreduce([x], compression=Negated)
    assert result.tolist() == [3.0, -6.0]
    optimizer = torch.optim.SGD([torch.nn.Parameter(x)], lr=1.0)
    assert hvd.DistributedOptimizer(optimizer, compression=Negated, op=hvd.Adasum)


def test_fp16_compressor():
    compressed, context = hvd.Compression.fp16.compress(torch.tensor([1.5], dtype=torch.float64))
    assert compressed.dtype == torch.float16
    assert hvd.Compression.fp16.decompress(compressed, context).dtype == torch.float64
    whole = torch.tensor([7])
    assert hvd.Compression.fp16.compress(whole) == (whole, None)


def test_objects_survive_the_trip():
    local = 5
    restored = objects.loads(objects.dumps({"f": lambda x: x + local, "t": torch.ones(2)}))
    assert restored["f"](1) == 6 and restored["t"].tolist() == [1.0, 1.0]
    assert hvd.broadcast_object([1, 2]) == [1, 2]
    assert hvd.allgather_object({"a": 1}) == [{"a": 1}]

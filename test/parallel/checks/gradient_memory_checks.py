"""DistributedOptimizer: p.grad that shares memory, is replaced, or is changed by other hooks."""

from __future__ import annotations

from typing import Any

import torch
from patterns import assert_same, everyone, nan_check, raised, values, world_with
from torch import nn

import perseus.torch.horovod as hvd
from perseus.torch.compression import Compressor


def _zeros(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape)) for shape in shapes]


def _wrapped(parameters: list[nn.Parameter], **options: Any) -> Any:
    return hvd.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=1.0),
        named_parameters=[(f"p{index}", p) for index, p in enumerate(parameters)],
        **options,
    )


def _own(shape: tuple[int, ...], salt: int = 0) -> torch.Tensor:
    return values(shape, torch.float32, hvd.rank(), salt)


def _total(shape: tuple[int, ...], salt: int = 0) -> torch.Tensor:
    return everyone(shape, torch.float32, salt).sum(0).to(torch.float32)


def _mean(shape: tuple[int, ...], salt: int = 0) -> torch.Tensor:
    return everyone(shape, torch.float32, salt).mean(0).to(torch.float32)


def check_two_parameters_get_one_gradient_from_autograd() -> None:
    for groups in (None, 1):
        for salt in range(3):
            p, q = _zeros((4,), (4,))
            optimizer = _wrapped([p, q], op=hvd.Sum, groups=groups)
            for each in (p, q):  # the first result is there before the second reduction begins
                each.register_hook(lambda _, o=optimizer: o._reducer.wait())
            ((p.view(2, 2) + q.view(2, 2)) * _own((2, 2), salt)).sum().backward()
            assert p.grad.data_ptr() == q.grad.data_ptr()
            before = p.grad, q.grad
            optimizer.synchronize()
            assert p.grad is before[0]
            assert q.grad is before[1]
            for each in (p, q):
                assert_same(each.grad, _total((4,), salt))


def check_backward_still_needs_the_memory_of_a_gradient() -> None:
    for compression in (hvd.Compression.none, hvd.Compression.fp16):
        weight, bias = _zeros((3, 5), (5,))
        optimizer = _wrapped([weight, bias], op=hvd.Sum, compression=compression)
        row = torch.tensor([[1.0, 2.0, 4.0]])
        product = row @ weight
        # Runs between the hook of the bias and the gradient of the weight.
        product.register_hook(lambda _, o=optimizer: o._reducer.wait())
        ((product + bias.view(1, 5)) * _own((1, 5))).sum().backward()
        assert optimizer._reducer.reductions[1].handle != 0
        optimizer.synchronize()
        assert_same(bias.grad, _total((5,)))
        assert_same(weight.grad, row.t() @ _total((1, 5)))


def check_gradients_in_one_buffer_are_copied_in_the_first_step_only() -> None:
    shapes = [(3,), (2, 2), (5,)]
    parameters = _zeros(*shapes)
    optimizer = _wrapped(parameters)
    buffer = torch.zeros(12)
    for p, place in zip(parameters, buffer.split([3, 4, 5]), strict=True):
        p.grad = place.view(p.shape)
    views = [p.grad for p in parameters]
    for step in range(3):
        buffer.zero_()
        sum((p * _own(p.shape, step)).sum() for p in parameters).backward()
        for reduction, view in zip(optimizer._reducer.reductions, views, strict=True):
            in_place = reduction.gradients[0].data_ptr() == view.data_ptr()
            assert in_place == (step > 0), step
        optimizer.synchronize()
        assert_same(buffer, torch.cat([_mean(shape, step).reshape(-1) for shape in shapes]))
        assert all(p.grad is view for p, view in zip(parameters, views, strict=True))


def check_gradients_that_overlap() -> None:
    parameters = _zeros((4,), (4,))
    optimizer = _wrapped(parameters, op=hvd.Sum)
    buffer = torch.zeros(6)
    for p, start in zip(parameters, (0, 2), strict=True):
        p.grad = buffer[start : start + 4]
    for step in range(3):
        buffer.copy_(_own((6,), step))
        optimizer.synchronize()
        assert_same(buffer, _total((6,), step))


def check_a_gradient_that_the_script_replaces_is_averaged() -> None:
    def replace(p: nn.Parameter) -> None:
        p.grad = p.grad + 100 * hvd.rank()

    def give_memory(p: nn.Parameter) -> None:
        p.grad.data = p.grad + 100 * hvd.rank()

    def on_one_rank(p: nn.Parameter) -> None:
        if hvd.rank() == 1:
            replace(p)

    for change in (replace, give_memory, on_one_rank):
        for options in ({}, {"groups": 1}, {"compression": _Own}):
            parameters = _zeros((4,), (2, 3))
            optimizer = _wrapped(parameters, **options)
            sum((p * _own(p.shape)).sum() for p in parameters).backward()
            for p in parameters:
                change(p)
            optimizer.step()
            for p in parameters:
                assert_same(p.grad, _mean(p.shape))
                assert_same(p.detach(), -_mean(p.shape))


class _Own(Compressor):
    """Sends float64."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor.double(), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


def check_a_sparse_gradient_that_the_script_replaces_is_averaged() -> None:
    for as_dense in (False, True):
        model = nn.Embedding(5, 3, sparse=True)
        optimizer = _wrapped(list(model.parameters()), sparse_as_dense=as_dense)
        for replaced in (lambda grad: grad * 2, torch.Tensor.to_dense):
            optimizer.zero_grad()
            (model(torch.tensor([hvd.rank()])) * _own((1, 3))).sum().backward()
            model.weight.grad = replaced(model.weight.grad)
            optimizer.synchronize()
            expected = torch.zeros(5, 3)
            for rank in range(hvd.size()):
                expected[rank] = values((3,), torch.float32, rank) / hvd.size()
            assert_same(model.weight.grad.to_dense(), expected)


def _clip(p: nn.Parameter) -> None:
    p.grad.clamp_(-1, 2)


def _scale(p: nn.Parameter) -> None:
    p.grad.mul_(10)


def _backward(parameters: list[nn.Parameter], salt: int = 0) -> None:
    sum((p * _own(p.shape, salt)).sum() for p in parameters).backward()


def _begun(optimizer: Any) -> list[bool]:
    return [reduction.is_under_way() for reduction in optimizer._reducer.reductions]


def check_a_later_hook_of_the_script_changes_what_is_reduced() -> None:
    for options in ({}, {"groups": 1}):
        parameters = _zeros((4,), (2, 3))
        optimizer = _wrapped(parameters, op=hvd.Sum, **options)
        handles = [p.register_post_accumulate_grad_hook(_clip) for p in parameters]
        for step in range(3):
            optimizer.zero_grad()
            _backward(parameters, step)
            assert not any(_begun(optimizer)), step
            optimizer.synchronize()
            for p in parameters:
                clipped = everyone(p.shape, torch.float32, step).clamp(-1, 2)
                assert_same(p.grad, clipped.sum(0).to(torch.float32))
        (p,) = parameters[:1]
        handles.append(p.register_post_accumulate_grad_hook(_scale))
        optimizer.zero_grad()
        _backward(parameters)
        optimizer.synchronize()
        clipped = everyone(p.shape, torch.float32).clamp(-1, 2) * 10
        assert_same(p.grad, clipped.sum(0).to(torch.float32))
        for handle in handles:
            handle.remove()
        optimizer.zero_grad()
        _backward(parameters)
        assert all(_begun(optimizer))
        optimizer.synchronize()
        assert_same(p.grad, _total(p.shape))


def check_hooks_of_the_script_take_the_step_during_backward() -> None:
    for wraps_first, set_to_none in ((True, True), (True, False), (False, True)):
        parameters = _zeros((4,), (2, 3))
        optimizers: dict[nn.Parameter, Any] = {}

        def step(p: nn.Parameter, of: Any = optimizers, set_to_none: bool = set_to_none) -> None:
            of[p].step()
            of[p].zero_grad(set_to_none=set_to_none)

        if not wraps_first:
            for p in parameters:
                p.register_post_accumulate_grad_hook(step)
        for index, p in enumerate(parameters):
            inner = torch.optim.SGD([p], lr=1.0)
            optimizers[p] = hvd.DistributedOptimizer(inner, [(f"p{index}", p)])
        if wraps_first:
            for p in parameters:
                p.register_post_accumulate_grad_hook(step)
        expected = [p.detach().clone() for p in parameters]
        for salt in range(4):
            _backward(parameters, salt)
            for p, value in zip(parameters, expected, strict=True):
                assert_same(p.detach(), value.sub_(_mean(p.shape, salt)))


def check_hooks_of_the_script_take_gradients_and_give_them_back() -> None:
    for wraps_first in (True, False):
        for groups, taken in ((None, 2), (1, 2), (1, 1)):
            parameters = _zeros((4,), (2, 3))
            grads: dict[nn.Parameter, torch.Tensor] = {}

            def take(p: nn.Parameter, to: dict[nn.Parameter, torch.Tensor] = grads) -> None:
                to[p], p.grad = p.grad, None

            optimizer = _wrapped(parameters, groups=groups) if wraps_first else None
            for p in parameters[:taken]:
                p.register_post_accumulate_grad_hook(take)
            optimizer = optimizer or _wrapped(parameters, groups=groups)
            expected = [p.detach().clone() for p in parameters]
            for salt in range(3):
                _backward(parameters, salt)
                for p, grad in grads.items():
                    p.grad = grad
                optimizer.step()
                optimizer.zero_grad()
                for p, value in zip(parameters, expected, strict=True):
                    assert_same(p.detach(), value.sub_(_mean(p.shape, salt)))


def check_two_optimizers_of_a_parameter_reduce_its_gradient_one_after_the_other() -> None:
    parameters = _zeros((4,), (2, 3))
    optimizers = [_wrapped(parameters), _wrapped(parameters)]
    for salt in range(3):
        _backward(parameters, salt)
        assert not any(_begun(optimizers[0]) + _begun(optimizers[1]))
        optimizers[0].synchronize()
        for p in parameters:
            assert_same(p.grad, _mean(p.shape, salt))
            p.grad.copy_(_own(p.shape, salt + 1))
        optimizers[1].synchronize()
        for p in parameters:
            assert_same(p.grad, _mean(p.shape, salt + 1))
        for optimizer in optimizers:
            optimizer.zero_grad()


def check_zeroing_gradients_that_wait_for_the_step_is_refused() -> None:
    for options in ({}, {"groups": 1}):
        parameters = _zeros((4,), (2, 3))
        optimizer = _wrapped(parameters, op=hvd.Sum, **options)
        for p in parameters:
            p.register_post_accumulate_grad_hook(_scale)
        for salt in range(2):
            _backward(parameters, salt)
            assert "race condition" in raised(AssertionError, optimizer.zero_grad)
            optimizer.synchronize()
            for p in parameters:
                assert_same(p.grad, 10 * _total(p.shape, salt))
            optimizer.zero_grad()


class _Interrupted:
    """A session whose second wait is ended by Ctrl-C; its first one may fail."""

    def __init__(self, session: Any, fails: bool = False) -> None:
        self.submit, self.poll = session.submit, session.poll
        self._session, self._waits, self._fails = session, 0, fails

    def synchronize(self, handle: int) -> Any:
        self._waits += 1
        if self._waits == 2:
            raise KeyboardInterrupt
        result = self._session.synchronize(handle)
        if self._fails:
            raise ValueError("first")
        return result


def check_what_was_reduced_before_an_interrupt_is_not_reduced_again() -> None:
    parameters = _zeros((4,), (2, 3), (5,))
    optimizer = _wrapped(parameters, op=hvd.Sum)
    reducer = optimizer._reducer
    plain = reducer._session
    for step in range(2):
        optimizer.zero_grad()
        sum((p * _own(p.shape, step)).sum() for p in parameters).backward()
        reducer._session = _Interrupted(plain)
        raised(KeyboardInterrupt, optimizer.step)
        reducer._session = plain
        optimizer.step()
        for p in parameters:
            assert_same(p.grad, _total(p.shape, step))


def check_a_step_that_is_skipped_or_fails_does_so_after_an_interrupt() -> None:
    with world_with(**nan_check("skip")):
        for fails in (False, True):
            parameters = _zeros((4,), (2, 3), (5,))
            optimizer = _wrapped(parameters)
            reducer = optimizer._reducer
            plain = reducer._session
            (parameters[0] * (1.0 if fails else float("nan"))).sum().backward()
            _backward(parameters[1:])
            reducer._session = _Interrupted(plain, fails)
            raised(KeyboardInterrupt, optimizer.step)
            reducer._session = plain
            if fails:
                assert raised(ValueError, optimizer.step) == "first"
            else:
                optimizer.step()
            for p in parameters:
                assert_same(p.detach(), torch.zeros(p.shape))
            optimizer.zero_grad()
            _backward(parameters, 1)
            optimizer.step()
            for p in parameters:
                assert_same(p.detach(), -_mean(p.shape, 1))

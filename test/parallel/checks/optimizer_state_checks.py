"""Schedulers that know the optimizer from before it was wrapped, and what a load leaves them."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from patterns import assert_same, values
from torch import nn

import perseus.torch.horovod as hvd


def check_a_scheduler_made_before_wrapping() -> None:
    model = nn.Linear(2, 1)
    plain = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    (model(torch.ones(1, 2)).sum() * (1 + hvd.rank())).backward()
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert "horovod" in str(type(optimizer))  # by which libraries tell that it is wrapped
    assert len(set(hvd.allgather(model.bias.grad).tolist())) == 1


def check_a_scheduler_made_before_wrapping_goes_on_when_training_resumes() -> None:
    """Rank 0 loads, as docs/migration.md says; or all do. Its schedule is that of all ranks."""
    for op in (hvd.Average, hvd.Adasum):
        for loads in (hvd.rank() == 0, True):
            whole = _Scheduled(op)
            for _ in range(2):
                whole.step()
            saved = copy.deepcopy(whole.state())
            for _ in range(2):
                whole.step()
            resumed = _Scheduled(op)
            if loads:
                resumed.load(saved)
            hvd.broadcast_optimizer_state(resumed.optimizer, root_rank=0)
            hvd.broadcast_parameters(resumed.model.state_dict(), root_rank=0)
            resumed.scheduler.load_state_dict(hvd.broadcast_object(saved["scheduler"], 0))
            for _ in range(2):
                resumed.step()
            for group, shared in zip(
                resumed.optimizer.param_groups, resumed.plain.param_groups, strict=True
            ):
                assert group is shared
            assert_same(resumed.model.weight, whole.model.weight)
            assert resumed.optimizer.param_groups[0]["lr"] == whole.plain.param_groups[0]["lr"]


class _Lookahead(torch.optim.Optimizer):
    """Steps another optimizer, whose groups are its own, as timm's and SAM do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner
        self.param_groups = inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.inner.param_groups = self.param_groups


class _InPlace(torch.optim.SGD):
    """Loads the rates alone, into the groups that it has."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for group, saved in zip(self.param_groups, state["param_groups"], strict=True):
            group["lr"] = saved["lr"]


def check_optimizers_that_share_or_keep_their_groups_load_them() -> None:
    for inside in (False, True):
        weight = torch.nn.Parameter(torch.zeros(3))
        plain = torch.optim.SGD([weight], lr=0.5)
        plain = _InPlace([weight], lr=0.5) if inside else _Lookahead(plain)
        scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
        optimizer = hvd.DistributedOptimizer(plain, [("weight", weight)])
        state = optimizer.state_dict()
        state["param_groups"][0]["lr"] = 0.25
        optimizer.load_state_dict(state)
        for rate in (0.25, 0.125):
            before = weight.detach().clone()
            optimizer.zero_grad()
            (weight.sum() * (1 + hvd.rank())).backward()
            optimizer.step()
            scheduler.step()
            mean = (1 + hvd.size()) / 2
            assert_same(weight.detach(), before - rate * mean)


class _Scheduled:
    """A training whose scheduler the script has made with the optimizer that it then wraps."""

    def __init__(self, op: int) -> None:
        torch.manual_seed(3)
        self.model = nn.Linear(2, 1)
        # With Adasum, ranks have momenta of their own, which do not survive a broadcast.
        momentum = 0.0 if op == hvd.Adasum else 0.5
        self.plain = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=momentum)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.plain, 1, gamma=0.5)
        self.optimizer = hvd.DistributedOptimizer(self.plain, self.model.named_parameters(), op=op)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(values((3, 2), torch.float32, hvd.rank())).sum().backward()
        self.optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self.scheduler.step()

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }

    def load(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])

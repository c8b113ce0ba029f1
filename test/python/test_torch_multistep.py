"""Sums over steps and the search for NaN in a world of one rank: as on many."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import perseus.torch.horovod as hvd
from perseus import basics
from perseus.errors import NanGradientError


@pytest.fixture
def world(monkeypatch):
    """world(NAME=value, …) is a world with these settings."""

    def start(**settings: object) -> None:
        for name, value in settings.items():
            monkeypatch.setenv(name, str(value))
        hvd.init()

    yield start
    hvd.shutdown()


def _step(model, optimizer, scale: float) -> None:
    optimizer.zero_grad()
    (model(torch.ones(1, 1)).sum() * scale).backward()
    optimizer.step()


def _linear():
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return model, hvd.DistributedOptimizer(optimizer, model.named_parameters())


def test_one_rank_sums_up_too(world):
    world(PERSEUS_ACCUMULATE_N_STEPS=3)
    model, optimizer = _linear()
    seen = []
    for scale in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0):
        _step(model, optimizer, scale)
        seen.append(model.weight.item())
    assert seen == [0.0, 0.0, -7.0, -7.0, -7.0, -63.0]


def test_one_rank_finds_its_own_nan(world):
    world(PERSEUS_ALLREDUCE_NANHECK=1, PERSEUS_ALLREDUCE_NANCHECK_ACTION="raise")
    model, optimizer = _linear()
    with pytest.raises(NanGradientError, match=r"gradient of allreduce\.weight on rank 0"):
        _step(model, optimizer, float("nan"))
    assert not isinstance(NanGradientError(), hvd.HorovodInternalError)
    _step(model, optimizer, 2.0)
    assert model.weight.item() == -2.0


def test_sums_go_with_their_optimizer(world):
    world(PERSEUS_ACCUMULATE_N_STEPS=2)
    model, optimizer = _linear()
    _step(model, optimizer, 1.0)
    hvd.allreduce(torch.ones(1))  # statistics are brought up to date
    held = _staging_bytes()
    del optimizer
    hvd.allreduce(torch.ones(1))
    assert held - _staging_bytes() >= 4


def _staging_bytes() -> int:
    return basics.stats()["staging_bytes"]


@pytest.mark.parametrize("dense", [False, True])
def test_sparse_gradients_are_summed_as_dense_ones_or_refused(world, dense):
    world(PERSEUS_ACCUMULATE_N_STEPS=2)
    table = torch.nn.Embedding(4, 2, sparse=True)
    torch.nn.init.zeros_(table.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(table.parameters(), lr=1.0), table.named_parameters(), sparse_as_dense=dense
    )
    seen = []
    for row in (1, 3):
        optimizer.zero_grad()
        loss = table(torch.tensor([row])).sum() * row
        if not dense:
            with pytest.raises(ValueError, match=r"weight is sparse; .*sparse_as_dense=True"):
                loss.backward()
            return
        loss.backward()
        optimizer.step()
        seen.append(table.weight.detach()[:, 0].tolist())
    assert seen == [[0.0, 0.0, 0.0, 0.0], [0.0, -1.0, 0.0, -3.0]]

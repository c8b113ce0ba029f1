"""The sharded classifier of the examples against one process with all classes and all data."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from patterns import values
from pytorch_sharded_classifier import CLASSES, FEATURES, Backbone, ShardedModel

import perseus.torch.horovod as hvd

BATCH, LR = 6, 0.05


def _batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    images = values((BATCH, 1, 8, 8), torch.float32, rank, step) / 8
    return images, (torch.arange(BATCH) * 3 + rank + step) % CLASSES


def _train_alone(steps: int) -> tuple[Backbone, torch.Tensor, list[float]]:
    torch.manual_seed(0)
    backbone = Backbone()
    classifier = torch.nn.Parameter(torch.nn.Linear(FEATURES, CLASSES, bias=False).weight.detach())
    optimizer = torch.optim.SGD([*backbone.parameters(), classifier], LR, momentum=0.9)
    losses = []
    for step in range(steps):
        batches = [_batch(rank, step) for rank in range(hvd.size())]
        images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
        optimizer.zero_grad()
        loss = F.cross_entropy(backbone(images) @ classifier.T, labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return backbone, classifier.detach(), losses


def check_it_is_one_process_on_the_global_batch() -> None:
    backbone, classifier, losses = _train_alone(steps=4)
    for shards in {hvd.size(), 2} if hvd.size() == 4 else {hvd.size()}:
        torch.manual_seed(0)
        model = ShardedModel(shards, LR)
        for step in range(4):
            loss = hvd.allreduce(model.step(*_batch(hvd.rank(), step)), name="loss")
            assert abs(loss.item() - losses[step]) < 1e-5 * losses[step], (loss, losses[step])
        mine = classifier[model.first : model.first + len(model.shard)]
        torch.testing.assert_close(model.shard.detach(), mine, rtol=1e-4, atol=1e-6)
        for ours, theirs in zip(model.backbone.parameters(), backbone.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
        images, _ = _batch(0, 9)
        expected = (backbone(images) @ classifier.T).argmax(dim=1)
        assert torch.equal(model.classify(images), expected)

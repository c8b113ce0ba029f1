"""The sharded classifier of the examples against one process with all classes and all data."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import mxnet_sharded_classifier
import numpy as np
from example_runs import expect_accuracy
from mx_values import assert_equal, numbers
from mxnet import autograd, gluon
from mxnet_sharded_classifier import CLASSES, ShardedModel, build_backbone

import perseus.mxnet as hvd

BATCH, RATE, STEPS = 6, 0.05, 4


def _batch(rank: int, step: int) -> tuple[Any, Any]:
    images = numbers((BATCH, 1, 8, 8), rank, step) / 8
    return mx.nd.array(images), mx.nd.array((np.arange(BATCH) * 3 + rank + step) % CLASSES)


def _global_batch(step: int) -> list[Any]:
    batches = [_batch(rank, step) for rank in range(hvd.size())]
    return [mx.nd.concat(*parts, dim=0) for parts in zip(*batches, strict=True)]


def _twin(model: ShardedModel) -> tuple[Any, Any]:
    """One process's backbone and whole classifier with the same weights."""
    whole = build_backbone(gluon.nn.BatchNorm)
    images, _ = _batch(0, 0)
    for backbone in (model.backbone, whole):
        backbone(images)
    pairs = zip(
        model.backbone.collect_params().values(), whole.collect_params().values(), strict=True
    )
    for ours, theirs in pairs:
        theirs.set_data(ours.data())
    weight = hvd.allgather(model.classifier.shard, name="shards")
    assert weight.shape[0] == CLASSES
    return whole, weight


def _train_alone(whole: Any, weight: Any) -> list[float]:
    """Its losses; weight is changed."""
    options = {"learning_rate": RATE, "momentum": 0.9}
    trainer = gluon.Trainer(whole.collect_params(), "sgd", options, kvstore=None)
    update = mx.optimizer.get_updater(mx.optimizer.create("sgd", **options))
    weight.attach_grad()
    losses = []
    for step in range(STEPS):
        images, labels = _global_batch(step)
        with autograd.record():
            logits = mx.nd.dot(whole(images), weight, transpose_b=True)
            loss = gluon.loss.SoftmaxCrossEntropyLoss()(logits, labels).mean()
        loss.backward()
        trainer.step(1)
        update(0, weight.grad, weight)
        losses.append(loss.asscalar())
    return losses


def check_it_is_one_process_on_the_global_batch() -> None:
    mx.random.seed(3 + hvd.rank())
    model = ShardedModel(RATE)
    whole, weight = _twin(model)
    expected = _train_alone(whole, weight)
    losses = [model.step(*_batch(hvd.rank(), step)).asscalar() for step in range(STEPS)]
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    first, shard = model.classifier.first, model.classifier.shard
    mine = weight[first : first + len(shard)].asnumpy()
    np.testing.assert_allclose(shard.asnumpy(), mine, rtol=1e-3, atol=1e-5)
    pairs = zip(
        model.backbone.collect_params().values(), whole.collect_params().values(), strict=True
    )
    for ours, theirs in pairs:
        left, right = ours.data().asnumpy(), theirs.data().asnumpy()
        np.testing.assert_allclose(left, right, rtol=1e-3, atol=1e-4, err_msg=ours.name)
    images, _ = _batch(0, 9)
    scores = mx.nd.dot(whole(images), weight, transpose_b=True)
    assert_equal(model.classifier.classify(model.backbone(images)), scores.argmax(axis=1).asnumpy())


def check_it_learns_digits() -> None:
    expect_accuracy(mxnet_sharded_classifier, 0.9, "--epochs", "3")

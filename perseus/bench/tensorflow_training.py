"""Measures training steps of Keras' networks on synthetic images, with Perseus and TensorFlow.

A step is a tape in tf.function. TensorFlow's contender is tf.distribute's
MultiWorkerMirroredStrategy, which has its own variables; the other contenders take turns at
training the same variables. One thread per rank.
"""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from os import environ
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import perseus.tensorflow.horovod as hvd
from perseus.bench import codecs
from perseus.bench.codecs import Codec
from perseus.bench.models import BATCH, CLASSES, TRAINED
from perseus.bench.network import own_address
from perseus.bench.plan import PERSEUS, TENSORFLOW
from perseus.bench.sampling import Contender
from perseus.bench.session import Session, Subject

_BATCHES = 8  # used in turn
_LEARNING_RATE = 0.01
_CALLS, _WARM = 2, 1  # steps of a turn: timed, and before these
_SEED = 50
_Arrays = list[np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Net:
    """A network, and the width in pixels of the square images on which it is trained."""

    make: Callable[[], Any]
    pixels: int


def _application(name: str, pixels: int) -> Net:
    def make() -> Any:
        return getattr(keras.applications, name)(
            weights=None,
            input_shape=(pixels, pixels, 3),
            classes=CLASSES,
            classifier_activation=None,
        )

    return Net(make, pixels)


NETS = {
    "resnet50": _application("ResNet50", TRAINED["resnet50"]),
    "vgg16": _application("VGG16", TRAINED["vgg16"]),
}


def sweep(session: Session) -> Iterator[Subject]:
    """Yield the subject of each network: Perseus without and with codecs, the strategy, and no
    reduction."""
    strategy = _form_strategy(session) if session.plan.peers else None
    for name in session.plan.models or NETS:
        yield subject_of(session, name, NETS[name], strategy)


def _form_strategy(session: Session) -> Any:
    """Return a MultiWorkerMirroredStrategy with all ranks, which must be the first user of
    TensorFlow in the process. A collective."""
    host = own_address()
    with socket.socket() as found:
        found.bind(("", 0))
        port = found.getsockname()[1]
        workers = session.share(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    task = {"type": "worker", "index": session.rank}
    environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
    return tf.distribute.MultiWorkerMirroredStrategy()


class Trainee:
    """A contender's variables, its function that takes a step, and its batches."""

    def __init__(
        self,
        model: Any,
        batches: list[tuple[Any, Any]],
        wrap: Callable[[Any], Any] = lambda tape: tape,
        strategy: Any = None,
    ) -> None:
        """Create the step function for a model.

        batches: pairs of images, float32 of shape (batch, pixels, pixels, 3), and labels, int32 of
            shape (batch,).
        wrap: turns a tape into one that reduces gradients.
        strategy: the one in whose scope the model was created; None without one.
        """
        self.variables = model.trainable_variables
        self._batches = batches
        self._steps = 0
        self.loss = 0.0
        workers = 1 if strategy is None else strategy.num_replicas_in_sync
        with nullcontext() if strategy is None else strategy.scope():
            self._optimizer = keras.optimizers.SGD(1.0)
            self._optimizer.build(self.variables)

        def step(images: Any, labels: Any) -> Any:
            with tf.GradientTape() as tape:
                scores = model(images, training=True)
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores)
                loss = tf.reduce_mean(losses) / workers  # the strategy adds gradients up
            gradients = wrap(tape).gradient(loss, self.variables)
            self._optimizer.apply_gradients(zip(gradients, self.variables, strict=True))
            return loss

        def step_of_strategy(images: Any, labels: Any) -> Any:
            return strategy.run(step, args=(images, labels))

        self._step = tf.function(step if strategy is None else step_of_strategy)

    def first_move(self) -> _Arrays:
        """Return the gradients of the first batch, and restore all variables.

        With SGD at a learning rate of 1, they are what a step subtracts from the variables.
        """
        before = self.values()
        self._step(*self._batches[0])
        moved = [old - new for old, new in zip(before, self.values(), strict=True)]
        for variable, value in zip(self.variables, before, strict=True):
            variable.assign(value)
        return moved

    def values(self) -> _Arrays:
        """Return copies of the variables' values."""
        return [np.array(variable) for variable in self.variables]

    def learn_at(self, rate: float) -> None:
        """Set the learning rate, from the next step on."""
        self._optimizer.learning_rate.assign(rate)

    def take_step(self) -> None:
        """Take a step with the next batch."""
        self.loss = float(self._step(*self._batches[self._steps % len(self._batches)]))
        self._steps += 1


def subject_of(session: Session, model: str, net: Net, strategy: Any = None) -> Subject:
    """Return the contenders for one network, after verifying the first step of each.

    A collective.
    """
    keras.utils.set_random_seed(_SEED)
    shared = net.make()
    random = np.random.default_rng(_SEED + 1 + session.rank)
    shape = (BATCH, net.pixels, net.pixels, 3)
    batches = [
        (
            tf.constant(random.standard_normal(shape, np.float32)),
            tf.constant(random.integers(CLASSES, size=BATCH, dtype=np.int32)),
        )
        for _ in range(_BATCHES)
    ]
    idle = Trainee(shared, batches)
    exact = _averaged(idle.first_move())
    size = 4 * sum(gradient.size for gradient in exact)
    plain = Codec(codecs.PLAIN)

    def contender(
        trainee: Trainee, rate: float, limit: float | None, rotates: bool = False
    ) -> Contender:
        proven = limit is None or _near(exact, trainee.first_move(), limit)
        trainee.learn_at(rate)

        def check() -> bool:
            if rotates:
                hvd.synchronize_parameters()  # ranks have different ones until then
            return session.same(trainee.values()) and proven and math.isfinite(trainee.loss)

        return Contender(
            PERSEUS, "training", lambda _: trainee.take_step(), check=check,
            calls=_CALLS, warm=_WARM, warm_ups=1,
        )  # fmt: skip

    def ours(codec: Codec) -> Contender:
        arguments = codec.arguments(TENSORFLOW)
        trainee = Trainee(
            shared, batches, lambda tape: hvd.DistributedGradientTape(tape, **arguments)
        )
        rotates = codec.name == "rotate"
        made = contender(trainee, _LEARNING_RATE, codec.relative_error, rotates)
        return replace(made, codec=codec.label, **session.payloads(codec, size))

    wanted = codecs.parse(",".join(session.plan.codecs)) or [Codec(codecs.DEFAULT)]
    contenders = [ours(plain), *(ours(codec) for codec in wanted if codec != plain)]
    if strategy is not None:
        keras.utils.set_random_seed(_SEED)
        with strategy.scope():
            own = net.make()
        trainee = Trainee(own, batches, strategy=strategy)
        made = contender(trainee, _LEARNING_RATE, plain.relative_error)
        contenders.append(replace(made, name="multiworker"))
    # It does not communicate, which bounds the speed of the others. Its learning rate is 0, so that
    # the variables stay equal on all ranks.
    alone = contender(idle, 0.0, None)
    contenders.append(replace(alone, name="compute-only", operation="compute"))
    settings = {
        "model": model, "batch": str(BATCH), "pixels": str(net.pixels), "framework": TENSORFLOW,
    }  # fmt: skip
    return Subject("training", size, contenders, len(exact), settings, images=BATCH)


def _averaged(gradients: _Arrays) -> _Arrays:
    """Average gradients over all ranks by allreduce(), which is exact."""
    return [
        hvd.allreduce(tf.constant(gradient), op=hvd.Average, name=f"bench.exact.{i}").numpy()
        for i, gradient in enumerate(gradients)
    ]


def _near(exact: _Arrays, found: _Arrays, limit: float) -> bool:
    """Return whether |found - exact| < limit · |exact| over all variables, on this rank."""
    error = sum(float(np.square(a - b).sum()) for a, b in zip(exact, found, strict=True))
    return error < limit * limit * sum(float(np.square(a).sum()) for a in exact)

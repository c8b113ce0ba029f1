"""A rank of the elastic job that soak.py disturbs: it trains a small network on random data.

    perseusrun … python soak_rank.py DIRECTORY STEPS

Ends after STEPS steps, or once DIRECTORY/stop exists. Writes lines of JSON into DIRECTORY/log.PID:
{"step", "at", "world", "size", "loss"} for each step of rank 0, {"rank", "world", "pid", "host",
"at"} for each world that it enters, and {"noticed", "world"} when the world has ended under it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import perseus.arrays as hvd
from perseus import basics, elastic

DIRECTORY, STEPS = Path(sys.argv[1]), int(sys.argv[2])
INPUTS, HIDDEN, BATCH, RATE = 32, 512, 64, 0.02
TEACHER = np.random.default_rng(1).normal(size=(INPUTS, 1))


def note(**line: Any) -> None:
    with (DIRECTORY / f"log.{os.getpid()}").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def loss_and_gradients(weights: list[Any], step: int) -> tuple[float, list[Any]]:
    first, second = weights
    rows = np.random.default_rng([step, hvd.rank()]).normal(size=(BATCH, INPUTS))
    hidden = np.maximum(rows @ first, 0)
    error = hidden @ second - np.abs(rows @ TEACHER)
    back = (error @ second.T) * (hidden > 0)
    return float(np.mean(error**2)), [rows.T @ back / BATCH, hidden.T @ error / BATCH]


def train(state: Any) -> None:
    world = basics._world.epoch
    host = socket.gethostname()
    note(rank=hvd.rank(), world=world, pid=os.getpid(), host=host, at=time.time())
    try:
        while state.step < STEPS:
            loss, gradients = loss_and_gradients(state.weights, state.step)
            handles = [hvd.allreduce_async(g, f"gradient.{i}") for i, g in enumerate(gradients)]
            averages = [hvd.synchronize(handle) for handle in handles]
            total = hvd.allreduce(np.array([loss, (DIRECTORY / "stop").exists()]), "loss")
            state.weights = [
                weight - RATE * average
                for weight, average in zip(state.weights, averages, strict=True)
            ]
            state.step += 1
            if hvd.rank() == 0:
                note(step=state.step, at=time.time(), world=world, size=hvd.size(), loss=total[0])
            state.commit()
            if total[1] > 0:
                return
    except elastic.HorovodInternalError:
        note(noticed=time.time(), world=world)
        raise


hvd.init()
generator = np.random.default_rng(2)
weights = [
    generator.normal(size=(INPUTS, HIDDEN)) / INPUTS**0.5,
    generator.normal(size=(HIDDEN, 1)) / HIDDEN**0.5,
]
state = elastic.ObjectState(weights=weights, step=0)
elastic.run_fn(train)(state)
hvd.shutdown()

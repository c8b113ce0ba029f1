"""Trains one cell of the table on the ranks that perseusrun starts; rank 0 prints the scores.

    perseusrun -np 2 python worker.py digits sgd 1.0 1.0 0 20 '["LocalSGD", {"every": 8}]'

prints a line of JSON for each of the seeds 0 to 19. The numbers before them are those of a
plan.Cell: its scale and its length. The last argument is a function of hvd with its
arguments; without it, hvd.DistributedOptimizer wraps the optimizer.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tasks import TASKS, Task

import perseus.torch.horovod as hvd

_OPTIMIZERS = {
    "sgd": lambda parameters, rate: torch.optim.SGD(parameters, rate, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": lambda parameters, rate: torch.optim.AdamW(parameters, rate, weight_decay=0.01),
}


def _rate(done: float) -> float:
    """The learning rate after a part of the steps, relative to the largest.

    It rises at first, so that single runs do not diverge by chance, exact ones or others, and falls
    to zero, so that the end does not depend on the last few examples.
    """
    rise = 0.1
    if done < rise:
        return done / rise
    return 0.5 + 0.5 * math.cos(math.pi * (done - rise) / (1 - rise))


def _train(
    task: Task, optimizer_name: str, rate: float, seed: int, wrap: Callable[..., Any]
) -> float:
    torch.manual_seed(seed)
    model = task.model()
    named = [(f"{seed}.{name}", each) for name, each in model.named_parameters()]
    optimizer = wrap(_OPTIMIZERS[optimizer_name](model.parameters(), rate), named_parameters=named)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step / task.steps))
    model.train()
    for batch in task.batches(seed, hvd.rank(), hvd.size()):
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
        schedule.step()
    hvd.synchronize_parameters()
    model.eval()
    return task.evaluate(model)


def main() -> None:
    """See the module."""
    name, optimizer, scale, length, first, end, *wrapping = sys.argv[1:]
    wrapper, options = json.loads(wrapping[0]) if wrapping else ("DistributedOptimizer", {})
    torch.set_num_threads(1)
    hvd.init()
    task = TASKS[name]
    task.steps = round(task.steps * float(length))
    rate = task.rates[optimizer] * float(scale)
    for seed in range(int(first), int(end)):
        score = _train(task, optimizer, rate, seed, partial(getattr(hvd, wrapper), **options))
        if hvd.rank() == 0:
            print(json.dumps({"seed": seed, "score": score}), flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()

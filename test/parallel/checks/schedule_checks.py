"""Training with PERSEUS_OFFLINE_NEG=1: the same parameters, and nothing is sent but data."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from patterns import world_with
from pytorch_mnist import Net

import perseus
import perseus.torch.horovod as hvd

# Where ranks share cores an order may be frozen, broken and learnt anew: then it takes more epochs.
STEPS, SILENT, EPOCHS = 50, 4, 12


def _train(offline: int, epochs: int) -> tuple[list[torch.Tensor], int, float]:
    """Train until an epoch is silent on every rank, `epochs` at the most.

    Returns the parameters, the number of epochs and the fewest messages that a rank sent in SILENT
    steps in a row of the last one, the most of all ranks.
    """
    with world_with(PERSEUS_OFFLINE_NEG=offline):
        torch.manual_seed(3)
        model = Net()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            named_parameters=model.named_parameters(),
        )
        generator = torch.Generator().manual_seed(10 + hvd.rank())
        trained, fewest = 0, 1.0
        while trained < epochs and fewest > 0:
            trained += 1
            messages = []
            for _ in range(STEPS):
                messages.append(perseus.stats()["messages"])
                optimizer.zero_grad()
                images = torch.rand(4, 1, 8, 8, generator=generator)
                loss = F.nll_loss(model(images), torch.randint(0, 10, (4,), generator=generator))
                loss.backward()
                optimizer.step()
            sent = [
                after - before for before, after in zip(messages, messages[SILENT:], strict=False)
            ]
            # Reduced once an epoch: breaks no schedule.
            fewest = hvd.allreduce(torch.tensor([min(sent)]), op=hvd.Max, name="epoch.sent").item()
    return [parameter.detach().clone() for parameter in model.parameters()], trained, fewest


def check_schedule_trains_the_same_bits_in_silence() -> None:
    offline, epochs, offline_messages = _train(1, EPOCHS)
    online, _, online_messages = _train(0, epochs)
    for mine, right in zip(offline, online, strict=True):
        assert torch.equal(mine.view(torch.int32), right.view(torch.int32))
    assert online_messages > 0
    assert offline_messages == 0, offline_messages

"""Training with PERSEUS_OFFLINE_NEG=1: the same parameters, and nothing is sent but data."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from patterns import world_with
from pytorch_mnist import Net

import perseus
import perseus.torch.horovod as hvd

# Where ranks share cores an order may be frozen, broken and learnt anew a few times.
STEPS, SILENT = 60, 4


def _train(offline: int) -> tuple[list[torch.Tensor], int]:
    """Parameters after the last step, and the fewest messages of SILENT steps in a row."""
    with world_with(PERSEUS_OFFLINE_NEG=offline):
        torch.manual_seed(3)
        model = Net()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            named_parameters=model.named_parameters(),
        )
        generator = torch.Generator().manual_seed(10 + hvd.rank())
        messages = []
        for step in range(STEPS):
            messages.append(perseus.stats()["messages"])
            optimizer.zero_grad()
            images = torch.rand(4, 1, 8, 8, generator=generator)
            loss = F.nll_loss(model(images), torch.randint(0, 10, (4,), generator=generator))
            loss.backward()
            optimizer.step()
            if step == 7:
                mean = hvd.allreduce(torch.tensor([float(hvd.rank())]), name="epoch.mean")
                assert mean.item() == (hvd.size() - 1) / 2
    parameters = [parameter.detach().clone() for parameter in model.parameters()]
    sent = [after - before for before, after in zip(messages, messages[SILENT:], strict=False)]
    return parameters, min(sent)


def check_schedule_trains_the_same_bits_in_silence() -> None:
    online, online_messages = _train(0)
    offline, offline_messages = _train(1)
    for mine, right in zip(offline, online, strict=True):
        assert torch.equal(mine.view(torch.int32), right.view(torch.int32))
    assert online_messages > 0
    assert offline_messages == 0, offline_messages

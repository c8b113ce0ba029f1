"""Trains a small network with Lightning on 2 processes of this host; only the first import is new.

    python lightning_ddp.py

Lightning starts the second process itself; under torchrun it uses what is there.
"""

import os

import perseus  # isort: skip  # noqa: F401 - process groups run on Perseus from here on
import pytorch_lightning as lightning
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    """Tells whether the sum of 16 numbers is positive."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2)
        )

    def training_step(self, batch, _):
        """The loss of one batch."""
        loss = F.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        """Called by fit."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main():
    lightning.seed_everything(42)
    numbers = torch.randn(1024, 16)
    data = TensorDataset(numbers, (numbers.sum(1) > 0).long())
    given = os.environ  # torchrun's or perseusrun's; else Lightning starts the ranks
    devices = int(given.get("LOCAL_WORLD_SIZE") or given.get("PERSEUS_LOCAL_SIZE") or 2)
    hosts = int(given.get("WORLD_SIZE") or given.get("PERSEUS_SIZE") or devices) // devices
    trainer = lightning.Trainer(
        accelerator="cpu", devices=devices, num_nodes=hosts, strategy="ddp", max_epochs=3,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    model = Classifier()
    trainer.fit(model, DataLoader(data, batch_size=32, shuffle=True))
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    everywhere = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, weights)
    if trainer.is_global_zero:
        alike = all(torch.equal(other, weights) for other in everywhere)
        print(f"backend {dist.get_backend()}, loss {trainer.callback_metrics['loss']:.6f}")
        print(f"the ranks' weights are {'equal' if alike else 'different'}")


if __name__ == "__main__":
    main()

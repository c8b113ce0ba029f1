"""Trains a small CNN on handwritten digits, written for Horovod with the one import swapped.

    perseusrun -np 2 python pytorch_mnist.py --plot loss.png

Without --data-dir the 1797 digits that ship with scikit-learn are used (8 x 8 pixels); with it,
MNIST's own idx files (train-images-idx3-ubyte and so on, plain or .gz).
"""

from pathlib import Path

import mnist_data
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import perseus.torch.horovod as hvd

with mnist_data.extra():
    from tqdm import tqdm


class Net(nn.Module):
    """Two convolutions and two linear layers; images are (batch, 1, side, side), side 8 or 28."""

    def __init__(self, side: int = 8) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(32 * (side // 4) ** 2, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def load_digits(directory=None):
    """mnist_data.load as two datasets, images with their channel in front."""
    return [
        TensorDataset(
            torch.from_numpy(images.transpose(0, 3, 1, 2).copy()), torch.from_numpy(labels).long()
        )
        for images, labels in mnist_data.load(directory)
    ]


def train(model, optimizer, loader, sampler, epochs):
    """Returns the mean loss over all ranks at every step."""
    model.train()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))
    losses = []
    with tqdm(total=epochs * len(loader), desc="training", disable=hvd.rank() != 0) as bar:
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for images, labels in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                scheduler.step()
                losses.append(loss.detach())
                bar.update()
            bar.set_postfix(epoch=epoch + 1, loss=f"{losses[-1].item():.3f}")
    return hvd.allreduce(torch.stack(losses), name="losses").tolist()


def test(model, dataset):
    """Mean loss and accuracy over the whole test set, each rank looking at its share."""
    model.eval()
    images, labels = (tensor[hvd.rank() :: hvd.size()] for tensor in dataset.tensors)
    with torch.no_grad():
        scores = model(images)
    sums = torch.stack(
        [
            F.cross_entropy(scores, labels, reduction="sum"),
            (scores.argmax(1) == labels).sum().float(),
            torch.tensor(float(len(labels))),
        ]
    )
    loss, correct, count = hvd.allreduce(sums, op=hvd.Sum, name="test").tolist()
    return loss / count, correct / count


def plot(losses, path):
    """Save the loss curve as a picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    axes.plot(losses, linewidth=1, alpha=0.4, label="each step")
    window = min(20, len(losses))
    smooth = np.convolve(losses, np.ones(window) / window, "valid")
    axes.plot(range(window - 1, len(losses)), smooth, linewidth=2, label=f"mean of {window} steps")
    axes.legend()
    axes.set(xlabel="step", ylabel="training loss, mean over ranks", yscale="log")
    axes.set_title(f"digits on {hvd.size()} rank{'s' if hvd.size() > 1 else ''}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main():
    parser = mnist_data.parser("A small CNN on handwritten digits")
    parser.add_argument("--plot", type=Path, help="save the loss curve to this PNG")
    arguments = parser.parse_args()
    if arguments.plot:
        with mnist_data.extra():  # before there is something to lose
            import matplotlib  # noqa: F401
    hvd.init()
    torch.manual_seed(arguments.seed)
    train_set, test_set = load_digits(arguments.data_dir)

    sampler = DistributedSampler(train_set, hvd.size(), hvd.rank(), seed=arguments.seed)
    loader = DataLoader(train_set, batch_size=arguments.batch_size, sampler=sampler)

    model = Net(side=train_set.tensors[0].shape[-1])
    # The batch grows with the number of ranks, and the learning rate with it.
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    losses = train(model, optimizer, loader, sampler, arguments.epochs)
    loss, accuracy = test(model, test_set)
    if hvd.rank() == 0:
        print(f"test loss: {loss:.4f}")
        print(f"test accuracy: {accuracy:.4f}")
        if arguments.plot:
            plot(losses, arguments.plot)
            print(f"loss curve: {arguments.plot}")
    hvd.shutdown()


if __name__ == "__main__":
    main()

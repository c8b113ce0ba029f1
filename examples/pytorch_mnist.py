"""Trains a small CNN on handwritten digits, written for Horovod with the one import swapped.

    perseusrun -np 2 python pytorch_mnist.py --plot loss.png

Without --data-dir the 1797 digits that ship with scikit-learn are used (8 x 8 pixels); with it,
MNIST's own idx files (train-images-idx3-ubyte and so on, plain or .gz).
"""

import argparse
import gzip
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

import perseus.torch.horovod as hvd


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


def load_digits():
    """scikit-learn's digits: every fifth one is for testing."""
    from sklearn import datasets

    digits = datasets.load_digits()
    images = torch.tensor(digits.images / 16.0, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(digits.target, dtype=torch.int64)
    test = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(images[~test], labels[~test]), TensorDataset(images[test], labels[test])


def load_mnist(directory: Path):
    """MNIST from its idx files: big-endian sizes behind a magic number, then bytes."""

    def read(name):
        path = directory / name
        opener = open if path.exists() else gzip.open
        with opener(path if path.exists() else directory / f"{name}.gz", "rb") as file:
            data = file.read()
        shape = [int.from_bytes(data[4 + 4 * i : 8 + 4 * i], "big") for i in range(data[3])]
        return torch.from_numpy(
            np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(shape).copy()
        )

    def dataset(kind):
        images = read(f"{kind}-images-idx3-ubyte").unsqueeze(1).float() / 255.0
        return TensorDataset(images, read(f"{kind}-labels-idx1-ubyte").long())

    return dataset("train"), dataset("t10k")


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
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot(losses, linewidth=1, alpha=0.4, label="each step")
    window = min(20, len(losses))
    smooth = np.convolve(losses, np.ones(window) / window, "valid")
    axes.plot(range(window - 1, len(losses)), smooth, linewidth=2, label=f"mean of {window} steps")
    axes.legend()
    axes.set(xlabel="step", ylabel="training loss, mean over ranks", yscale="log")
    axes.set_title(f"digits on {hvd.size()} rank{'s' if hvd.size() > 1 else ''}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def parse_arguments():
    parser = argparse.ArgumentParser(description="A small CNN on handwritten digits")
    parser.add_argument("--epochs", type=int, default=15, help="passes over the data (15)")
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step (32)")
    parser.add_argument("--lr", type=float, default=0.04, help="learning rate of one rank (0.04)")
    parser.add_argument("--seed", type=int, default=42, help="for weights and shuffling (42)")
    parser.add_argument("--data-dir", type=Path, help="folder with MNIST's idx files")
    parser.add_argument("--plot", type=Path, help="save the loss curve to this PNG")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    hvd.init()
    torch.manual_seed(arguments.seed)
    train_set, test_set = load_mnist(arguments.data_dir) if arguments.data_dir else load_digits()

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

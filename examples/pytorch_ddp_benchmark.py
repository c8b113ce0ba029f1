"""Measures the training speed of ResNet-50 under DistributedDataParallel, on random images.

    torchrun --nproc-per-node 2 pytorch_ddp_benchmark.py

Plain PyTorch but for the first import, which lets the process group run on Perseus. Without that
line the same script measures gloo or NCCL.
"""

import argparse
import os
import time

import perseus  # isort: skip  # before torch, though after it works, too
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BLOCKS = {"resnet50": (3, 4, 6, 3), "resnet101": (3, 4, 23, 3), "resnet152": (3, 8, 36, 3)}


class Bottleneck(nn.Module):
    """Three convolutions, with the stride in the second as in torchvision, around a shortcut."""

    def __init__(self, inputs, width, stride):
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = nn.Identity()
        if inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.downsample(x))


def resnet(blocks):
    """ResNet (He et al., 2015) for 1000 classes, with so many blocks in its stages."""
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    inputs = 64
    for stage, count in enumerate(blocks):
        width = 64 * 2**stage
        for block in range(count):
            layers.append(Bottleneck(inputs, width, 2 if stage and not block else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


def parse_arguments():
    parser = argparse.ArgumentParser(description="Training speed of a ResNet under DDP")
    parser.add_argument("--model", choices=BLOCKS, default="resnet50", help="(resnet50)")
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step (32)")
    parser.add_argument("--image-size", type=int, default=224, help="pixels in a row (224)")
    parser.add_argument("--num-warmup-batches", type=int, default=10, help="not measured (10)")
    parser.add_argument("--num-batches-per-iter", type=int, default=10, help="(10)")
    parser.add_argument("--num-iters", type=int, default=10, help="measurements (10)")
    parser.add_argument("--no-cuda", action="store_true", help="train on the CPU")
    # torch.distributed.launch passes one of them, torchrun sets LOCAL_RANK.
    parser.add_argument(
        "--local-rank", "--local_rank", type=int, default=os.environ.get("LOCAL_RANK", "0"),
        help="this process's number on its host",
    )  # fmt: skip
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    device = torch.device("cpu")
    if torch.cuda.is_available() and not arguments.no_cuda:
        device = torch.device("cuda", arguments.local_rank)
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # DDP starts from rank 0's weights

    model = DistributedDataParallel(resnet(BLOCKS[arguments.model]).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    shape = (arguments.batch_size, 3, arguments.image_size, arguments.image_size)
    images = torch.randn(shape, device=device)
    labels = torch.randint(1000, (arguments.batch_size,), device=device)

    def train(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()

    def say(text):
        if rank == 0:
            print(text, flush=True)

    kind = "GPU" if device.type == "cuda" else "CPU"
    say(f"Perseus {perseus.__version__}, backend {dist.get_backend()}")
    say(f"Model: {arguments.model}\nBatch size: {arguments.batch_size}\nNumber of {kind}s: {size}")
    say("Running warmup...")
    train(arguments.num_warmup_batches)
    say("Running benchmark...")
    rates = torch.empty(arguments.num_iters, dtype=torch.float64)
    for iteration in range(arguments.num_iters):
        start = time.perf_counter()
        train(arguments.num_batches_per_iter)
        seconds = time.perf_counter() - start
        rates[iteration] = arguments.batch_size * arguments.num_batches_per_iter / seconds
        say(f"Iter #{iteration}: {rates[iteration]:.1f} img/sec per {kind}")

    everywhere = rates.to(device)
    dist.all_reduce(everywhere)
    mean, spread = everywhere.mean().item(), 1.96 * everywhere.std(correction=0).item()
    say(f"Img/sec per {kind}: {mean / size:.1f} +-{spread / size:.1f}")
    say(f"Total img/sec on {size} {kind}(s): {mean:.1f} +-{spread:.1f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

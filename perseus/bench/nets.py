"""ResNet-50, VGG-16 and GPT-2 as torch modules, with as many parameters as models.py lists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from perseus.bench.models import TRAINED


class _Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int, project: bool) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module = nn.Identity()
        if project:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        y = torch.relu(self.bn2(self.conv2(y)))
        return torch.relu(self.bn3(self.conv3(y)) + self.downsample(x))


class ResNet50(nn.Module):
    """He et al., 2015, with the stride in the 3x3 kernels, as in torchvision."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self._pool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = _stage(64, 64, 3, 1)
        self.layer2 = _stage(256, 128, 4, 2)
        self.layer3 = _stage(512, 256, 6, 2)
        self.layer4 = _stage(1024, 512, 3, 2)
        self.fc = nn.Linear(2048, 1000)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return scores of shape (batch, 1000) for images of shape (batch, 3, height, width)."""
        x = self._pool(torch.relu(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        result: torch.Tensor = self.fc(x.mean((2, 3)))
        return result


def _stage(inputs: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    first = _Bottleneck(inputs, width, stride, project=True)
    others = (_Bottleneck(4 * width, width, 1, project=False) for _ in range(blocks - 1))
    return nn.Sequential(first, *others)


class VGG16(nn.Module):
    """Simonyan and Zisserman, 2014, configuration D; features are pooled to 7x7."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
            for _ in range(count):
                layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU()]
                inputs = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self._pool = nn.AdaptiveAvgPool2d(7)
        self.classifier = nn.Sequential(
            nn.Linear(512 * 7 * 7, 4096), nn.ReLU(), nn.Dropout(),
            nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout(),
            nn.Linear(4096, 1000),
        )  # fmt: skip

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return scores of shape (batch, 1000) for images of shape (batch, 3, height, width).

        height, width: 32 or more.
        """
        result: torch.Tensor = self.classifier(self._pool(self.features(images)).flatten(1))
        return result


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.ln_1 = nn.LayerNorm(width)
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.c_attn(self.ln_1(x)).unflatten(-1, (3, self._heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.c_proj(mixed.transpose(1, 2).flatten(2))
        result: torch.Tensor = x + self.mlp(self.ln_2(x))
        return result


class GPT2(nn.Module):
    """GPT-2 small (Radford et al., 2019), without dropout; the head is the embedding."""

    words = 50257
    length = 1024  # of a sequence, at most

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(self.words, 768)
        self.wpe = nn.Embedding(self.length, 768)
        self.h = nn.Sequential(*(_Block(768, 12) for _ in range(12)))
        self.ln_f = nn.LayerNorm(768)
        for embedding in (self.wte, self.wpe):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return scores of shape (batch, length, words) for tokens of shape (batch, length)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.h(self.wte(tokens) + self.wpe(positions))
        return functional.linear(self.ln_f(x), self.wte.weight)


@dataclass(frozen=True)
class Net:
    """A network, and the width in pixels of the square images on which it is trained."""

    make: Callable[[], nn.Module]
    pixels: int


NETS = {
    "resnet50": Net(ResNet50, TRAINED["resnet50"]),
    "vgg16": Net(VGG16, TRAINED["vgg16"]),
}

"""Gradient sizes of well-known models: elements of each parameter, in the order of parameters().

Computed from the published architectures; totals are pinned by a test. Pure functions, thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable


def resnet50() -> list[int]:
    """He et al. 2015, table 1, as in torchvision: 161 tensors, 25,557,032 parameters."""
    sizes = [64 * 3 * 7 * 7, 64, 64]
    width_in = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            width_out = 4 * width
            sizes += [width * width_in, width, width]
            sizes += [width * width * 9, width, width]
            sizes += [width_out * width, width_out, width_out]
            if block == 0:
                sizes += [width_out * width_in, width_out, width_out]
            width_in = width_out
    return [*sizes, 1000 * 2048, 1000]


def vgg16() -> list[int]:
    """Simonyan and Zisserman 2014, configuration D: 32 tensors, 138,357,544 parameters."""
    sizes = []
    width_in = 3
    for width, layers in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(layers):
            sizes += [width * width_in * 9, width]
            width_in = width
    for inputs, outputs in ((512 * 7 * 7, 4096), (4096, 4096), (4096, 1000)):
        sizes += [inputs * outputs, outputs]
    return sizes


def bert_base() -> list[int]:
    """Devlin et al. 2018, uncased, with pooler: 199 tensors, 109,482,240 parameters."""
    width, inner = 768, 3072
    sizes = [30522 * width, 512 * width, 2 * width, width, width]
    for _ in range(12):
        sizes += [width * width, width] * 4  # query, key, value, output
        sizes += [width, width, inner * width, inner, width * inner, width, width, width]
    return [*sizes, width * width, width]


def gpt2() -> list[int]:
    """Radford et al. 2019, small, head tied to the embedding: 148 tensors, 124,439,808."""
    width = 768
    sizes = [50257 * width, 1024 * width]
    for _ in range(12):
        sizes += [width, width, width * 3 * width, 3 * width, width * width, width]
        sizes += [width, width, width * 4 * width, 4 * width, 4 * width * width, width]
    return [*sizes, width, width]


MODELS: dict[str, Callable[[], list[int]]] = {
    "resnet50": resnet50,
    "vgg16": vgg16,
    "bert-base": bert_base,
    "gpt2": gpt2,
}

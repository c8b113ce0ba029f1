"""The parameters of well-known models: their names and shapes, in the order of parameters().

They follow the published architectures; a test checks the totals. Pure functions, thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable

Shapes = list[tuple[str, tuple[int, ...]]]


def resnet50() -> Shapes:
    """ResNet-50 (He et al., 2015, table 1), as in torchvision: 161 tensors, 25,557,032 values."""
    found = [("conv1.weight", (64, 3, 7, 7)), *_pair("bn1", 64)]
    inputs = 64
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), 1):
        for block in range(blocks):
            name = f"layer{stage}.{block}."
            kernels = ((width, inputs, 1), (width, width, 3), (4 * width, width, 1))
            for i, (outputs, channels, size) in enumerate(kernels, 1):
                found.append((f"{name}conv{i}.weight", (outputs, channels, size, size)))
                found += _pair(f"{name}bn{i}", outputs)
            if block == 0:
                found.append((f"{name}downsample.0.weight", (4 * width, inputs, 1, 1)))
                found += _pair(f"{name}downsample.1", 4 * width)
            inputs = 4 * width
    return [*found, *_pair("fc", 1000, 2048)]


def vgg16() -> Shapes:
    """VGG-16 (Simonyan and Zisserman, 2014, configuration D): 32 tensors, 138,357,544 values."""
    found: Shapes = []
    inputs, layer = 3, 0
    for width, layers in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(layers):
            found += _pair(f"features.{layer}", width, inputs, 3, 3)
            inputs = width
            layer += 2  # with its ReLU
        layer += 1  # pooling
    shapes = ((4096, 512 * 7 * 7), (4096, 4096), (1000, 4096))
    for i, shape in enumerate(shapes):
        found += _pair(f"classifier.{3 * i}", *shape)  # with ReLU and dropout
    return found


def bert_base() -> Shapes:
    """BERT base (Devlin et al., 2018), uncased, with pooler: 199 tensors, 109,482,240 values."""
    width, inner = 768, 3072
    found: Shapes = [
        ("embeddings.word_embeddings.weight", (30522, width)),
        ("embeddings.position_embeddings.weight", (512, width)),
        ("embeddings.token_type_embeddings.weight", (2, width)),
        *_pair("embeddings.LayerNorm", width),
    ]
    for layer in range(12):
        name = f"encoder.layer.{layer}."
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            found += _pair(f"{name}attention.{part}", width, width)
        found += _pair(f"{name}attention.output.LayerNorm", width)
        found += _pair(f"{name}intermediate.dense", inner, width)
        found += _pair(f"{name}output.dense", width, inner)
        found += _pair(f"{name}output.LayerNorm", width)
    return [*found, *_pair("pooler.dense", width, width)]


def gpt2() -> Shapes:
    """GPT-2 small (Radford et al., 2019), with a tied head: 148 tensors, 124,439,808 values."""
    width = 768
    found: Shapes = [("wte.weight", (50257, width)), ("wpe.weight", (1024, width))]
    for layer in range(12):
        name = f"h.{layer}."
        found += _pair(f"{name}ln_1", width)
        found += _transposed(f"{name}attn.c_attn", width, 3 * width)
        found += _transposed(f"{name}attn.c_proj", width, width)
        found += _pair(f"{name}ln_2", width)
        found += _transposed(f"{name}mlp.c_fc", width, 4 * width)
        found += _transposed(f"{name}mlp.c_proj", 4 * width, width)
    return [*found, *_pair("ln_f", width)]


def _pair(name: str, outputs: int, *inputs: int) -> Shapes:
    """Return a layer's weight and bias."""
    return [(f"{name}.weight", (outputs, *inputs)), (f"{name}.bias", (outputs,))]


def _transposed(name: str, inputs: int, outputs: int) -> Shapes:
    """Return a layer's weight and bias as in GPT-2, whose weights have the inputs first."""
    return [(f"{name}.weight", (inputs, outputs)), (f"{name}.bias", (outputs,))]


MODELS: dict[str, Callable[[], Shapes]] = {
    "resnet50": resnet50,
    "vgg16": vgg16,
    "bert-base": bert_base,
    "gpt2": gpt2,
}
# The models that the case training supports, and the width of their square images in pixels.
TRAINED = {"resnet50": 64, "vgg16": 32}
BATCH = 16
CLASSES = 1000

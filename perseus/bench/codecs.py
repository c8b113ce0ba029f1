"""The codecs of perseus-bench: their names on the command line and their bounds in bytes and error.

Errors are those of an average of standard normal values over the ranks. Immutable, thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from perseus.bench.plan import TORCH

DEFAULT = "default"  # the codec of an optimizer without `compression=`
PLAIN = "none"

# Top-k may send 1.25 k elements. An index costs as much as a value; each takes at least 2 bytes.
_MOST_ELEMENTS = 1.25
_INTEGER_BLOCK = 32  # the fewest elements in a block, which has scales of 4 bytes, or 16 with int2
_SUM_ROUNDING = 2.0**-22  # the rounding error of a float32 sum, per rank
_HALF = 3 * 2.0**-11  # the largest error of float16, see _KINDS

# Values that leave gradients within the bounds of DEFAULT, of the variables that choose codecs.
_USUAL = {
    "PERSEUS_ALLREDUCE_DTYPE": ("auto", "1", "2"),
    "PERSEUS_ALLREDUCE_CODEC": ("dtype",),
    "LIGHT_TOPK_ALLREDUCE": ("0", "false", "off", "no"),
    "PERSEUS_DOWNSAMPLE_N_ELEMENTS": ("1",),
}


def _exactly(share: float) -> Callable[[float, int], tuple[float, float]]:
    return lambda argument, ranks: (share, share)


@dataclass(frozen=True)
class _Kind:
    """The bounds of one kind of codec.

    share: share(argument, ranks) returns the least and the most bytes, relative to a plain
        allreduce.
    largest: the largest error of an element, relative to the largest input.
    rms: the root mean square error of all elements, absolute. Both are None if residuals make the
        error of a single step unbounded.
    relative: the error relative to a tensor's norm, for gradients of any distribution.
    argument: the type of the codec's argument; None = it takes none.
    lost: the part of `largest` that no residual holds, if residuals make `largest` unbounded.
    """

    share: Callable[[float, int], tuple[float, float]]
    largest: float | None
    rms: float | None
    relative: float
    argument: type[float] | type[int] | None = None
    lost: float = 0.0


def _integer_share(bits: int, scales: int = 1) -> Callable[[float, int], tuple[float, float]]:
    most = (bits / 8 + 4 * scales / _INTEGER_BLOCK) / 4
    return lambda argument, ranks: (bits / 32, most)


def _topk_share(ratio: float, ranks: int) -> tuple[float, float]:
    """Return the share of top-k: a reduce-scatter of k elements per rank, then an allgather of the
    owners' unions, each of which may have up to k elements as well."""
    pairs = 2 * _MOST_ELEMENTS * ratio
    return ratio / 2, min(1.0, pairs * (1 + ranks) / 2)


# float16 and bfloat16 round to 11 and 8 bits at the sender, in the sum and in the result. int8 and
# int4 round by up to half a step, 1/127 or 1/7 of a block's largest value, at the sender and in the
# result, and a residual adds up to half a step. int2 holds back most values.
_KINDS: dict[str, _Kind] = {
    DEFAULT: _Kind(lambda _, __: (0.5, 1.0), _HALF, 1.2 * 2.0**-11, 0.005),
    PLAIN: _Kind(_exactly(1.0), 0.0, 0.0, 1e-4),
    "fp16": _Kind(_exactly(0.5), _HALF, 1.2 * 2.0**-11, 0.005),
    "bf16": _Kind(_exactly(0.5), 3 * 2.0**-8, 1.2 * 2.0**-8, 0.02),
    "int8": _Kind(_integer_share(8), 2 / 127, 0.025, 0.3),
    "int4": _Kind(_integer_share(4), 2 / 7, 0.3, 1.0),
    "int2": _Kind(_integer_share(2, scales=4), None, None, 2.0),
    "topk": _Kind(_topk_share, None, None, 1.0, float),
    # Each rank steps with its own gradients.
    "rotate": _Kind(lambda n, _: (1 / n, 1 / n), None, None, 10.0, int),
    # Of most matrices 1/20 or less; small and narrow gradients travel as float16.
    "powersgd": _Kind(lambda _, __: (0.0, 0.5), None, None, 1.0, int, _HALF),
    # Of normal values about 0.86; others may have more or fewer exponents.
    "lossless": _Kind(lambda _, __: (0.0, 1.01), 0.0, 0.0, 1e-4),
    # As int2, which it may choose, or float16.
    "auto": _Kind(lambda _, __: (0.0, 1.0), None, None, 2.0, lost=_HALF),
}


@dataclass(frozen=True)
class Codec:
    """A codec as the user asked for it. argument: a ratio or a whole number, if it takes one."""

    name: str
    argument: float | None = None

    @property
    def label(self) -> str:
        """The codec as on the command line, such as 'topk:0.01'."""
        return self.name if self.argument is None else f"{self.name}:{self.argument:g}"

    @property
    def holds_back(self) -> bool:
        """Whether part of a gradient is only sent in a later step."""
        return _KINDS[self.name].rms is None

    @property
    def lost(self) -> float:
        """The bound of an element's error that a later step does not make up for, relative to the
        largest input, if the codec holds back values."""
        return _KINDS[self.name].lost

    @property
    def relative_error(self) -> float:
        """The bound of |result - exact| / |exact| in a first step, with the Euclidean norm."""
        return _KINDS[self.name].relative

    def share(self, ranks: int) -> tuple[float, float]:
        """Return the least and the most bytes on the wire, relative to a plain allreduce."""
        return _KINDS[self.name].share(self.argument or 0.0, ranks)

    def bounds(self, ranks: int) -> tuple[float, float]:
        """Return the bounds of an average's error: of an element, relative to the largest input,
        and the root mean square. Not for codecs that hold back values."""
        kind = _KINDS[self.name]
        assert kind.largest is not None
        assert kind.rms is not None
        rounding = ranks * _SUM_ROUNDING
        return kind.largest + rounding, kind.rms + rounding

    def variables(self) -> dict[str, str]:
        """Return the variables of docs/config.md that let a process group use the codec.

        Raises ValueError if none does.
        """
        text = f"{self.argument:g}" if self.argument is not None else ""
        known = {
            DEFAULT: {},
            PLAIN: {"PERSEUS_ALLREDUCE_DTYPE": "1"},
            "fp16": {"PERSEUS_ALLREDUCE_DTYPE": "2"},
            **{
                name: {"PERSEUS_ALLREDUCE_CODEC": name}
                for name in ("int8", "int4", "int2", "lossless", "auto")
            },
            "topk": {
                "LIGHT_TOPK_ALLREDUCE": "1",
                "LIGHT_TOPK_RATIO": text,
                "LIGHT_TOPK_THRESHOLD": "8192",  # as Compression.topk
            },
            "rotate": {"PERSEUS_DOWNSAMPLE_N_ELEMENTS": text},
            "powersgd": {"PERSEUS_ALLREDUCE_CODEC": "powersgd", "PERSEUS_POWERSGD_RANK": text},
        }
        if self.name not in known:
            raise ValueError(f"--codec {self.label}: no variable gives it to a process group")
        return known[self.name]

    def arguments(self, framework: str = TORCH) -> dict[str, Any]:
        """Return the keyword arguments for hvd.DistributedOptimizer or DistributedGradientTape.

        Raises ValueError if this build does not have the codec, or its argument is out of range.
        """
        if self.name == DEFAULT:
            return {}
        known: Any = import_module(f"perseus.{framework}.horovod").Compression
        made = getattr(known, self.name, None)
        if made is None:
            here = [name for name in _KINDS if hasattr(known, name)]
            raise ValueError(
                f"--codec {self.label}: this build has no hvd.Compression.{self.name}; "
                f"it has {', '.join(here)}"
            )
        if self.argument is None:
            return {"compression": made}
        try:
            return {"compression": made(self.argument)}
        except ValueError as error:
            raise ValueError(f"--codec {self.label}: {error}") from None


def parse(text: str) -> list[Codec]:
    """Parse a list such as 'none,topk:0.01', without repetitions.

    Raises ValueError for unknown codecs.
    """
    found = [_parse(part) for part in text.split(",") if part]
    return list(dict.fromkeys(found))


def check_variables(variables: Mapping[str, str]) -> None:
    """Raise ValueError for variables that give another codec to gradients than results are judged
    by."""
    for name, usual in _USUAL.items():
        if (value := variables.get(name)) and value.lower() not in usual:
            raise ValueError(
                f"{name}='{value}': perseus-bench judges gradients by the codecs that --codec "
                f"names: use --codec instead"
            )


def _parse(text: str) -> Codec:
    name, colon, argument = text.partition(":")
    if name not in _KINDS:
        raise ValueError(f"--codec {text}: expected some of {', '.join(map(_usage, _KINDS))}")
    wanted = _KINDS[name].argument
    if (wanted is None) == bool(colon):
        raise ValueError(f"--codec {text}: expected {_usage(name)}")
    if wanted is None:
        return Codec(name)
    try:
        return Codec(name, wanted(argument))
    except ValueError:
        raise ValueError(f"--codec {text}: expected {_usage(name)}") from None


def _usage(name: str) -> str:
    wanted = _KINDS[name].argument
    return name if wanted is None else f"{name}:{'0.01' if wanted is float else '8'}"

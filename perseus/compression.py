"""The interface of `compression=` arguments, shared by all frameworks. Stateless, thread-safe."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

# Same numbers as enum perseus_codec.
SETTINGS, EXACT, FLOAT16, BFLOAT16, INT8, TOP_K, ROTATE, AUTO = range(8)


class Compressor:
    """Makes a tensor smaller before a collective and restores it afterwards.

    Subclass it with two static methods; classes, not instances, are passed as `compression=`.

    in_core: the core encodes sums and averages of floating-point tensors itself, between hosts, by
        `codec` (perseus_codec) with `argument`; compress is for what else is sent. float16 and
        bfloat16 are left as they are by codecs that save nothing; int8, top-k and the rotating
        subset refuse integers (ValueError).
    stateful: the core keeps a residual under the tensor's name.
    """

    in_core = False
    stateful = False
    codec = EXACT
    argument = 0.0

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The tensor to communicate, and a context for decompress."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The result in the original form; ctx is what compress returned on this rank."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Leaves tensors as they are: full precision, whatever the settings say."""

    in_core = True

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return (tensor, None)."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return tensor."""
        return tensor


class SettingsCompressor(NoneCompressor):
    """Gradients travel as PERSEUS_ALLREDUCE_DTYPE and its neighbours say; else as they are."""

    codec = SETTINGS


def cast_compressor(
    name: str,
    codec: int,
    dtype: Any,
    is_floating: Callable[[Any], bool],
    cast: Callable[[Any, Any], Any],
) -> type[Compressor]:
    """A framework's compressor for a 16-bit codec, by its dtype and cast(tensor, dtype).

    Floating tensors travel in that dtype and come back in their own; others unchanged.
    """

    class CastCompressor(Compressor):
        """Floating tensors travel in 16 bits and come back in their own dtype; others unchanged."""

        in_core = True

        @staticmethod
        def compress(tensor: Any) -> tuple[Any, Any]:
            """The tensor in 16 bits, and the dtype to go back to."""
            return (cast(tensor, dtype), tensor.dtype) if is_floating(tensor) else (tensor, None)

        @staticmethod
        def decompress(tensor: Any, ctx: Any) -> Any:
            """The tensor in the dtype it had."""
            return tensor if ctx is None else cast(tensor, ctx)

    CastCompressor.codec = codec
    CastCompressor.__name__ = CastCompressor.__qualname__ = name
    return CastCompressor


class Int8Compressor(NoneCompressor):
    """One byte an element between hosts; what rounding loses is added to the next gradient."""

    stateful = True
    codec = INT8


class TopKCompressor(NoneCompressor):
    """The largest elements travel between hosts; the others are added to the next gradient."""

    stateful = True
    codec = TOP_K


class RotatingCompressor(NoneCompressor):
    """Each step sends another N-th of the elements between hosts, and keeps the rest back."""

    stateful = True
    codec = ROTATE


class AutoCompressor(NoneCompressor):
    """As they are, float16, int8 or top-k, whichever is fastest on the links that were measured.

    What int8 and top-k leave out is added to the next gradient.
    """

    stateful = True
    codec = AUTO


def applied_here(compression: type[Compressor]) -> type[Compressor]:
    """What is left for an adapter to do to tensors that the core may encode."""
    return NoneCompressor if compression.in_core else compression


@cache  # adapters know a gradient's codec again by its class
def top_k(ratio: float | None = None) -> type[Compressor]:
    """A compressor that sends this fraction of the elements, in (0, 1]; None = LIGHT_TOPK_RATIO.

    Raises ValueError for anything else.
    """
    if ratio is not None and not 0 < ratio <= 1:
        raise ValueError(f"[compression] topk({ratio}): expected a fraction above 0 and at most 1")
    return type("TopKCompressor", (TopKCompressor,), {"argument": float(ratio or 0)})


@cache
def rotate(n: int | None = None) -> type[Compressor]:
    """A compressor that sends each element every n-th step, n of 1 to 1024.

    None = PERSEUS_DOWNSAMPLE_N_ELEMENTS. Raises ValueError for anything else.
    """
    if n is not None and not (isinstance(n, int) and 1 <= n <= 1024):
        raise ValueError(f"[compression] rotate({n}): expected a whole number from 1 to 1024")
    return type("RotatingCompressor", (RotatingCompressor,), {"argument": float(n or 0)})


class Compressions:
    """The compressors by name that need nothing of a framework; an adapter adds fp16 and bf16.

    The lossy ones act between hosts only; see docs/algorithms.md.
    """

    settings = SettingsCompressor
    none = NoneCompressor
    int8 = Int8Compressor
    topk = staticmethod(top_k)
    rotate = staticmethod(rotate)
    auto = AutoCompressor

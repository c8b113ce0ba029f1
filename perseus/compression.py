"""The interface of `compression=` arguments, shared by all frameworks. Stateless, thread-safe."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from numbers import Real
from typing import Any

# Same numbers as enum perseus_codec.
SETTINGS, EXACT, FLOAT16, BFLOAT16, INT8, TOP_K = range(6)
ROTATE, AUTO, INSIDE, POWERSGD, LOSSLESS, INT4, INT2 = range(6, 13)


class Compressor:
    """Makes a tensor smaller before a collective and restores it afterwards.

    Subclass it, or a compressor below, with two static methods; classes, not instances, are passed
    as `compression=`. A class with methods of its own has the attributes below as they are here,
    unless it states them: the core does not encode what it compresses.

    in_core: between hosts, the core itself encodes sums and averages of floating-point tensors with
        `codec` (perseus_codec) and `argument`; compress is for everything else. float16 and
        bfloat16 are left as they are by codecs that save nothing; int8, int4, int2, top-k and the
        rotating subset refuse integers (ValueError).
    stateful: the core keeps a residual under the tensor's name.
    """

    in_core = False
    stateful = False
    codec = EXACT
    argument = 0.0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for kind in cls.__mro__:
            stated = vars(kind)
            if "in_core" in stated:
                return
            if "compress" in stated or "decompress" in stated:
                break
        for name in ("in_core", "stateful", "codec", "argument"):
            if name not in vars(cls):
                setattr(cls, name, getattr(Compressor, name))

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
    """Gradients are encoded as the settings say; everything else is sent unchanged."""

    codec = SETTINGS


def cast_compressor(
    name: str,
    codec: int,
    dtype: Any,
    is_floating: Callable[[Any], bool],
    cast: Callable[[Any, Any], Any],
) -> type[Compressor]:
    """A framework's compressor for a 16-bit codec, by its dtype and cast(tensor, dtype).

    Floating-point tensors are sent in that dtype and returned in their own; others unchanged.
    """

    class CastCompressor(Compressor):
        """Floating-point tensors are sent in 16 bits and returned in their own dtype."""

        in_core = True

        @staticmethod
        def compress(tensor: Any) -> tuple[Any, Any]:
            """The tensor in 16 bits, and its own dtype."""
            return (cast(tensor, dtype), tensor.dtype) if is_floating(tensor) else (tensor, None)

        @staticmethod
        def decompress(tensor: Any, ctx: Any) -> Any:
            """The tensor in its own dtype."""
            return tensor if ctx is None else cast(tensor, ctx)

    CastCompressor.codec = codec
    CastCompressor.__name__ = CastCompressor.__qualname__ = name
    return CastCompressor


class Int8Compressor(NoneCompressor):
    """One byte per element between hosts; rounding errors are added to the next gradient."""

    stateful = True
    codec = INT8


class Int4Compressor(Int8Compressor):
    """Four bits per element between hosts; rounding errors are added to the next gradient.

    With other optimizers than SGD, training may end with a higher loss than with exact gradients:
    see docs/accuracy.md.
    """

    codec = INT4


class Int2Compressor(Int8Compressor):
    """Two bits per element between hosts; rounding errors are added to the next gradient.

    Elements travel as -1, 0 or 1 times the largest of 32. With other optimizers than SGD, training
    may end with a higher loss than with exact gradients: see docs/accuracy.md. (Compare Wen et al.
    2017, TernGrad, and Seide et al. 2014, 1-Bit SGD.)
    """

    codec = INT2


class TopKCompressor(NoneCompressor):
    """Sends the largest elements between hosts; the others are added to the next gradient."""

    stateful = True
    codec = TOP_K


class RotatingCompressor(NoneCompressor):
    """Each step sends another N-th between hosts; see rotate."""

    stateful = True
    codec = ROTATE


class PowerSgdCompressor(NoneCompressor):
    """Sends products of two narrow matrices between hosts; the rest is added to the next gradient.

    (Vogels, Karimireddy and Jaggi 2019, PowerSGD.)
    """

    stateful = True
    codec = POWERSGD


class LosslessCompressor(NoneCompressor):
    """The bits of NoneCompressor, of float32 and bfloat16 in fewer bytes between hosts."""

    codec = LOSSLESS


class InsideCompressor(NoneCompressor):
    """Gradients are reduced inside hosts only; see perseus.gradients.turns and inside()."""

    codec = INSIDE


class AutoCompressor(NoneCompressor):
    """Unchanged, float16, int8, int4 or int2, whichever is fastest on the measured links.

    int4 and int2 are only for gradients whose optimizer is known to be SGD; hvd.allreduce and
    tapes know none. What integers leave out is added to the next gradient.
    """

    stateful = True
    codec = AUTO


def compressor(compression: Any) -> type[Compressor]:
    """A Compressor with the methods of a compression, which needs no base class, as in Horovod."""
    return compression if hasattr(compression, "in_core") else _derived(compression)


@cache  # adapters recognise a plan by its compression
def _derived(compression: Any) -> type[Compressor]:
    methods = {
        name: staticmethod(getattr(compression, name)) for name in ("compress", "decompress")
    }
    name = getattr(compression, "__name__", type(compression).__name__)
    return type(name, (Compressor,), methods)


def applied_here(compression: type[Compressor]) -> type[Compressor]:
    """The part of a compression that the adapter applies, when the core may encode the tensors."""
    compression = compressor(compression)
    return NoneCompressor if compression.in_core else compression


def all_applied_here(compression: type[Compressor]) -> type[Compressor]:
    """The same for what the core does not encode, as Adasum: adapters apply all of it."""
    kind: Any = compressor(compression)
    return _all_applied(kind)


@cache  # reductions ask in every call, and making a class takes long
def _all_applied(compression: Any) -> type[Compressor]:
    own = {"in_core": False, "codec": EXACT, "argument": 0.0}
    return type(compression.__name__, (compression,), own)


def castable(compression: type[Compressor], sums: bool) -> type[Compressor]:
    """A compression for a reduction that the core encodes only if it sums or averages.

    Adapters cast tensors to 16 bits for others, as Horovod does.
    """
    compression = compressor(compression)
    cast = not sums and compression.in_core and compression.codec in (FLOAT16, BFLOAT16)
    return all_applied_here(compression) if cast else compression


@cache  # adapters recognise a gradient's codec by its class
def _with_argument(kind: type[Compressor], argument: float) -> type[Compressor]:
    return type(kind.__name__, (kind,), {"argument": argument})


def inside(parts: int) -> type[Compressor]:
    """An InsideCompressor beside which another 1/parts of the parameters is averaged each step."""
    return _with_argument(InsideCompressor, float(parts))


def top_k(ratio: float | None = None) -> type[Compressor]:
    """A compressor that sends this fraction of the elements, in (0, 1]; None = LIGHT_TOPK_RATIO.

    A fraction below 0.05 is reached in LIGHT_TOPK_WARMUP_STEPS. Gradients below 8 KiB go whole.
    Training may end with a higher loss than with exact gradients, the more so the smaller the
    fraction: see docs/accuracy.md. Raises ValueError for anything else.
    """
    if ratio is not None and not (isinstance(ratio, Real) and 0 < ratio <= 1):
        raise ValueError(
            f"[compression] topk({ratio!r}): expected a fraction above 0 and at most 1"
        )
    return _with_argument(TopKCompressor, float(ratio or 0))


def rotate(n: int | None = None) -> type[Compressor]:
    """A compressor that sends each element every n-th step, n of 1 to 1024.

    Optimizers, trainers, tapes and KVStores average parameters so, while hosts step with their own
    gradients; hvd.synchronize_parameters() makes parameters equal. Training may end with a higher
    loss than with exact gradients, the more so the larger n: see docs/accuracy.md. hvd.allreduce
    holds elements of gradients back, which can diverge for n above 2. None =
    PERSEUS_DOWNSAMPLE_N_ELEMENTS. Raises ValueError for anything else.
    """
    if n is not None and not (isinstance(n, int) and 1 <= n <= 1024):
        raise ValueError(f"[compression] rotate({n!r}): expected a whole number from 1 to 1024")
    return _with_argument(RotatingCompressor, float(n or 0))


def powersgd(rank: int | None = None) -> type[Compressor]:
    """A compressor that sends matrices of this rank, 1 to 1024; None = PERSEUS_POWERSGD_RANK.

    Of a gradient with n rows and m columns, rank * (n + m) numbers travel, after
    PERSEUS_POWERSGD_WARMUP_STEPS exact steps. Those that this would not halve, such as biases,
    travel as PERSEUS_ALLREDUCE_DTYPE says. Training may end with a higher loss than with exact
    gradients, the more so the smaller the rank: see docs/accuracy.md. Raises ValueError for
    anything else.
    """
    if rank is not None and not (isinstance(rank, int) and 1 <= rank <= 1024):
        raise ValueError(
            f"[compression] powersgd({rank!r}): expected a whole number from 1 to 1024"
        )
    return _with_argument(PowerSgdCompressor, float(rank or 0))


class Compressions:
    """The compressors by name that no framework is needed for; an adapter adds fp16 and bf16.

    The lossy ones act between hosts only; see docs/algorithms.md.
    """

    settings = SettingsCompressor
    none = NoneCompressor
    lossless = LosslessCompressor
    int8 = Int8Compressor
    int4 = Int4Compressor
    int2 = Int2Compressor
    topk = staticmethod(top_k)
    rotate = staticmethod(rotate)
    powersgd = staticmethod(powersgd)
    auto = AutoCompressor

"""The interface of `compression=` arguments, shared by all frameworks. Stateless, thread-safe."""

from __future__ import annotations

from typing import Any


class Compressor:
    """Makes a tensor smaller before a collective and restores it afterwards.

    Subclass it with two static methods; classes, not instances, are passed as `compression=`.
    """

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The tensor to communicate, and a context for decompress."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The result in the original form; ctx is what compress returned on this rank."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return (tensor, None)."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return tensor."""
        return tensor

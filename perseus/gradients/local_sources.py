"""Variables whose gradients stay on their rank. Belongs to the thread that computes gradients."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any


class LocalSources:
    """What is left out of reductions: gradients of these are only scaled, if at all.

    key: what a source is known by. scale: divides a gradient by the number of ranks, as the mean of
    reduced gradients weighs it; None leaves it alone.
    """

    def __init__(self, key: Callable[[Any], Hashable], scale: Callable[[Any], Any] | None) -> None:
        self._key = key
        self._scale = scale
        self._sources: dict[Hashable, Any] = {}  # kept, so that no other gets the key of one

    def register(self, source: Any) -> None:
        """Leave this one out from now on."""
        self._sources[self._key(source)] = source

    def is_local(self, source: Any) -> bool:
        """Whether it was registered."""
        return bool(self._sources) and self._key(source) in self._sources

    def around(
        self,
        reduce: Callable[[list[Any], list[Any]], tuple[list[Any], Any]],
        gradients: Sequence[Any],
        sources: Sequence[Any],
    ) -> tuple[list[Any], Any]:
        """Have `reduce` do what is not local; returns all gradients in order, and its verdict."""
        local = [self.is_local(source) for source in sources]
        wide = [i for i, stays in enumerate(local) if not stays]
        reduced, applies = reduce([gradients[i] for i in wide], [sources[i] for i in wide])
        results = [
            self._scaled(gradient) if stays else gradient
            for gradient, stays in zip(gradients, local, strict=True)
        ]
        for i, gradient in zip(wide, reduced, strict=True):
            results[i] = gradient
        return results, applies

    def _scaled(self, gradient: Any) -> Any:
        return gradient if gradient is None or self._scale is None else self._scale(gradient)

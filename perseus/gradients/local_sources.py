"""Keeps gradients of some variables on their rank.

Belongs to the thread that computes gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from perseus.gradients.arguments import check_local_sources


class LocalSources:
    """The set of sources whose gradients are not reduced but at most scaled.

    key: returns a source's identity. scale: divides a gradient by the number of ranks, which gives
    it the weight that it would have in a mean over ranks; None leaves the gradient unchanged.
    where: the component that an error names.
    """

    def __init__(
        self, key: Callable[[Any], Hashable], scale: Callable[[Any], Any] | None, where: str
    ) -> None:
        self._key = key
        self._scale = scale
        self._where = where
        # Keeps the sources alive, so that no other object gets the id() of one of them.
        self._sources: dict[Hashable, Any] = {}

    def register(self, source: Any) -> None:
        """Leave the gradient of this source on its rank from now on."""
        self._sources[self._key(source)] = source

    def registered(self) -> list[Any]:
        """Return the sources that were registered."""
        return list(self._sources.values())

    def is_local(self, source: Any) -> bool:
        """Return whether a source was registered."""
        return bool(self._sources) and self._key(source) in self._sources

    def around(
        self,
        reduce: Callable[[list[Any], list[Any]], tuple[list[Any], Any]],
        gradients: Sequence[Any],
        sources: Sequence[Any],
    ) -> tuple[list[Any], Any]:
        """Call reduce(gradients, sources) for those that are not local.

        Returns all gradients in their order, and the second result of `reduce`, which is whether to
        apply them. Raises ValueError for local sources while PERSEUS_ACCUMULATE_N_STEPS sums
        gradients: the core sees only those that are reduced.
        """
        local = [self.is_local(source) for source in sources]
        if any(local):
            check_local_sources(self._where)
        shared = [i for i, stays in enumerate(local) if not stays]
        reduced, applies = reduce([gradients[i] for i in shared], [sources[i] for i in shared])
        results = [
            self._scaled(gradient) if stays else gradient
            for gradient, stays in zip(gradients, local, strict=True)
        ]
        for i, gradient in zip(shared, reduced, strict=True):
            results[i] = gradient
        return results, applies

    def _scaled(self, gradient: Any) -> Any:
        return gradient if gradient is None or self._scale is None else self._scale(gradient)

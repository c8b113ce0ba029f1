"""Names of variables that are equal on all ranks. Pure functions, thread-safe."""

from __future__ import annotations

import re

# Keras numbers layers and models, and TensorFlow numbers repeated names in a graph: dense_3/kernel.
_NUMBER = re.compile(r"_\d+(?=/|$)")


def unnumbered(path: str) -> str:
    """Return the path of a variable without the numbers that Keras and TensorFlow append.

    These may differ, because a rank may have created more layers before, such as those of a model
    that only this rank inspects. Several variables may share the result, so names need a position
    as well.
    """
    return _NUMBER.sub("", path)

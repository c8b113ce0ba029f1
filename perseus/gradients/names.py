"""What ranks call the same variable, whatever else some of them have made. Pure, thread-safe."""

from __future__ import annotations

import re

# Keras numbers layers and models, TensorFlow what has a name twice in a graph: `dense_3/kernel`.
_NUMBER = re.compile(r"_\d+(?=/|$)")


def unnumbered(path: str) -> str:
    """The path of a variable without such numbers; several may share one, so add a position.

    Ranks may have made different numbers of layers before: a model that only one of them looks at.
    """
    return _NUMBER.sub("", path)

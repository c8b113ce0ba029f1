"""The public face for TensorFlow: `import perseus.tensorflow as hvd`.

perseus.tensorflow.horovod is the same. The face is loaded when a script first asks for one of its
names, because Keras, and tools that prepare this package's libraries, import single modules of it.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from perseus.installed import require

if TYPE_CHECKING:
    from perseus.tensorflow.horovod import *  # noqa: F403
    from perseus.tensorflow.horovod import __all__ as __all__

require("tensorflow")


def __getattr__(name: str) -> Any:
    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # `from perseus.tensorflow import xla` asks here first, and the face itself needs xla.
    if find_spec(f"{__name__}.{name}") is not None:
        return import_module(f"{__name__}.{name}")
    value = getattr(import_module("perseus.tensorflow.horovod"), name)
    globals()[name] = value  # the next access finds it at once
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *import_module("perseus.tensorflow.horovod").__all__})

"""As perseus.tensorflow.horovod.keras.elastic."""

from perseus.tensorflow.horovod.keras.elastic import *  # noqa: F403
from perseus.tensorflow.horovod.keras.elastic import __all__  # noqa: F401

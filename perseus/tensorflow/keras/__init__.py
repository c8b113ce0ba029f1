"""As perseus.tensorflow.horovod.keras, under a shorter name."""

from perseus.tensorflow.horovod.keras import *  # noqa: F403
from perseus.tensorflow.horovod.keras import __all__  # noqa: F401

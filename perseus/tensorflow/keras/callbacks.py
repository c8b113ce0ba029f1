"""As perseus.tensorflow.horovod.keras.callbacks."""

from perseus.tensorflow.horovod.keras.callbacks import *  # noqa: F403
from perseus.tensorflow.horovod.keras.callbacks import __all__  # noqa: F401

"""TensorFlow on Perseus; `import perseus.tensorflow.horovod as hvd` is the public face."""

from perseus.installed import require

require("tensorflow")

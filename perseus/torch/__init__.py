"""PyTorch on Perseus; `import perseus.torch.horovod as hvd` is the public face."""

from perseus.installed import require

require("torch")

"""The public face for PyTorch: `import perseus.torch as hvd`; perseus.torch.horovod is the same."""

from perseus.installed import require, require_served

require("torch")

import torch  # noqa: E402

require_served("torch", torch.__version__)

from perseus.torch.horovod import *  # noqa: E402, F403
from perseus.torch.horovod import __all__ as __all__  # noqa: E402

"""Perseus as a backend of torch.distributed: init_process_group("perseus").

    import perseus.torch.distributed  # torch 2.14 and later find the backend without this

Every process group is a world of its own in the core, over shared memory and TCP. A script with
`import perseus` that asks for gloo or nccl, or for none, gets this backend, too (redirect.py).
"""

import torch
from torch._C import _distributed_c10d as c10d

if not hasattr(c10d, "ErrorType"):
    raise ImportError(
        f'[torch.distributed] PyTorch {torch.__version__} is too old for the backend "perseus": '
        "2.10 and newer are tested"
    )

from perseus.torch.distributed.backend import register
from perseus.torch.distributed.gradients import synchronize_parameters
from perseus.torch.distributed.launched import init_perseus_training

init_tiacc_training = init_perseus_training

__all__ = ["init_perseus_training", "init_tiacc_training", "register", "synchronize_parameters"]

register()

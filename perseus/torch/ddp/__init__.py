"""DistributedDataParallel on any backend of torch.distributed, with smaller gradients.

from perseus.torch.ddp import register_comm_hook

state = register_comm_hook(model, "int8")
"""

from perseus.torch.ddp.hooks import register_comm_hook

__all__ = ["register_comm_hook"]

"""Perseus as a backend of torch.distributed: init_process_group("perseus").

    import perseus.torch.distributed  # torch 2.14 and later find the backend without this

Every process group is a world of its own in the core, over shared memory and TCP.
"""

from perseus.torch.distributed.backend import register

__all__ = ["register"]

register()

"""Elastic training for every framework: state that survives a failure, and the loop around it.

Adapters add the states of their frameworks; see perseus.torch.elastic.
"""

from perseus.elastic.loop import reset, run_fn
from perseus.elastic.notification import (
    HostUpdateResult,
    WorkerNotificationManager,
    notification_manager,
)
from perseus.elastic.state import ObjectState, State
from perseus.errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = [
    "HorovodInternalError",
    "HostUpdateResult",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "WorkerNotificationManager",
    "notification_manager",
    "reset",
    "run_fn",
]

"""Whether there is anything to do for this rank's gradients. Stateless, thread-safe."""

from __future__ import annotations

from perseus import basics, config
from perseus.process_sets import ProcessSet, group_id


def alone() -> bool:
    """Whether the world is this rank, and does not grow."""
    return basics.size() == 1 and not config.elastic()


def takes_part(process_set: ProcessSet) -> bool:
    """Whether this rank has anything to reduce in a set; a world that may grow counts as grown.

    ValueError where the set is not registered, and before init().
    """
    basics.size()  # an error before init()
    group_id(process_set)
    return bool(process_set.included()) and (
        process_set.size() != 1 or config.elastic() or basics.settings_act_on_gradients()
    )

"""Decides whether this rank's gradients need any reduction. Stateless, thread-safe."""

from __future__ import annotations

from perseus import basics, config
from perseus.process_sets import ProcessSet, group_id


def alone() -> bool:
    """Return whether the world has one rank and cannot grow."""
    return basics.size() == 1 and not config.elastic()


def takes_part(process_set: ProcessSet) -> bool:
    """Return whether this rank has gradients to reduce in a process set.

    A set of one rank needs no reduction, unless the world may grow or the settings act on
    gradients. Raises ValueError if the set is not registered, and before init().
    """
    basics.size()  # raises before init()
    group_id(process_set)
    return bool(process_set.included()) and (
        process_set.size() != 1 or config.elastic() or basics.settings_act_on_gradients()
    )


def sums_over_steps() -> bool:
    """Return whether the core sums gradients over steps.

    A missing gradient must then be zeros: the core counts the steps of each gradient by itself, and
    a step is applied only when all of them are complete.
    """
    return basics.setting("PERSEUS_ACCUMULATE_N_STEPS") > 1

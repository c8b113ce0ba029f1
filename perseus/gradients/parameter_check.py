"""Compares parameters, which should be equal on all ranks, every PERSEUS_PARAMETER_CHECK_N_STEPS.

Every rank hashes the exact bits of its parameters. One small allgather shows whether all ranks have
the same hash. Only if they differ does a second allgather find out which parameters differ, and on
which ranks. An adapter has one ParameterCheck for each optimizer and calls it in the thread that
steps.
"""

from __future__ import annotations

import json
import struct
import weakref
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from perseus import basics, control
from perseus.errors import MismatchError
from perseus.process_sets import ProcessSet, global_process_set

SETTING = "PERSEUS_PARAMETER_CHECK_N_STEPS"
_REMEDY = (
    "Start all ranks from the same values (hvd.broadcast_parameters, hvd.broadcast_variables, "
    "hvd.callbacks.BroadcastGlobalVariablesCallback, hvd.load_model), and have an "
    "hvd.DistributedOptimizer or hvd.DistributedGradientTape average all gradients."
)
_SUMMARY = struct.Struct("<QQ")  # the number of parameters and the hash of their hashes


class ParameterCheck:
    """Compares the parameters of one optimizer.

    process_set: the ranks whose parameters must be equal.
    name: matches comparisons across ranks, as several may be in flight at the same time.
    every: the number of steps between comparisons; 0 = never.
    """

    def __init__(self, process_set: ProcessSet = global_process_set, name: str = "all") -> None:
        self._process_set = process_set
        self._name = f"parameter_check.{name}"
        self.every = self._begun = 0
        if basics.is_initialized():
            self.begin_world()
        _living.add(self)

    def due(self) -> bool:
        """Count a step that begins; return whether to compare() before it.

        The result is equal on all ranks. It is true after every N-th step, by which time the
        initial values have been broadcast, and always false in a process set of one rank.
        """
        if self.every == 0:
            return False
        taken = self._begun
        self._begun += 1
        return taken > 0 and taken % self.every == 0 and self._has_peers()

    def compare(self, parameters: Iterable[tuple[str, Any]]) -> None:
        """Compare parameters with all ranks. A collective, for ranks whose due() was true.

        parameters: names and contiguous buffers, in the same order on all ranks. Nothing is
        compared while a rank waits in join(): it takes no steps, and its parameters are old.

        Raises MismatchError on all ranks, which names the first parameter that differs, unless all
        are equal.
        """
        from perseus import _core

        hashes = [(name, _core.hash_bytes(buffer)) for name, buffer in parameters]
        packed = struct.pack(f"<{len(hashes)}Q", *(number for _, number in hashes))
        summary = _SUMMARY.pack(len(hashes), _core.hash_bytes(packed))
        group = self._process_set.process_set_id or 0
        gathered = control.gather_if_different(
            summary, lambda: json.dumps(hashes).encode(), self._name, group
        )
        if gathered is None:
            return
        found = difference([json.loads(part) for part in gathered], basics.group_ranks(group) or [])
        raise MismatchError(f"[{SETTING}] after {self._begun - 1} steps {found}. {_REMEDY}")

    def _has_peers(self) -> bool:
        return bool(self._process_set.included()) and (self._process_set.size() or 1) > 1

    def begin_world(self) -> None:
        """Read the setting and restart the count, as ranks may have taken different numbers of
        steps."""
        self.every = basics.setting(SETTING)
        self.restart()

    def restart(self) -> None:
        """Restart the count."""
        self._begun = 0


def difference(gathered: list[list[tuple[str, int]]], ranks: list[int]) -> str:
    """Describe the difference between lists of (name, hash), one for each rank in `ranks`."""
    counts = [len(parameters) for parameters in gathered]
    if len(set(counts)) > 1:
        return f"the number of parameters differs: {by_rank(counts, ranks, '{} on {}')}"
    differing = [
        place
        for place in range(counts[0])
        if len({parameters[place][1] for parameters in gathered}) > 1
    ]
    first = differing[0]
    values = [f"{parameters[first][1]:016x}" for parameters in gathered]
    return (
        f"the parameter {gathered[0][first][0]} is not the same on all ranks "
        f"({by_rank(values, ranks, 'hash {} on {}')}); of {counts[0]} parameters "
        f"{len(differing)} differ{'s' if len(differing) == 1 else ''}, this is the first"
    )


def by_rank(values: list[Any], ranks: list[int], form: str) -> str:
    """List each value with its ranks. form: a template for the value and the list of ranks."""
    holders: dict[Any, list[int]] = defaultdict(list)
    for value, rank in zip(values, ranks, strict=True):
        holders[value].append(rank)
    return ", ".join(form.format(value, _listed(found)) for value, found in holders.items())


def _listed(ranks: list[int]) -> str:
    """Format ascending ranks, with runs as ranges: [0, 1, 2, 5] gives 'ranks 0-2, 5'."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{word} {', '.join('-'.join(map(str, run)) for run in runs)}"


_living: weakref.WeakSet[ParameterCheck] = weakref.WeakSet()


def restart_all() -> None:
    """Restart all counts, where join() returns: ranks have taken different numbers of steps."""
    for check in _living:
        check.restart()


def _begin_world() -> None:
    for check in _living:
        check.begin_world()


basics.at_init(_begin_world)

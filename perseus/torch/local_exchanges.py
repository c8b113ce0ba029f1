"""Torch parameters with local steps: their state, which ranks agree on, and their average.

See perseus.gradients.local_steps.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch

from perseus import basics
from perseus.compression import INSIDE
from perseus.errors import HorovodInternalError
from perseus.gradients.local_steps import LocalSteps, Pace
from perseus.process_sets import ProcessSet, group_id
from perseus.torch.functions import allgather_object, broadcast_object, buffer_of
from perseus.torch.parameter_rows import ParameterRows, average_of
from perseus.torch.reductions import allreduce_async
from perseus.torch.session import ALLREDUCE, Average, Sum, session, synchronize

# What a rank's state is worth to ranks that have another one.
_NONE, _PRESENT, _LOADED = range(3)


@dataclass
class Exchange:
    """See UnderWay. sent: this rank's rows; average: those of all, or of outer gradients.

    loaded: whether it is from an earlier run, since whose exchange steps have changed parameters.
    """

    part: int
    due: int
    sent: torch.Tensor
    handle: int = 0
    average: torch.Tensor | None = None
    loaded: bool = False

    def received(self) -> bool:
        """See UnderWay."""
        return self.average is not None


class TorchLocalSteps(LocalSteps):
    """Local steps of a torch optimizer; a subclass says what they exchange.

    parameters: see ParameterRows. name: matches them across ranks. The rest: see LocalSteps.
    one_worker: whether all ranks average their gradients in every step, so that nothing differs.
    workers_of_one: whether no rank averages them. Both are known once ranks have agreed.
    """

    def __init__(
        self, parameters: list[torch.Tensor], name: str, process_set: ProcessSet, pace: Pace
    ) -> None:
        self._rows = ParameterRows(parameters, pace.parts)
        self._device = parameters[0].device
        self._worth = _NONE
        self.one_worker = self.workers_of_one = False
        super().__init__(f"local.{name}", process_set, pace)

    def send(self, part: int, due: int = 0) -> Exchange | None:
        """See Turns."""
        sent = self._rows.read(part)
        if sent is None:
            return None
        name = f"{self.name}.{part}"
        handle = allreduce_async(sent, name=name, op=Sum, process_set=self.process_set)
        return Exchange(part, due, sent, handle)

    def receive(self, pending: Exchange) -> torch.Tensor:
        """See Turns."""
        if pending.average is None:
            pending.average = average_of(synchronize(pending.handle))
        return pending.average

    def correct(self, pending: Exchange) -> None:
        """See Turns."""
        self._rows.add(pending.part, self.receive(pending) - pending.sent)

    def replace(self, pending: Exchange) -> None:
        """See Turns."""
        self._rows.write(pending.part, self.receive(pending))

    def wait(self, begun: Exchange) -> None:
        """See LocalSteps."""
        self.receive(begun)

    def average_all(self) -> None:
        """See Turns."""
        # Rounding would change replicas that have never differed.
        if not self.one_worker:
            super().average_all()

    def begin_world(self) -> None:
        """See LocalSteps."""
        super().begin_world()
        self.one_worker = self.workers_of_one = False

    def follow(self, first: bool) -> None:
        """Take over the state of the rank that is `first`, which gives its parameters to all."""
        self._worth = _LOADED if first else _NONE

    def agree(self) -> None:
        """See LocalSteps."""
        mine = self._worth, self.signature(), self._size_of_worker()
        gathered = allgather_object(mine, f"{self.name}.states", self.process_set)
        worths, signatures, sizes = zip(*gathered, strict=True)
        if len(set(signatures)) > 1:
            # After a join(), ranks have taken different numbers of steps.
            news = [(worth, turn) for worth, (turn, *_) in zip(worths, signatures, strict=True)]
            newest = self._ranks()[news.index(max(news))]
            # On other hosts there may be no device of this number, so it travels as on the CPU.
            mine = _on_cpu(self.state())
            self.take_over(broadcast_object(mine, newest, f"{self.name}.state", self.process_set))
        self._worth = _PRESENT
        self.one_worker = sizes[0] == len(sizes)
        self.workers_of_one = max(sizes) == 1

    def _size_of_worker(self) -> int:
        """Return the number of ranks with which this one averages gradients. A collective."""
        ranks = self._ranks()
        mine = torch.zeros(len(ranks))
        mine[ranks.index(basics.rank())] = 1
        # Reduced like gradients, it stays 0 for the ranks of other workers.
        synchronize(
            session.submit(
                ALLREDUCE, f"{self.name}.worker", mine, mine, op=Average,
                group=group_id(self.process_set), codec=INSIDE,
            )
        )  # fmt: skip
        return int(mine.count_nonzero())

    def _ranks(self) -> list[int]:
        ranks = basics.group_ranks(group_id(self.process_set))
        assert ranks is not None
        return ranks

    def signature(self) -> tuple[Any, ...]:
        """Return what is equal on ranks that have the same state: first the step."""
        under_way = [
            (each.part, each.due, hashed(self.average_of(each))) for each in self._under_way
        ]
        return self._turn, tuple(under_way)

    def average_of(self, each: Exchange) -> torch.Tensor:
        """Wait for an exchange and return its result, which remains to be applied."""
        self.wait(each)
        assert each.average is not None
        return each.average

    def state(self) -> dict[str, Any]:
        """Return the state that a run needs to resume; it shares tensors with this object.

        It waits for what is under way, which all ranks have sent or are about to send.
        """
        under_way = []
        # Where the world has ended, parameters stay what they are.
        with contextlib.suppress(HorovodInternalError):
            self.end_step()
            under_way = [(e.part, e.due, e.sent, self.average_of(e)) for e in self._under_way]
        return {"step": self._turn, "parts": self.parts, "under_way": under_way}

    def saved(self) -> dict[str, Any]:
        """Return state() for a checkpoint, with what only this rank has of it."""
        return self.state()

    def load(self, state: dict[str, Any] | None, owner: int | None = None) -> None:
        """Go on with a result of saved(), which is copied; None: begin anew.

        owner: the rank that saved it; others begin without what only that rank has of it.
        """
        self.drop()
        self._worth = _NONE if state is None else _LOADED
        self.take_over(
            {"step": 0, "parts": self.parts, "under_way": []} if state is None else state
        )

    def take_over(self, state: dict[str, Any]) -> None:
        """Copy a result of state() after what was under way here has been dropped."""
        self._turn = state["step"]
        # Parts of another number of them do not fit, and the next exchanges make up for them.
        fits = state["parts"] == self.parts
        # At a faster pace than then, the next exchange of a part must not come before.
        self._under_way = [
            Exchange(
                part,
                min(due, self.pace.next_due(part, self._turn)),
                self._copied(sent),
                0,
                self._copied(average),
                True,
            )
            for part, due, sent, average in (state["under_way"] if fits else [])
        ]
        self._under_way.sort(key=lambda each: each.due)

    def _copied(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.to(self._device, copy=True)  # a checkpoint may be from another device


def _on_cpu(state: Any) -> Any:
    """Return a state of dicts, lists and tuples with all tensors in host memory."""
    if isinstance(state, torch.Tensor):
        return state.cpu()
    if isinstance(state, dict):
        return {key: _on_cpu(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(map(_on_cpu, state))
    return state


def hashed(tensor: torch.Tensor) -> int:
    """Return a hash of a tensor's exact bits."""
    from perseus import _core

    return _core.hash_bytes(buffer_of(tensor))

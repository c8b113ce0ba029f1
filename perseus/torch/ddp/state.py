"""The state of a communication hook: its process group, its exchange and what it holds back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from perseus.torch.ddp.gradients import Exchange, Gradients, Parameter
from perseus.torch.ddp.worker import Worker

# Exchanges under way at once, so that one encodes while another one sends.
_LANES = 2
NamedParameters = Iterable[tuple[str, torch.Tensor]]


class HookState:
    """What a hook of this package takes as its state.

    Use the state for one model. Call its methods between steps, on the thread that trains.
    """

    #: What register_comm_hook() calls the hook.
    name = ""

    def __init__(
        self,
        exchange: Exchange,
        options: Mapping[str, Any],
        process_group: dist.ProcessGroup | None,
        named_parameters: NamedParameters | None,
    ) -> None:
        """Options are those that a saved state must share."""
        self._exchange = exchange
        self._options = dict(options)
        self._process_group = process_group
        self._groups: list[dist.ProcessGroup] = []  # where the exchanges take place, by lane
        self._groups_of: dist.ProcessGroup | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._workers = [Worker() for _ in range(_LANES)]
        self._failure: str | None = None
        self._step = 0
        self._named = named_parameters is not None
        # Parameters by id, which they keep as long as they are referred to here.
        self._known: dict[int, tuple[str, torch.Tensor]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._saved_shapes: dict[str, tuple[int, ...]] = {}
        for name, parameter in named_parameters or ():
            self._know(name, parameter)

    @property
    def choice(self) -> str | None:
        """The exchange that auto has chosen; None before it has, and for other hooks."""
        return self._exchange.choice()

    def exchange(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Return the future of the bucket's mean over the ranks. This is what hooks do."""
        buffer = bucket.buffer()
        if buffer.is_sparse:
            raise ValueError(
                "[ddp] the gradients are sparse, but this hook sends dense ones: make the layer "
                "without sparse=True"
            )
        # Some versions of DDP hand over complex numbers, others their parts.
        flat = torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer
        gradients = Gradients(flat, self._describe(bucket.parameters(), flat), bucket.is_last())
        parent, step = self._parent(), self._step
        self._step += gradients.last
        if flat.is_cuda:
            return self._on_stream(buffer, gradients, parent, step)
        # Buckets have the same numbers on every rank; what has still to choose needs one after
        # the other.
        lane = bucket.index() % _LANES if self._exchange.is_ready() else 0
        group = self._own_groups(parent)[lane]
        return self._workers[lane].submit(lambda: self._average(buffer, gradients, group, step))

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank needs to continue as if it had never stopped.

        Every rank has its own. The tensors are copies; nothing is communicated.
        """
        group = self._parent()
        return {
            "hook": self.name,
            "options": dict(self._options),
            "rank": group.rank(),
            "ranks": group.size(),
            "step": self._step,
            "choice": self.choice,
            "shapes": dict(self._shapes),
            "held": self._exchange.held(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with a result of state_dict(), which this rank has saved.

        Raises ValueError if it comes from another hook, rank, number of ranks or model.
        """
        group = self._parent()
        ours = self.name, self._options, group.rank(), group.size()
        theirs = tuple(state.get(key) for key in ("hook", "options", "rank", "ranks"))
        if ours != theirs:
            raise ValueError(
                "[ddp] the state of the hook "
                + "{} {}, saved by rank {} of {}, does not fit ".format(*theirs)
                + "the hook {} {} on rank {} of {}; ".format(*ours)
                + "load what the same rank has saved, or begin without a state"
            )
        shapes = {key: tuple(shape) for key, shape in state["shapes"].items()}
        for key, shape in self._shapes.items():
            _check(key, shape, shapes)
        self._saved_shapes = shapes
        self._step = state["step"]
        self._exchange.choose(state["choice"])
        self._exchange.restore(state["held"])

    def __getstate__(self) -> Any:
        """Refuse to be pickled: a process group cannot be."""
        raise TypeError("[ddp] a hook's state holds a process group; save its state_dict() instead")

    def _parent(self) -> dist.ProcessGroup:
        group = self._process_group or dist.group.WORLD
        if group is None:
            raise ValueError("[ddp] call init_process_group() before using a communication hook")
        return group

    def _own_groups(self, parent: dist.ProcessGroup) -> list[dist.ProcessGroup]:
        """Return groups of the same ranks and backend: their collectives run on other threads.

        In the model's own group they would mix, differently on each rank, with those that the
        training thread starts.
        """
        if self._groups_of is not parent:
            config = dist.BackendConfig(dist.Backend(dist.get_backend_config(parent)))
            self._groups = [
                dist.new_group(
                    dist.get_process_group_ranks(parent),
                    timeout=_timeout(parent),
                    backend=config.get_device_backend_map()["cpu"],
                    use_local_synchronization=True,
                )
                for _ in range(_LANES)
            ]
            self._groups_of = parent
            self._failure = None
        return self._groups

    def _average(
        self, buffer: torch.Tensor, gradients: Gradients, group: dist.ProcessGroup, step: int
    ) -> torch.Tensor:
        """Average gradients.flat, which is a view of the buffer; return the buffer."""
        if self._failure is not None:
            raise RuntimeError(f"[ddp] an earlier bucket has failed: {self._failure}")
        try:
            if group.size() > 1 and gradients.flat.numel() > 0:
                self._exchange.average(gradients, group, step)
        except Exception as error:
            self._failure = str(error)
            raise
        return buffer

    def _on_stream(
        self, buffer: torch.Tensor, gradients: Gradients, group: dist.ProcessGroup, step: int
    ) -> torch.futures.Future[torch.Tensor]:
        """Exchange on a stream of its own: collectives on GPUs do not block this thread.

        They start here in the same order on every rank, so the model's group may carry them.
        """
        device = buffer.device
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[device])
        with torch.cuda.stream(stream), torch.no_grad():
            future.set_result(self._average(buffer, gradients, group, step))
        return future

    def _describe(self, parameters: Iterable[torch.Tensor], flat: torch.Tensor) -> list[Parameter]:
        described: list[Parameter] = []
        first = 0
        for parameter in parameters:
            key = self._key(parameter)
            shape = tuple(parameter.shape)
            size = parameter.numel() * (2 if parameter.is_complex() else 1)
            described.append(Parameter(key, shape, first, size))
            first += size
        if first != flat.numel():
            raise ValueError(
                f"[ddp] a bucket has {flat.numel()} elements, but its parameters have {first}: use "
                f"another version of torch, or DDP without this hook"
            )
        return described

    def _key(self, parameter: torch.Tensor) -> str:
        """Return its name; a number in the order in which DDP has shown them, without names."""
        known = self._known.get(id(parameter))
        if known is not None:
            return known[0]
        if self._named:
            raise ValueError("[ddp] a bucket holds a parameter of another model than the hook's")
        key = str(len(self._known))
        if self._saved_shapes:
            _check(key, tuple(parameter.shape), self._saved_shapes)
        self._know(key, parameter)
        return key

    def _know(self, key: str, parameter: torch.Tensor) -> None:
        self._known[id(parameter)] = key, parameter
        self._shapes[key] = tuple(parameter.shape)


def _check(key: str, shape: tuple[int, ...], saved: Mapping[str, tuple[int, ...]]) -> None:
    if saved.get(key) != shape:
        found = f"shape {saved[key]}" if key in saved else "no such parameter"
        raise ValueError(
            f"[ddp] the state was saved for another model: parameter {key} has shape {shape}, "
            f"the state has {found}; load what this model's hook has saved"
        )


def _timeout(group: dist.ProcessGroup) -> timedelta:
    """Return the time limit of a group's collectives."""
    options: Any = getattr(group, "options", None)  # of a group in Python alone
    if options is None:
        options = group._get_backend(torch.device("cpu")).options
    timeout: timedelta = options._timeout
    return timeout

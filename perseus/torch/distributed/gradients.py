"""Reduces the gradients of DistributedDataParallel as those of a DistributedOptimizer are reduced.

Codecs, accumulation over steps, the checks of NaNs and parameters, and the timeline act on them,
under the names of the parameters. DDP hands over buckets; the core reduces the parameters' parts
where they lie.
Belongs to the thread that trains; hooks run in autograd's threads, one at a time for a model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from math import prod
from typing import Any, Protocol
from weakref import ref

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from perseus.compression import INSIDE, SETTINGS
from perseus.errors import HorovodInternalError
from perseus.gradients.parameter_check import SETTING as PARAMETER_CHECK
from perseus.gradients.rotation import refuse_check
from perseus.gradients.turns import SETTING
from perseus.memory import keep_freed_memory
from perseus.operations import Kind, ReduceOp
from perseus.torch.distributed.future import Future
from perseus.torch.distributed.optimizer_steps import OptimizerSteps
from perseus.torch.distributed.parameter_check import ModelCheck
from perseus.torch.distributed.residuals import ModelResiduals
from perseus.torch.distributed.streams import aside, gpu_of
from perseus.torch.distributed.turns import ModelTurns
from perseus.torch.distributed.work import as_torch_raises
from perseus.torch.distributed.world import World
from perseus.torch.residuals import as_buffers, as_tensors
from perseus.torch.sparse import header_and_indices, sparse_total
from perseus.torch.untraced import untraced
from perseus.torch.wrapped import wrapper_residuals

# A module's attributes with the hooks that Gradients registers.
_HOOKS = ("_state_dict_hooks", "_load_state_dict_pre_hooks")
_SAVED = "perseus_residuals"  # in the metadata of the wrapper's state_dict
_BY_THE_RANKS_LEFT = (
    "[torch] join(divide_by_initial_world_size=False) divides by the number of ranks that are "
    "left, which Perseus does not do: leave the argument out"
)
_UNEVEN_TURNS = (
    f"[torch] join() does not go with {SETTING}, because a rank without batches has no parameters "
    f"to send: unset it, or give every rank the same number of batches"
)
# torch's hooks in C++, which refuse the values of futures in Python, and what does the same.
_BUILT_IN = {
    c10d.BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
    c10d.BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
}
_engine: Any = torch.autograd.Variable._execution_engine


class Group(Protocol):
    """What a process group of this backend has for the models that it trains."""

    world: World

    def new_gradients(self) -> int:
        """Return the number of the next model, the same on all ranks."""


class Gradients:
    """The gradients of one model, for as long as it lives.

    is_copy: whether the model was copied or loaded from a file, as some ranks may do alone. It then
    gets its number, and what depends on that, when all ranks reduce its gradients.
    """

    _check: ModelCheck
    _residuals: ModelResiduals
    _steps: OptimizerSteps

    def __init__(self, model: Any, group: Group, is_copy: bool = False) -> None:
        self._model = model
        self._group = group
        self._keys = _names_of_trained(model)
        self._names: dict[torch.Tensor, str] = {}
        self._number = 0  # = it has not begun
        self._turns: ModelTurns | None = None
        self._loaded: dict[str, Any] = {}  # what _load() was given before it began
        keep_freed_memory(group.world.context.setting)
        self._sums_steps = group.world.context.setting("PERSEUS_ACCUMULATE_N_STEPS") > 1
        # Of the backward pass:
        self._applies = True  # false: a part of a sum over steps, or a NaN that is to be skipped
        self._failure: Exception | None = None
        self._sums: dict[torch.Tensor, torch.Tensor] = {}  # over steps, in the buckets
        if not is_copy:
            self._begin()
        self._hooks = [
            model._register_state_dict_hook(self._save),
            model.register_load_state_dict_pre_hook(self._load),
        ]

    def _begin(self) -> None:
        """Take the model's number, unless it has one. All ranks do so in the same order."""
        if self._number != 0:
            return
        world = self._group.world
        self._number = self._group.new_gradients()
        self._names = {p: self._name_of(key) for p, key in self._keys.items()}
        names = {key: self._names[p] for p, key in self._keys.items()}
        self._residuals = ModelResiduals(world, self._number, names)
        self._turns = self._begin_turns()
        self._check = ModelCheck(self._names, self._number, world)
        self._steps = OptimizerSteps(self._keys, self._after_steps)
        of_module = wrapper_residuals(self._model.module)
        of_module.begin(self._residuals, world)
        world.keepers.add(of_module)
        if self._loaded:
            self._go_on_with(self._loaded)

    def leave_out(self, state: dict[str, Any]) -> None:
        """Take what belongs to this group out of a copy of the model's attributes."""
        state.pop("_perseus", None)
        group = self._model.process_group
        state["_comm_hooks"] = [
            (hook, given)
            for hook, given in state["_comm_hooks"]
            if hook is not _reduce and not (given is group and hook in _BUILT_IN.values())
        ]
        ours = {hook.id for hook in self._hooks}
        for name in _HOOKS:
            hooks = state[name]
            state[name] = type(hooks)((key, hook) for key, hook in hooks.items() if key not in ours)

    def _begin_turns(self) -> ModelTurns | None:
        """What averages parameters, where settings say that gradients stay within hosts."""
        world = self._group.world
        parts = world.context.setting(SETTING)
        if parts == 1 or world.size == 1 or not self._keys:
            return None
        refuse_check(parts, world.context.setting(PARAMETER_CHECK))
        return ModelTurns(list(self._keys), self._number, world, parts)

    @property
    def averages_parameters(self) -> bool:
        """Whether replicas differ between steps. All ranks ask."""
        self._begin()
        return self._turns is not None

    def make_parameters_equal(self) -> None:
        """Give them the average of all ranks, if they are averaged in turn. A collective."""
        self._begin()
        if self._turns is not None:
            with torch.no_grad():
                self._turns.make_equal()

    def _name_of(self, key: str) -> str:
        """Models may have parameters of the same names, whose reductions are under way at once."""
        return key if self._number == 1 else f"{key} of model {self._number}"

    def take_over(self) -> None:
        """Reduce the gradients from now on, unless a communication hook is registered already."""
        if not self._model._comm_hooks:
            self._model.register_comm_hook(ref(self), _reduce)

    def reduce(self, bucket: Any) -> Future:
        """Start the reduction of a bucket; return a future of its buffer.

        Errors are raised at the end of the backward pass: torch hangs if a hook raises one, and
        takes one that the future has for a tensor.
        """
        buffer = bucket.buffer()
        device = gpu_of(buffer)
        completer = self._group.world.completer
        future = Future(completer, device)
        in_pass = _in_pass()
        try:
            self._begin()
            if bucket.index() == 0:
                # No _end_pass() follows a pass that join() only shadows.
                self._applies, self._failure = True, None
                self._sums = {}
            if bucket.is_last() and in_pass:
                # DDP's own callback, which writes the gradients, is queued after this one.
                _engine.queue_callback(lambda: _engine.queue_callback(self._end_pass))
            wait = self._start(bucket, buffer)
            if bucket.index() == 0 and (compare := self._check.begin(has_joined=not in_pass)):
                wait = partial(_both, wait, compare)
        except Exception as error:
            wait = partial(_raise, error)

        def complete() -> None:
            with aside(device):
                self._complete(future, buffer, wait, in_pass)

        completer.call(complete)
        return future

    def _start(self, bucket: Any, buffer: torch.Tensor) -> Callable[[], Any]:
        """Start the reductions; return what waits for them."""
        if buffer.is_sparse:
            return self._start_sparse(self._names[bucket.parameters()[0]], buffer)
        handles: list[int] = []
        try:
            self._submit(bucket.parameters(), buffer, handles)
        except Exception as error:
            return partial(self._await, handles, error)
        return partial(self._await, handles)

    def _start_sparse(self, name: str, buffer: torch.Tensor) -> Callable[[], Any]:
        if self._sums_steps:
            raise ValueError(
                f"[torch] the gradient of {name} is sparse; PERSEUS_ACCUMULATE_N_STEPS sums dense "
                f"ones: make the layer without sparse=True"
            )
        own = buffer.coalesce()
        values = own.values().contiguous()
        operations, size = self._group.world.operations, self._group.world.size
        # The NaN check takes real numbers.
        number = self._number if values.is_floating_point() else 0
        # The values first: only they may have a dtype that is refused, and then nothing has begun.
        in_values = operations.submit(Kind.ALLGATHER, f"{name}.values", values, gradient_of=number)
        indices = operations.submit(Kind.ALLGATHER, f"{name}.indices", header_and_indices(own))
        handles = [indices, in_values]

        def wait() -> None:
            described, gathered = self._await(handles)
            if gathered is not None:
                buffer.copy_(sparse_total(described, gathered, own, ReduceOp.Average, size))

        return wait

    def _submit(
        self, parameters: list[torch.Tensor], buffer: torch.Tensor, handles: list[int]
    ) -> None:
        submit = self._group.world.operations.submit
        codec, parts_of_parameters = SETTINGS, 0.0
        if self._turns is not None:
            codec, parts_of_parameters = INSIDE, float(self._turns.parts)
        if buffer.is_complex():  # newer versions of DDP hand over the parts of complex numbers
            buffer = torch.view_as_real(buffer).view(-1)
        shapes = [(*p.shape, 2) if p.is_complex() else tuple(p.shape) for p in parameters]
        parts = torch.split(buffer, [prod(shape) for shape in shapes])
        for parameter, shape, flat in zip(parameters, shapes, parts, strict=True):
            part = flat.view(shape)  # which PowerSGD takes as a matrix
            if self._sums_steps:
                self._sums[parameter] = part
            handles.append(
                submit(Kind.ALLREDUCE, self._names[parameter], part, part, op=ReduceOp.Average,
                       gradient_of=self._number, codec=codec,
                       codec_argument=parts_of_parameters,
                       learning_rate=self._steps.rate_of(parameter))
            )  # fmt: skip

    def _await(self, handles: list[int], failure: Exception | None = None) -> list[Any]:
        """Wait for all; return the results. None: not to be applied."""
        results = []
        for handle in handles:
            try:
                results.append(self._group.world.operations.synchronize(handle))
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure
        if any(result is None for result in results):
            self._applies = False
        return results

    def _complete(
        self, future: Future, buffer: torch.Tensor, wait: Callable[[], Any], in_pass: bool
    ) -> None:
        try:
            wait()
        except Exception as error:
            failure = as_torch_raises(error)
            if not in_pass:
                future.complete(None, failure)
                return
            self._failure = self._failure or failure
        future.complete(buffer, None)

    def _end_pass(self) -> None:
        """Raise what has failed; leave optimizers nothing to step with in a step not to apply."""
        failure, self._failure = self._failure, None
        applies, self._applies = self._applies, True
        sums, self._sums = self._sums, {}
        if failure is not None:
            raise failure
        if not applies:
            for parameter in self._keys:
                parameter.grad = None
        if applies:
            _give_back(sums)
            self._steps.begin_step()
        if self._turns is not None:
            _take(partial(self._turns.end_pass, owes=applies))

    def _after_steps(self) -> None:
        # A hook may step inside a backward pass, which needs the parameters as they are.
        if self._turns is not None and not _in_pass():
            _take(self._turns.take_owed)

    # ---- what lossy codecs hold back ----

    def _save(self, _: Any, state: Any, prefix: str, metadata: dict[str, Any]) -> None:
        """In the metadata, where it is no key that another model would not expect."""
        if self._loaded:
            metadata[_SAVED] = self._loaded
        found = self._residuals.residuals() if self._number != 0 else {}
        if found:
            metadata[_SAVED] = {"rank": self._group.world.rank, "held": as_tensors(found)}

    def _load(self, _: Any, state: Any, prefix: str, metadata: dict[str, Any], *__: Any) -> None:
        """Go on with what this rank has saved; other ranks' begin without any."""
        if self._turns is not None:
            self._turns.drop()
        saved = metadata.get(_SAVED) or {"rank": None, "held": {}}
        if self._number == 0:
            self._loaded = saved
            return
        try:
            self._go_on_with(saved)
        except HorovodInternalError:  # the world is closed, or was the parent process's
            self._loaded = saved

    def _go_on_with(self, saved: dict[str, Any]) -> None:
        self._loaded = {}
        self._residuals.go_on_with(as_buffers(saved["held"]), saved["rank"])


def _names_of_trained(model: Any) -> dict[torch.Tensor, str]:
    """The parameters that DDP reduces, now or later, with their names."""
    # As torch matches names: it does reduce an ignored parameter of the outermost module itself.
    reduced = {
        parameter
        for place, module in model.module.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if f"{place}.{name}" not in model.parameters_to_ignore
    }
    reduced.update(getattr(model, "_delay_all_reduce_params", ()))
    named = model.module.named_parameters()
    return {p: name for name, p in named if p.requires_grad and p in reduced}


def _give_back(sums: dict[torch.Tensor, torch.Tensor]) -> None:
    """Set the gradients of parameters that an earlier step of a sum has used, but not the last one.

    DDP leaves those that no rank uses in a pass as they are, and an earlier pass has set them to
    None. A sum of zeros is that of a parameter that no step has used.
    """
    for parameter, part in sums.items():
        if parameter.grad is None and part.any():
            total = part.to(parameter.dtype.to_real(), copy=True)
            if parameter.is_complex():
                total = torch.view_as_complex(total)
            # DDP's buckets have the order of the parameter in memory, unless it has gaps there.
            if torch.empty_like(parameter, device="meta").stride() == parameter.stride():
                total = total.as_strided(parameter.shape, parameter.stride())
            parameter.grad = total


def _has_buckets(model: Any) -> bool:
    """Whether DDP's reducer hands the gradients over; settings do not act on what it does not.

    The reducer in Python calls a hook with each gradient, inside of what torch.compile traces. A
    model whose all-reduces are all delayed has no reducer, and none of the attributes for it.
    """
    return hasattr(model, "_comm_hooks") and not getattr(model, "_use_python_reducer", False)


def _reduce(reference, bucket):  # type: ignore[no-untyped-def] # DDP wants classes as annotations
    """The communication hook. DDP's reducer would keep the model alive if it were a method."""
    return reference().reduce(bucket)


def _in_pass() -> bool:
    """Whether autograd is calling, in a backward pass."""
    return torch._C._current_graph_task_id() != -1


def _raise(error: Exception) -> None:
    raise error


def _both(wait: Callable[[], Any], compare: Callable[[], None]) -> None:
    try:
        wait()
    finally:
        compare()


def _take(turn: Callable[[], None]) -> None:
    try:
        with torch.no_grad():
            turn()
    except Exception as error:
        failure = as_torch_raises(error)
        if failure is error:
            raise
        raise failure from error


def synchronize_parameters(model: DistributedDataParallel) -> None:
    """Make a model's parameters equal on all ranks, where PERSEUS_DOWNSAMPLE_N_ELEMENTS is set.

    They become the average of all ranks. Call it on all ranks before evaluation and checkpoints; a
    checkpoint that rank 0 saves without it has rank 0's replica. Without the setting, and for
    models on other backends, it does nothing. Raises TypeError unless the model is a
    DistributedDataParallel.
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"[torch] synchronize_parameters: expected a DistributedDataParallel, got a "
            f"{type(model).__name__}; pass the wrapper"
        )
    gradients = getattr(model, "_perseus", None)
    if gradients is not None:
        gradients.make_parameters_equal()


def take_models(group_of: Callable[[Any, str], Group | None]) -> None:
    """Let every DistributedDataParallel that is made from now on reduce its gradients so.

    group_of: returns the group of this backend that a process group has for tensors on a type of
    device, or None; models of other groups, and those without buckets, stay as they are.
    """
    models: Any = DistributedDataParallel
    original = models.__init__

    @wraps(original)
    def make(model: Any, *args: Any, **kwargs: Any) -> None:
        original(model, *args, **kwargs)
        group = group_of(model.process_group, model.device_type)
        if group is not None and _has_buckets(model):
            model._perseus = Gradients(model, group)

    models.__init__ = make
    get_state, set_state = models.__getstate__, models.__setstate__

    @wraps(get_state)
    def without_ours(model: Any) -> Any:
        state = get_state(model)
        gradients = getattr(model, "_perseus", None)
        if gradients is not None:
            gradients.leave_out(state)
        return state

    @wraps(set_state)
    def with_ours(model: Any, state: Any) -> None:
        set_state(model, state)
        group = group_of(model.process_group, model.device_type)
        if group is not None and _has_buckets(model):
            model._perseus = Gradients(model, group, is_copy=True)
            model._lazy_init_ran = False  # its reducer is new, and has no hook

    models.__getstate__, models.__setstate__ = without_ours, with_ours
    begin = models._lazy_init

    @untraced
    @wraps(begin)
    def begin_and_take_over(model: Any) -> None:
        # In the first forward pass, however it is called. Until then a script may register a hook
        # of its own, and begin() registers torch's for optimizers in the backward pass.
        begin(model)
        gradients = getattr(model, "_perseus", None)
        if gradients is not None:
            gradients.take_over()

    models._lazy_init = begin_and_take_over
    register_built_in = models._register_builtin_comm_hook

    @wraps(register_built_in)
    def register_in_python(model: Any, comm_hook_type: Any) -> None:
        hook = _BUILT_IN.get(comm_hook_type)
        if hook is None or getattr(model, "_perseus", None) is None:
            register_built_in(model, comm_hook_type)
        else:
            model.register_comm_hook(model.process_group, hook)

    models._register_builtin_comm_hook = register_in_python
    joins: Any = Join
    notify = joins.notify_join_context

    def notify_join_context(joinable: Any) -> Any:
        # DDP would wait in C++ for a work whose Python object is gone by then, without end.
        initial = getattr(joinable, "_divide_by_initial_world_size", True)
        gradients = getattr(joinable, "_perseus", None)
        if gradients is not None and not initial:
            raise ValueError(_BY_THE_RANKS_LEFT)
        joining = joinable._join_config.enable
        if joining and gradients is not None and gradients.averages_parameters:
            raise ValueError(_UNEVEN_TURNS)
        return notify(joinable)

    joins.notify_join_context = staticmethod(notify_join_context)
    start = models._delayed_all_reduce_hook

    def start_delayed(model: Any, gradient: torch.Tensor) -> torch.Tensor:
        # torch's own never waits for it, and an optimizer would step with parts of the sums.
        if group_of(model.process_group, model.device_type) is None:
            return start(model, gradient)  # type: ignore[no-any-return]
        group, buffer = model.process_group, model._delay_grad_buffer
        buffer.div_(group.size())
        _engine.queue_callback(dist.all_reduce(buffer, group=group, async_op=True).wait)
        return gradient

    models._delayed_all_reduce_hook = start_delayed

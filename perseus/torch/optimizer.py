"""DistributedOptimizer: averages gradients over all ranks while backward is still running.

Source of behaviour: Horovod 0.28.1, horovod.torch.optimizer.
"""
# ruff: noqa: PLR0917 - the signatures are Horovod's

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, cast

import torch

from perseus import basics
from perseus.compression import Compressor, InsideCompressor, castable, inside
from perseus.errors import HorovodInternalError, MismatchError
from perseus.gradients.arguments import (
    check_adasum_of_steps,
    checked_groups,
    checked_passes,
    checked_reduction,
    not_an_optimizer,
    wrapped_twice,
)
from perseus.gradients.parameter_check import ParameterCheck
from perseus.gradients.participation import alone
from perseus.gradients.plan import Plan
from perseus.gradients.residuals import own
from perseus.gradients.rotation import parts_of
from perseus.gradients.turns import SETTING
from perseus.process_sets import ProcessSet, global_process_set
from perseus.torch.adasum import AdasumOptimizer, adasum_optimizer
from perseus.torch.compression import Compression
from perseus.torch.functions import buffer_of, initial_state, parameters_of
from perseus.torch.gradient_scaler import let_scalers_wait
from perseus.torch.hooks import calls_hooked_step
from perseus.torch.learning_rates import steps_of
from perseus.torch.parameters import Parameters, SharedGroups, placed
from perseus.torch.reducer import GradientReducer
from perseus.torch.reductions import allreduce
from perseus.torch.residuals import OWNER, as_buffers, as_tensors, with_owner
from perseus.torch.rotation import TorchRotation
from perseus.torch.session import Adasum, Average, Sum
from perseus.torch.untraced import untraced

_RESIDUALS = "perseus_residuals"  # the key in state_dict()

_RACE = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
    "optimizer.synchronize(). This is prohibited as it can cause a race condition."
)

_COPIED_TOO_EARLY = (
    "[torch] optimizer.step() had to reduce gradients that the script had already copied to master "
    "weights: call optimizer.synchronize() after loss.backward(), before they are copied, and "
    "step() within optimizer.skip_synchronize()"
)


class _NotApplied(Exception):  # noqa: N818 - it ends a step and reaches no caller
    """A closure's gradients are not to be applied, so the wrapped optimizer takes no step."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss


class _DistributedOptimizer(SharedGroups):
    """The mixin that DistributedOptimizer puts in front of the wrapped optimizer's class."""

    _check: ParameterCheck
    _parameters: Parameters
    _reducer: GradientReducer
    _rotation: TorchRotation | None
    _takes_part: bool
    _scaler_waited: bool  # before_unscaling() has called synchronize() for the next step
    _should_synchronize: bool
    _steps_now: bool
    _synchronized: bool
    _wrapped: type[torch.optim.Optimizer]

    @property
    def backward_passes_per_step(self) -> int:
        """The number of backward passes that are summed before gradients are reduced."""
        return self._reducer.passes

    @property
    def op(self) -> int:
        """The reduction applied to gradients."""
        return self._reducer.plan.op

    @property
    def gradient_predivide_factor(self) -> float:
        """The factor by which gradients are divided before they are summed."""
        return self._reducer.plan.predivide_factor

    @property
    def sparse_as_dense(self) -> bool:
        """Whether sparse gradients are made dense before they are reduced."""
        return self._reducer.plan.sparse_as_dense

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that take part."""
        return self._reducer.plan.process_set

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        """The parameters' names, which Horovod's own tests read."""
        return self._reducer.names

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set how many backward passes belong to a step, and restart the count."""
        self._reducer.passes = passes
        self._reducer.reset()

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, with residuals in the key "perseus_residuals".

        The residuals are {name: (layout, float32 of shape (2, elements))}. They belong to this
        rank, which is in "perseus_rank"; saving them needs no communication. The keys are missing
        if there are no residuals, as without a lossy codec.
        """
        state = super().state_dict()
        self._reducer.wait()
        residuals = as_tensors(self._reducer.residuals.read())
        return with_owner({**state, _RESIDUALS: residuals}) if residuals else state

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load the wrapped optimizer's state and the residuals of "perseus_residuals", if any.

        A rank goes on with residuals that it has saved itself, and otherwise begins without any.
        Reductions in flight are finished first, all earlier residuals and sums over steps are
        dropped, and the count of backward passes restarts. What `Compression.rotate` would still
        correct is dropped, too, as the model's parameters are loaded beside this state.
        """
        self._reducer.allow_changes()
        try:
            self._reducer.finish_begun()
        except MismatchError:
            raise
        except HorovodInternalError:
            pass  # the world has ended, and the loaded state replaces the results of that step
        self._synchronized = self._scaler_waited = False
        self._reducer.forget()
        if self._rotation is not None:
            self._rotation.drop()
        super().load_state_dict(*args, **kwargs)
        state = args[0] if args else kwargs["state_dict"]
        self._reducer.residuals.replace(
            own(as_buffers(state.get(_RESIDUALS, {})), state.get(OWNER))
        )

    @untraced
    def synchronize(self) -> None:
        """Wait until every p.grad is reduced over all ranks.

        It also starts the reductions that backward did not reach; a parameter without a gradient
        contributes zeros. To clip gradients, call it before clipping, and then call step() within
        skip_synchronize(). A torch.amp.GradScaler calls it by itself. Raises HorovodInternalError
        if a reduction failed, after all of them have ended; ValueError if the script has changed a
        gradient in place while it was being reduced.

        Parameters that have joined the optimizer since the last step, in new groups or in place of
        others, or have become trainable, are reduced as well, from now on; those that are in no
        group any more, for the last time. They must be the same on all ranks. Where a copy in a
        wider dtype has taken the place of a parameter, as master weights do, the latter's gradient
        is reduced, as before. Raises ValueError for joining ones and for master weights if hosts
        average parameters instead of gradients.
        """
        if self._has_waited():
            return
        reducer = self._reducer
        if reducer.begins_world:
            self._follow_world()
        # A new rank of an elastic job knows the present ones only.
        if reducer.begins_world and reducer.has_begun_only(self._of_model()):
            self._follow_parameters()
        reducer.synchronize()
        # Else not earlier: where a backward pass has reached a parameter that is now gone, its
        # reduction is under way, and a rank whose pass did not reach it must take part.
        reducer.catch_up(self._follow_parameters())
        # Before the step only if it comes later: a gradient scaler may skip it on one rank.
        if not self._steps_now:
            self._take_turn()
        self._synchronized = True

    def before_unscaling(self) -> None:
        """Call synchronize(), unless the script has. A GradScaler calls it before it reads p.grad.

        The next step() then behaves as within skip_synchronize(), and synchronize() does nothing.
        """
        if self._should_synchronize and (self._reducer.has_begun() or not self._synchronized):
            self.synchronize()
            self._scaler_waited = True

    def after_scaled_step(self) -> None:
        """Forget that a GradScaler has waited for the gradients of a step that it left out."""
        if self._scaler_waited:
            self._scaler_waited = self._synchronized = False

    def _has_waited(self) -> bool:
        """Return whether a GradScaler has waited for the gradients that are there now."""
        return self._scaler_waited and not self._reducer.has_begun()

    def _follow_world(self) -> None:
        """Begin or end to take part if ranks have changed, with which a process set has others."""
        takes_part = _takes_part(self._reducer.plan.process_set)
        if takes_part == self._takes_part:
            return
        self._takes_part = takes_part
        reducer = self._reducer
        if takes_part:
            known = [p for p in self._of_model() if p.requires_grad and p in reducer.names]
            reducer.add_all(known)
        else:
            reducer.keep([])

    def _of_model(self) -> list[torch.Tensor]:
        return self._parameters.of_model(self.param_groups)

    def _follow_parameters(self) -> list[torch.Tensor]:
        """Let the reducer know those that have joined, become trainable or gone.

        Returns those whose gradients it reduces only from now on.
        """
        parameters, reducer = self._parameters, self._reducer
        if not parameters.have_changed(self.param_groups):
            return []
        joining = self._joining()
        # The core sums steps by names, so a parameter that has gone goes on with its sum.
        forgets = basics.setting("PERSEUS_ACCUMULATE_N_STEPS") == 1
        present = parameters.update(self.param_groups, forget=forgets)
        reducer.step_of = steps_of(self, self._wrapped, parameters.models)
        if forgets:
            reducer.keep(present)
        reducer.add(joining)
        if self._takes_part:
            reducer.refuse(parameters.models)
        return joining

    def _joining(self) -> list[torch.Tensor]:
        """Return those whose gradients are to be reduced from now on."""
        if not self._takes_part:
            return []
        parameters, reduced = self._parameters, self._reducer.parameters()
        named = zip(self._of_model(), parameters.named(self.param_groups), strict=True)
        joining = {p: name for p, (name, _) in named if p.requires_grad and p not in reduced}
        if issubclass(self._reducer.plan.compression, InsideCompressor):
            if parameters.models:
                model = next(iter(parameters.models.values()))
                raise ValueError(
                    "[torch] master weights have taken the place of the parameter "
                    f"{parameters.names[model]} and would be copied over its average between "
                    "hosts: use them without Compression.rotate, LocalSGD and DiLoCo"
                )
            if joining:
                raise ValueError(
                    f"[torch] the parameter {next(iter(joining.values()))} joined the optimizer, "
                    "or became trainable, too late to be averaged between hosts: wrap the "
                    "optimizer anew"
                )
        return list(joining)

    def _take_turn(self) -> None:
        if self._rotation is not None and self._takes_part and self._reducer.applies:
            self._rotation.take_turn()

    @untraced
    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Return a context in which step() does not reduce p.grad, for use after synchronize()."""
        return self._skipping()

    @contextmanager
    def _skipping(self) -> Iterator[None]:
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    @calls_hooked_step
    @untraced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Call synchronize(), then the wrapped optimizer's step(closure).

        A closure may compute gradients: whatever it begins to reduce is reduced when it returns. It
        must do so on all ranks or on none. torch.optim.LBFGS is given the average of all ranks'
        losses (their sum with op=Sum), and returns it: its line search and its stopping tests then
        decide alike on all ranks.

        While PERSEUS_ACCUMULATE_N_STEPS sums gradients, or if a NaN is to be skipped, no rank takes
        a step; a closure is called nevertheless. Raises MismatchError if
        PERSEUS_PARAMETER_CHECK_N_STEPS finds that parameters differ between ranks. Raises
        ValueError if it reduces gradients that the script has copied to master weights before.
        """
        if self._check.due():
            named = self._parameters.named(self.param_groups)
            self._check.compare((name, buffer_of(p)) for name, p in named)
        synchronizes = self._should_synchronize and not self._has_waited()
        self._scaler_waited = False
        if synchronizes and self._synchronized:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after "
                "optimizer.synchronize(). This can cause training slowdown.",
                stacklevel=2,
            )
        # A closure is about to compute gradients, unless backward passes have done so.
        waits_for_closure = synchronizes and closure is not None and not self._reducer.has_begun()
        if synchronizes and not waits_for_closure:
            self._synchronize_in_step()
        applies = self._take_result()
        if not applies and closure is None:
            return None
        if closure is None:
            result = super().step(None)
        else:
            evaluate = self._reducing(closure, waits_for_closure)
            try:
                if not applies:
                    with torch.enable_grad():
                        return evaluate()
                result = super().step(evaluate)
            except _NotApplied as stopped:
                return stopped.loss
        if not self._has_skipped_inside():
            self._reducer.unapplied = False
        if synchronizes:  # then the step's own change is averaged, too
            self._take_turn()
        return result

    def _has_skipped_inside(self) -> bool:
        """Return whether a fused step has applied nothing, as GradScaler tells it to.

        Where that decides nothing, a GPU is not asked, since that would take time.
        """
        found = getattr(self, "found_inf", None)
        return (
            found is not None
            and basics.setting("LIGHT_TOPK_MOMENTUM_CORRECTION") > 0
            and bool(found)
        )

    def _synchronize_in_step(self) -> None:
        has_begun = self._reducer.has_begun()
        self._steps_now = True
        try:
            self.synchronize()
        finally:
            self._steps_now = False
        # Not earlier, so that other ranks do not wait for this one.
        if has_begun:
            self._refuse_copies()

    def _refuse_copies(self) -> None:
        """Raise ValueError if there are master weights, which got gradients of this rank only."""
        if self._parameters.models:
            raise ValueError(_COPIED_TOO_EARLY)

    def _take_result(self) -> bool:
        """Return whether the gradients that have been reduced may be applied."""
        self._synchronized = False
        applies, self._reducer.applies = self._reducer.applies, True
        return applies

    def _reducing(self, closure: Callable[[], Any], first: bool) -> Callable[[], Any]:
        """Return a closure that has reduced its gradients by the time it returns.

        first: the first call reduces, whether or not it has computed gradients here: other ranks
        may have computed some.
        """

        def evaluate() -> Any:
            nonlocal first
            loss = closure()
            if first:
                first = False
                self._synchronize_in_step()
            elif self._reducer.has_begun():
                self._reducer.synchronize()
                self._refuse_copies()
            if not self._take_result():
                raise _NotApplied(loss)
            return self._loss_of_all(loss) if isinstance(self, torch.optim.LBFGS) else loss

        return evaluate

    def _loss_of_all(self, loss: Any) -> Any:
        """The loss that belongs to the reduced gradients, by which LBFGS decides how to go on."""
        plan = self._reducer.plan
        # Hosts that step on their own call their closures at different times.
        if not self._takes_part or issubclass(plan.compression, InsideCompressor):
            return loss
        own = torch.as_tensor(loss, dtype=None if torch.is_tensor(loss) else torch.float64)
        return allreduce(
            own.detach(),
            name="lbfgs_loss",
            op=Sum if plan.op == Sum else Average,
            process_set=plan.process_set,
        )

    @untraced
    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Call the wrapped optimizer. Raises AssertionError while gradients are being reduced."""
        if self._reducer.busy():
            raise AssertionError(_RACE)
        self.after_scaled_step()  # the script has left out the step
        super().zero_grad(*args, **kwargs)

    # Shows torch's signature; the wrapped optimizer may have another, and defaults of its own.
    cast(Any, zero_grad).__wrapped__ = torch.optim.Optimizer.zero_grad

    @staticmethod
    def find_duplicates(lst: Iterable[Any]) -> set[Any]:
        """Return the elements that occur more than once."""
        seen: set[Any] = set()
        duplicates: set[Any] = set()
        for item in lst:
            (duplicates if item in seen else seen).add(item)
        return duplicates


def DistributedOptimizer(  # noqa: N802 - the name is Horovod's
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.settings,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> _DistributedOptimizer | AdasumOptimizer:
    """Return an optimizer of the same class that reduces gradients over all ranks before each step.

    optimizer: any torch optimizer. The result shares its param_groups but not its present state,
        which is copied from optimizers outside torch.optim.
    named_parameters: `model.named_parameters()`, so that ranks match gradients by name; it must
        name every parameter. Without it, parameters must be in the same order on all ranks.
    compression: how gradients are encoded on their way. Without it the settings decide, by default
        float16 between hosts; Compression.none keeps full precision everywhere.
    backward_passes_per_step: backward passes whose gradients are summed locally before they are
        reduced.
    op: Average, Sum, Min, Max or Product: of gradients. Adasum: of the steps that every rank's own
        optimizer takes; synchronize() then does nothing, and skip_synchronize() raises
        AssertionError.
    gradient_predivide_factor: f: gradients are divided by f before and by size / f after the sum;
        only with Average.
    groups: reduce several gradients as one operation: an int makes that many groups in order; lists
        of tensors form groups as given, all others are reduced one by one. Formerly num_groups.
    sparse_as_dense: send sparse gradients as dense ones. Otherwise their indices and values are
        gathered, with op Average or Sum only, which needs a gradient on every rank in the first
        step; later a missing one counts as empty. Either way, gradients stay sparse for the wrapped
        optimizer.
    process_set: the ranks that take part.

    The result also has synchronize(), skip_synchronize() and set_backward_passes_per_step(). Raises
    ValueError for inconsistent arguments.
    """
    _check_optimizer(optimizer)
    op = checked_reduction(op, gradient_predivide_factor, compression, process_set, "torch")
    checked_passes(backward_passes_per_step, "torch")
    parameters = parameters_of(optimizer)
    names = _names(optimizer, parameters, named_parameters)
    plan = Plan(
        groups=checked_groups(groups, num_groups, "tensor", _identity),
        compression=castable(compression, op in (Average, Sum)),
        op=op,
        predivide_factor=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )
    # Whether this rank takes part in the set may change with the world.
    if op == Adasum and not alone():
        check_adasum_of_steps("torch")
        return adasum_optimizer(
            optimizer, names, compression, backward_passes_per_step, process_set
        )
    active = _takes_part(process_set)
    trainable = [p for p in parameters if p.requires_grad]
    rotation = None
    if not alone() and trainable and (parts := parts_of(plan)) > 1:
        if isinstance(optimizer, torch.optim.LBFGS) and active and process_set.size() != 1:
            raise ValueError(
                "[rotate] torch.optim.LBFGS decides by this host's loss how often it calls its "
                "closure, but all hosts must reduce equally often: use another optimizer, or "
                f"neither Compression.rotate nor {SETTING}"
            )
        plan = replace(plan, compression=inside(parts))
        rotation = TorchRotation(trainable, names[trainable[0]], process_set, parts)
    wrapped = type(optimizer)
    made = cast(_DistributedOptimizer, _DistributedOptimizer.made_of(optimizer))
    made.state = initial_state(optimizer)
    made._check = ParameterCheck(process_set)
    made._rotation = rotation
    made._takes_part = active
    made._wrapped = wrapped
    made._parameters = Parameters(made.param_groups, names)
    made._should_synchronize = True
    made._synchronized = made._scaler_waited = made._steps_now = False
    let_scalers_wait()
    made._reducer = GradientReducer(
        trainable if active else [],
        names,
        plan,
        backward_passes_per_step,
        steps_of(made, wrapped),
    )
    return made


def _takes_part(process_set: ProcessSet) -> bool:
    """Return whether this rank has gradients to reduce."""
    acts = not alone() or basics.settings_act_on_gradients()
    return bool(process_set.included()) and acts


def _check_optimizer(optimizer: Any) -> None:
    """Raise ValueError for an object that cannot be wrapped."""
    if isinstance(optimizer, (_DistributedOptimizer, AdasumOptimizer)):
        raise wrapped_twice("torch")
    if not hasattr(optimizer, "param_groups"):
        raise not_an_optimizer(
            optimizer,
            "torch",
            "an optimizer of torch.optim",
            "torch.optim.SGD(model.parameters(), lr=0.01)",
        )


def _names(
    optimizer: torch.optim.Optimizer,
    parameters: list[torch.Tensor],
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
) -> dict[torch.Tensor, str]:
    if named_parameters is None:
        return dict(placed(optimizer.param_groups))
    named = list(named_parameters) if isinstance(named_parameters, Iterable) else [None]
    if not all(
        isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], torch.Tensor)
        for item in named
    ):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced "
            "by model.named_parameters()."
        )
    duplicates = _DistributedOptimizer.find_duplicates(name for name, _ in named)
    if duplicates:
        raise ValueError(
            f"Parameter names in named_parameters must be unique. Found duplicates: "
            f"{', '.join(sorted(duplicates))}"
        )
    names = {parameter: name for name, parameter in named}
    unnamed = sum(parameter not in names for parameter in parameters)
    if unnamed:
        raise ValueError(
            f"named_parameters was specified, but {unnamed} of the optimizer's {len(parameters)} "
            f"parameters were not named. Pass named_parameters of the whole model."
        )
    return names


def _identity(tensor: Any) -> int:
    if not isinstance(tensor, torch.Tensor):
        raise ValueError("groups must consist of tensors")
    return id(tensor)

"""LocalSGD and DiLoCo: optimizers whose hosts step on their own and seldom exchange anything.

See docs/local_steps.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch

from perseus.arguments import checked_compression
from perseus.compression import (
    BFLOAT16,
    EXACT,
    FLOAT16,
    INT2,
    INT4,
    INT8,
    LOSSLESS,
    Compressor,
    InsideCompressor,
)
from perseus.gradients.handle_reducer import Session
from perseus.gradients.local_steps import (
    Pace,
    check_count,
    check_outer_gradients_travel,
    check_outer_optimizer,
    check_parameters_may_differ,
)
from perseus.gradients.participation import alone
from perseus.process_sets import ProcessSet, global_process_set
from perseus.torch.compression import Compression
from perseus.torch.functions import parameters_of
from perseus.torch.hooks import calls_hooked_step
from perseus.torch.host_session import HostSession
from perseus.torch.local_averages import LocalAverages
from perseus.torch.local_exchanges import TorchLocalSteps
from perseus.torch.optimizer import DistributedOptimizer, _DistributedOptimizer
from perseus.torch.outer_steps import Outer, OuterSteps
from perseus.torch.residuals import OWNER, with_owner
from perseus.torch.untraced import untraced

_STATE = "perseus_local_steps"  # the key in state_dict()
_CODECS = (EXACT, FLOAT16, BFLOAT16, INT8, INT4, INT2, LOSSLESS)


class _LocalOptimizer(_DistributedOptimizer):
    """The mixin that LocalSGD and DiLoCo put in front of a distributed optimizer's class."""

    _host_session: HostSession
    _local_steps: TorchLocalSteps

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, with that of its local steps in "perseus_local_steps".

        It sends nothing, but waits for averages that are under way.
        """
        return with_owner({**super().state_dict(), _STATE: self._local_steps.saved()})

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load the optimizer's state and that of its local steps.

        Without the latter, as in another optimizer's state, local steps begin anew. All ranks load,
        or one does before hvd.broadcast_parameters() gives others its parameters; they take over
        its local steps before their next step.
        """
        # What is under way would correct parameters that are loaded beside this state.
        self._local_steps.drop()
        super().load_state_dict(*args, **kwargs)
        state = args[0] if args else kwargs["state_dict"]
        self._local_steps.load(state.get(_STATE), state.get(OWNER))

    @untraced
    def synchronize(self) -> None:
        """Wait until every p.grad is averaged over the ranks of this host.

        See DistributedOptimizer.
        """
        if self._has_waited():
            return
        if not self._steps_now:
            # A gradient scaler has skipped the last step here, but not on all hosts.
            self._local_steps.end_step()
        super().synchronize()
        # With the world, a process set may get other ranks.
        if self._reducer.applies and self.process_set.included():
            self._local_steps.begin_step()
            self._check_closures()

    def _check_closures(self) -> None:
        """Raise ValueError, on all ranks, for LBFGS whose closures would reduce gradients."""
        alone = self.process_set.size() == 1
        if isinstance(self, torch.optim.LBFGS) and not alone and self._host_session.reduces():
            raise ValueError(
                "[local steps] torch.optim.LBFGS decides by its own loss how often it calls its "
                "closure, but all ranks must reduce equally often: use another optimizer, or one "
                "rank per host, PERSEUS_ACCUMULATE_N_STEPS=1 and no PERSEUS_ALLREDUCE_NANCHECK"
            )

    @calls_hooked_step
    @untraced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step with the host's gradients, and exchange what is due after it."""
        result = super().step(closure)
        self._local_steps.end_step()
        return result


def LocalSGD(  # noqa: N802 - it returns an optimizer, like Horovod's DistributedOptimizer
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    *,
    every: int,
    delay: int = 1,
    backward_passes_per_step: int = 1,
    gradient_predivide_factor: float = 1.0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> _DistributedOptimizer:
    """Return an optimizer of the same class whose hosts average parameters every `every` steps.

    In each step the ranks of a host average their gradients, and nothing travels between hosts.
    After every K-th step, parameters are sent; they become the average of all ranks.

    every: K.
    delay: the steps, up to K, until the average is applied, as x += average - sent. Nobody waits
        for a link which can send all parameters in that time. 0: all ranks wait.

    The other arguments and the result are those of DistributedOptimizer. Sparse gradients are still
    gathered from all ranks in every step. hvd.synchronize_parameters() makes parameters equal
    before evaluation and checkpoints. Raises ValueError for inconsistent arguments, and if
    PERSEUS_PARAMETER_CHECK_N_STEPS is set.
    """
    check_count("LocalSGD", "every", every, least=1)
    _check_delay("LocalSGD", delay, every)
    made, parameters, name = _inside_hosts(
        "LocalSGD", optimizer, named_parameters, process_set,
        passes=backward_passes_per_step, predivide_factor=gradient_predivide_factor,
        groups=groups, sparse_as_dense=sparse_as_dense,
    )  # fmt: skip
    if not parameters or alone():
        return made
    pace = Pace(every, 1, delay)
    return _with_local_steps(made, LocalAverages(parameters, name, process_set, pace))


def DiLoCo(  # noqa: N802 - likewise
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    *,
    every: int,
    fragments: int = 1,
    delay: int = 1,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.5,
    compression: type[Compressor] = Compression.int8,
    backward_passes_per_step: int = 1,
    gradient_predivide_factor: float = 1.0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> _DistributedOptimizer:
    """Return an optimizer of the same class whose hosts step on their own, as in DiLoCo.

    In each step the ranks of a host average their gradients. Every `every` steps, hosts average by
    how much they have changed the global parameters of the last exchange (outer gradients). SGD
    with Nesterov momentum applies that to the global parameters, from which all go on.

    every: K, the steps between two exchanges of a parameter.
    fragments: F, up to K and to the rows of the largest parameter: F parts of the parameters are
        exchanged K / F steps apart, so that the traffic is even.
    delay: the steps, up to K, until a result is applied. Nobody waits for a link which can send a
        part in that time. 0: all ranks wait.
    outer_lr, outer_momentum: of the outer optimizer.
    compression: of outer gradients: Compression.int8, int4, int2, fp16, bf16, lossless or none.

    The other arguments and the result are those of DistributedOptimizer; see also LocalSGD. Raises
    ValueError for inconsistent arguments, and if PERSEUS_PARAMETER_CHECK_N_STEPS is set or
    PERSEUS_ACCUMULATE_N_STEPS is above 1.
    """
    check_count("DiLoCo", "every", every, least=1)
    why = f", as every={every}"
    check_count("DiLoCo", "fragments", fragments, least=1, most=every, why=why)
    _check_delay("DiLoCo", delay, every)
    check_outer_optimizer(outer_lr, outer_momentum)
    _check_codec(compression)
    made, parameters, name = _inside_hosts(
        "DiLoCo", optimizer, named_parameters, process_set,
        passes=backward_passes_per_step, predivide_factor=gradient_predivide_factor,
        groups=groups, sparse_as_dense=sparse_as_dense,
    )  # fmt: skip
    if not parameters:
        return made
    check_outer_gradients_travel()
    rows = max(each.shape[0] if each.dim() else 1 for each in parameters)
    why = ", the rows of the largest parameter"
    check_count("DiLoCo", "fragments", fragments, least=1, most=rows, why=why)
    pace, outer = Pace(every, fragments, delay), Outer(outer_lr, outer_momentum, compression)
    return _with_local_steps(made, OuterSteps(parameters, name, process_set, pace, outer))


def _check_delay(where: str, delay: Any, every: int) -> None:
    check_count(where, "delay", delay, least=0, most=every, why=f", as every={every}")


def _check_codec(compression: Any) -> None:
    compression = checked_compression(compression, "DiLoCo")
    if not compression.in_core or compression.codec not in _CODECS:
        raise ValueError(
            f"[DiLoCo] compression={compression.__name__}: expected Compression.int8, int4, "
            "int2, fp16, bf16, lossless or none for outer gradients"
        )


def _inside_hosts(
    what: str,
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
    process_set: ProcessSet,
    *,
    passes: int,
    predivide_factor: float,
    groups: int | Sequence[Sequence[torch.Tensor]] | None,
    sparse_as_dense: bool,
) -> tuple[_DistributedOptimizer, list[torch.Tensor], str]:
    """Return an optimizer that averages gradients inside hosts, its parameters and a name for them.

    The parameters are those that are trained.
    """
    check_parameters_may_differ(what)
    named = None if named_parameters is None else list(named_parameters)
    made = DistributedOptimizer(
        optimizer,
        named,
        InsideCompressor,
        passes,
        gradient_predivide_factor=predivide_factor,
        groups=groups,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )
    trained = [p for p in parameters_of(optimizer) if p.requires_grad]
    distributed = cast(_DistributedOptimizer, made)
    return distributed, trained, distributed._reducer.names[trained[0]] if trained else ""


def _with_local_steps(
    made: _DistributedOptimizer, local_steps: TorchLocalSteps
) -> _DistributedOptimizer:
    plain = type(made)
    namespace = {"__module__": plain.__module__}
    made.__class__ = type(plain.__name__, (_LocalOptimizer, plain), namespace)
    local = cast(_LocalOptimizer, made)
    local._local_steps = local_steps
    local._host_session = HostSession(local_steps)
    local._reducer._session = cast(Session, local._host_session)
    return local

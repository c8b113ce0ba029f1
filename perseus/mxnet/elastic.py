"""Elastic training with MXNet: a state of networks, trainers, modules and samplers, and `run`.

Belongs to the training thread. Horovod has none for MXNet; names are those of its other elastic
modules.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any

import mxnet as mx
from mxnet.gluon.parameter import ParameterDict

from perseus.basics import init, rank, shutdown
from perseus.elastic import ObjectState, State, reset, run_fn, sampler
from perseus.elastic.handled_state import HandledState, Registry, StateDictHandler, StateHandler
from perseus.elastic.loop import failure_if, looped
from perseus.errors import HorovodInternalError, HostsUpdatedInterrupt
from perseus.gradients.residuals import Held, Source
from perseus.mxnet.functions import broadcast_object, broadcast_parameters
from perseus.mxnet.optimizer import DistributedOptimizer

__all__ = [
    "ElasticSampler",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "MXNetState",
    "ObjectState",
    "State",
    "StateHandler",
    "get_handler_registry",
    "init",
    "run",
    "run_fn",
    "shutdown",
]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Make `func(state, *args, **kwargs)` elastic; used as a decorator.

    The state is made equal on all ranks, then func runs. When the world breaks, which MXNet reports
    as MXNetError at the next wait for an array, or func raises HorovodInternalError, all ranks go
    back to the last commit, build a new world and call it again; HostsUpdatedInterrupt does the
    same but keeps the state. Other exceptions propagate. Returns func's result. InitializationError
    when ranks are missing from the new world.
    """
    return looped(func, reset, failure_if(mx.base.MXNetError))


class ElasticSampler(sampler.ElasticSampler, mx.gluon.data.Sampler):  # type: ignore[misc]
    __doc__ = sampler.ElasticSampler.__doc__


class NetworkHandler(StateHandler):
    """Keeps the parameters of a gluon block, or of its collect_params().

    They must have their values; ValueError.
    """

    def __init__(self, network: Any) -> None:
        super().__init__(network)
        for key, parameter in self._parameters().items():
            if parameter._data is None:
                raise ValueError(
                    f"[elastic] {key} has no values yet: initialize() the network and, where "
                    "layers have no in_units or in_channels, run a batch through it before it "
                    "becomes a state"
                )
        self.save()

    def save(self) -> None:
        """Copy all parameters; waits for them."""
        with mx.autograd.pause():
            copies = {
                key: parameter.list_data()[0].copy()
                for key, parameter in self._parameters().items()
            }
        for array in copies.values():
            array.wait_to_read()
        self._saved = copies  # only now: what has failed must leave the last copies as they are

    def restore(self) -> None:
        """Write the copies back, in place; gradients that add up begin with zero."""
        with mx.autograd.pause():
            parameters = self._parameters()
            for key, saved in self._saved.items():
                for array in parameters[key].list_data():
                    saved.copyto(array)
        self.clear_gradients()

    def clear_gradients(self) -> None:
        """Let gradients that add up begin with zero."""
        for parameter in self._parameters().values():
            if parameter.grad_req == "add":
                parameter.zero_grad()

    def sync(self) -> None:
        """Overwrite parameters with rank 0's."""
        broadcast_parameters(self._parameters(), root_rank=0)

    def _parameters(self) -> ParameterDict:
        is_block = isinstance(self.value, mx.gluon.Block)
        return self.value.collect_params() if is_block else self.value


class TrainerHandler(StateHandler):
    """Keeps a gluon trainer's optimizer with its moments and counts, residuals, and AMP's scale.

    ValueError for a trainer with a store that is distributed, or that updates the weights.
    """

    def __init__(self, trainer: mx.gluon.Trainer) -> None:
        super().__init__(trainer)
        self.save()

    def save(self) -> None:
        """Copy the states, and this rank's residuals."""
        held, states = _residuals_of(self._source()), self._states()
        self._held, self._saved = held, states

    def restore(self) -> None:
        """Give the trainer the copies."""
        if isinstance(source := self._source(), Source):
            source.go_on_with(self._held)
        self._load(self._saved)

    def sync(self) -> None:
        """Take over rank 0's states; every rank keeps its own residuals."""
        self._load(broadcast_object(self._states() if rank() == 0 else b"", name="trainer"))

    def _source(self) -> Any:
        """Return what has residuals, if anything: the trainer, or its optimizer."""
        return self.value if isinstance(self.value, Source) else self.value._optimizer

    def _states(self) -> bytes:
        """Return what gluon's save_states writes to a file, and what amp.init_trainer adds."""
        trainer = self.value
        if not trainer._kv_initialized:
            trainer._init_kvstore()
        if trainer._distributed or trainer._update_on_kvstore:
            raise ValueError(
                "[elastic] a trainer with a store cannot be a state, since what the store keeps "
                "would be lost: use hvd.DistributedTrainer"
            )
        scaler = getattr(trainer, "_amp_loss_scaler", None)
        scale = None if scaler is None else (trainer._scale, vars(scaler))
        return pickle.dumps((trainer._updaters[0].states, _innermost(trainer._optimizer), scale))

    def _load(self, content: bytes) -> None:
        """Do what gluon's load_states does, but keep the objects to which scripts refer."""
        trainer = self.value
        if not trainer._kv_initialized:
            trainer._init_kvstore()
        states, read, scale = pickle.loads(content)
        for updater in trainer._updaters:
            _give_states(updater, states, trainer._optimizer)
        _give_values(_innermost(trainer._optimizer), read)
        scaler = getattr(trainer, "_amp_loss_scaler", None)
        if scaler is not None and scale is not None:
            trainer._scale, values = scale
            vars(scaler).update(values)


class ModuleHandler(StateHandler):
    """Keeps a Module's parameters, its optimizer with moments and counts, and residuals.

    ValueError for a module that is not ready to train, and for one with a store.
    """

    def __init__(self, module: mx.mod.Module) -> None:
        super().__init__(module)
        if not (module.params_initialized and module.optimizer_initialized):
            raise ValueError(
                "[elastic] the module is not ready to train: call bind(), init_params() and "
                "init_optimizer(kvstore=None, optimizer=hvd.DistributedOptimizer(...)) before it "
                "becomes a state"
            )
        if module._kvstore is not None:
            raise ValueError(
                "[elastic] a module with a store cannot be a state, since what the store keeps "
                "would be lost: pass init_optimizer kvstore=None and an hvd.DistributedOptimizer"
            )
        if len(module._context) > 1:
            raise ValueError(
                f"[elastic] the module has {len(module._context)} devices, expected one: start a "
                "rank for each of them"
            )
        self.save()

    def save(self) -> None:
        """Copy parameters, states, and this rank's residuals; waits for them."""
        held = _residuals_of(self.value._optimizer)
        copies = [
            {name: array.copy() for name, array in part.items()} for part in self.value.get_params()
        ]
        states = self._states()
        for part in copies:
            for array in part.values():
                array.wait_to_read()
        # Only now: what has failed must leave the last copies as they are.
        self._held, self._saved, self._saved_states = held, copies, states

    def restore(self) -> None:
        """Write the copies back; gradients that add up begin with zero."""
        module = self.value
        if isinstance(module._optimizer, Source):
            module._optimizer.go_on_with(self._held)
        module.set_params(*self._saved)
        self.clear_gradients()
        self._load(self._saved_states)

    def clear_gradients(self) -> None:
        """Let gradients that add up begin with zero."""
        for arrays in self.value._exec_group.grad_arrays:
            for array in arrays:
                if array is not None:
                    array[:] = 0

    def sync(self) -> None:
        """Take over rank 0's parameters and states; every rank keeps its own residuals."""
        parameters, others = self.value.get_params()
        broadcast_parameters({**parameters, **others}, root_rank=0)
        self.value.set_params(parameters, others)
        self._load(broadcast_object(self._states() if rank() == 0 else b"", name="module"))

    def _states(self) -> bytes:
        return pickle.dumps((self.value._updater.states, _innermost(self.value._optimizer)))

    def _load(self, content: bytes) -> None:
        states, read = pickle.loads(content)
        _give_states(self.value._updater, states, self.value._optimizer)
        _give_values(_innermost(self.value._optimizer), read)


def _residuals_of(source: Any) -> Mapping[str, Held]:
    return source.residuals() if isinstance(source, Source) else {}


def _innermost(optimizer: mx.optimizer.Optimizer) -> mx.optimizer.Optimizer:
    return optimizer._optimizer if isinstance(optimizer, DistributedOptimizer) else optimizer


def _give_states(updater: Any, states: dict[Any, Any], optimizer: mx.optimizer.Optimizer) -> None:
    updater.set_states(pickle.dumps(states))
    updater.optimizer = optimizer
    if isinstance(optimizer, DistributedOptimizer):
        optimizer.use_states(updater.states)


def _give_values(optimizer: mx.optimizer.Optimizer, read: mx.optimizer.Optimizer) -> None:
    """Give an optimizer all values of another one, but keep the objects to which scripts refer."""
    parameters, schedule = optimizer.param_dict, optimizer.lr_scheduler
    vars(optimizer).update(vars(read))
    optimizer.param_dict = parameters
    if schedule is not None and type(schedule) is type(read.lr_scheduler):
        vars(schedule).update(vars(read.lr_scheduler))
        optimizer.lr_scheduler = schedule


class _SamplerHandler(StateDictHandler):
    def sync(self) -> None:
        """Copy rank 0's progress, and share the remaining samples among the present ranks."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), name="sampler"))


_registry: Registry = [
    (mx.gluon.Block, NetworkHandler),
    (ParameterDict, NetworkHandler),
    (mx.gluon.Trainer, TrainerHandler),
    (mx.mod.Module, ModuleHandler),
    (ElasticSampler, _SamplerHandler),
]


def get_handler_registry() -> Registry:
    """The (type, handler class) pairs from which MXNetState takes the first that fits.

    Appending to the list adds a kind of value.
    """
    return _registry


class MXNetState(HandledState):
    """The state of elastic training with MXNet, as attributes.

        state = MXNetState(net, trainer, sampler=sampler, epoch=0, batch=0)

    net: a gluon block with initialised parameters, or its collect_params(); or a Module, which has
        its optimizer in itself. trainer: a DistributedTrainer. More of them, and ElasticSamplers,
        go into kwargs under any name.
    Networks, trainers, modules and samplers are saved as copies and restored in place; other values
    as in perseus.elastic.ObjectState. ValueError for parameters without values, trainers and
    modules with stores, and a net or trainer of another kind.
    """

    def __init__(self, net: Any = None, trainer: Any = None, **kwargs: Any) -> None:
        values = {**kwargs, "net": net, "trainer": trainer}
        super().__init__(broadcast_object, rank, _registry, values)
        for name, value in (("net", net), ("trainer", trainer)):
            if value is not None and name not in self._handlers:
                raise ValueError(
                    f"[elastic] MXNetState cannot keep a {type(value).__name__} as its {name}: "
                    "give it gluon's or a Module, or add a handler to "
                    "hvd.elastic.get_handler_registry()"
                )

    def check_host_updates(self) -> None:
        """See State. Steps that are under way end before the world does."""
        try:
            super().check_host_updates()
        except HostsUpdatedInterrupt:
            mx.nd.waitall()
            raise

    def reset(self) -> None:
        """Clear gradients that add up, which new ranks do not have; share samples again."""
        for handler in self._handlers.values():
            if isinstance(handler, (NetworkHandler, ModuleHandler)):
                handler.clear_gradients()
        super().reset()

    def restore(self) -> None:
        """Wait for MXNet's engine, and bring everything back to the last save, in place."""
        _clear_errors()
        super().restore()


def _clear_errors() -> None:
    """Wait until the engine is idle, and have it forget errors.

    It keeps an operation's error with the arrays that this would have written, and skips whatever
    touches them, until someone waits for them.
    """
    while True:
        try:
            mx.nd.waitall()
        except mx.base.MXNetError:
            continue
        return

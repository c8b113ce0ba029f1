"""Equal state on every rank: parameters and arbitrary objects.

Source of behaviour: Horovod 0.28.1, horovod.mxnet and horovod.mxnet.functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

from mxnet.gluon.parameter import Parameter, ParameterDict

from perseus import basics, control
from perseus.arguments import checked_root
from perseus.gradients.rotation import finish_corrections
from perseus.mxnet.mpi_ops import broadcast_


def broadcast_parameters(params: Any, root_rank: int = 0, prefix: str | None = None) -> None:
    """Overwrite parameters with the root's, and wait for it.

    params: `net.collect_params()`, or a dict of gluon parameters or arrays, such as a Module's
        arg_params; equal keys, shapes and dtypes on all ranks. Gluon parameters that get their
        shape from the first forward pass are overwritten as soon as that has initialised them.
    root_rank: a global rank. prefix: put before the keys, by which ranks match parameters; two
        sets with common keys need different ones.

    ValueError for other params; RuntimeError for a parameter without initialize();
    MXNetError if ranks disagree or the world has broken.
    """
    if not isinstance(params, (Mapping, ParameterDict)):
        raise ValueError(
            f"invalid params of type: {type(params)}: expected a dict, such as net.collect_params()"
        )
    checked_root(root_rank, "mxnet")
    if basics.size() == 1:
        return
    finish_corrections()
    sent = []
    for key, parameter in sorted(params.items()):
        name = f"{prefix or ''}{key}"
        if not isinstance(parameter, Parameter):
            sent.append(broadcast_(parameter, root_rank, name=name))
        elif parameter._deferred_init:
            parameter._init_impl = MethodType(_broadcasting(root_rank, name), parameter)
        else:
            sent += _broadcast(parameter, root_rank, name)
    for array in sent:
        array.wait_to_read()


def _broadcast(parameter: Parameter, root_rank: int, name: str) -> list[Any]:
    """Start broadcasting the parameter's arrays, one for each of its contexts."""
    first, *others = arrays = list(parameter.list_data())
    broadcast_(first, root_rank, name=name)
    for other in others:
        first.copyto(other)
    return arrays


def _broadcasting(root_rank: int, name: str) -> Callable[[Any, Any, Any], None]:
    """Replaces a parameter's _init_impl once; copies of the parameter keep it."""

    def initialize(self: Any, data: Any, ctx_list: Any) -> None:
        del self._init_impl  # the class has its own
        self._init_impl(data, ctx_list)
        _broadcast(self, root_rank, name)

    return initialize


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """The root's object: itself on the root, an unpickled copy elsewhere.

    obj: anything cloudpickle can write; ignored on the others. root_rank: a global rank. name:
        without one, ranks must pass objects of the same type, whose name is used.
    HorovodInternalError where the world has broken; ValueError before init().
    """
    return control.broadcast_object(obj, root_rank, name, 0)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Every rank's object, in rank order, on every rank. See broadcast_object."""
    return control.allgather_object(obj, name, 0)

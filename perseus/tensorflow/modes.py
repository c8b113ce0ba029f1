"""Eager or graph, and the variables of TensorFlow and Keras alike. Stateless, thread-safe.

Scripts know it as `hvd.util`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import tensorflow as tf


def _executing_eagerly() -> bool:
    """Whether operations run as they are called; Horovod's own tests ask."""
    return bool(tf.executing_eagerly())


def vars_to_refs(vars: Any) -> Any:
    """Keys for dictionaries: a variable's reference, or a tuple of references for a list."""
    if isinstance(vars, list):
        return tuple(vars_to_refs(variable) for variable in vars)
    return tf_variable(vars).ref()


def refs_to_vars(refs: Any) -> Any:
    """The variables of such keys; a list for a tuple of references."""
    if isinstance(refs, tuple):
        return [refs_to_vars(reference) for reference in refs]
    return refs.deref()


def tf_variable(variable: Any) -> Any:
    """The TensorFlow variable of a Keras 3 variable; anything else is returned as it is."""
    inner = getattr(variable, "_value", None)
    return inner if isinstance(inner, tf.Variable) else variable


def converted(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the script, which AutoGraph rewrites where it rewrites what has called us.

    This package is left as it is (library.py), and so would be what it calls.
    """
    autograph = tf.__internal__.autograph
    context = autograph.control_status_ctx()
    if tf.executing_eagerly() or context.status.name != "ENABLED":
        return function
    made: Callable[..., Any] = autograph.tf_convert(function, context)
    return made


def name_of(source: Any) -> str:
    """The name of a variable or tensor for messages; "" if it has none."""
    if isinstance(source, tf.Variable) or hasattr(source, "path"):
        name = getattr(source, "path", None) or source.name
    else:
        name = "" if _executing_eagerly() else getattr(source, "name", "")
    return str(name).partition(":")[0]


def on_device(device: str) -> AbstractContextManager[Any]:
    """tf.device(device); "" leaves the placement to TensorFlow."""
    context: AbstractContextManager[Any] = tf.device(device) if device else nullcontext()
    return context


def when(condition: Any, action: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """Run one of two functions for its effects; a scalar bool tensor chooses.

    Returns None in eager mode, else the operation that has done it.
    """
    if tf.executing_eagerly():
        return (action if bool(condition) else otherwise)()

    def done(function: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            result = function()
            with tf.control_dependencies([] if result is None else [result]):
                return tf.constant(True)

        return run

    with _branches_in_this_graph():
        return tf.group(tf.cond(condition, done(action), done(otherwise)))


@contextmanager
def _branches_in_this_graph() -> Iterator[None]:
    """Build conditionals of a session's graph in the old form, which are not functions.

    Functions cannot use reference variables.
    """
    v1 = tf.compat.v1
    if v1.get_default_graph().building_function or not v1.control_flow_v2_enabled():
        yield
        return
    v1.disable_control_flow_v2()
    try:
        yield
    finally:
        v1.enable_control_flow_v2()


def belongs_here(tensor: Any) -> bool:
    """Whether code that runs now can use a tensor: an eager one, or one of an enclosing graph."""
    if tf.executing_eagerly():
        return hasattr(tensor, "numpy")
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        if getattr(tensor, "graph", None) is graph:
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


def belongs_to_program(variable: Any) -> bool:
    """Whether code that runs now can use a variable: an eager one, or one of this graph."""
    with tf.init_scope():
        if tf.executing_eagerly():
            return not hasattr(variable, "graph")
        return getattr(variable, "graph", None) is tf.compat.v1.get_default_graph()

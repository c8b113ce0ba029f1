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
    """What dictionaries can be keyed by: a variable's reference, a tuple of them for a list."""
    if isinstance(vars, list):
        return tuple(vars_to_refs(variable) for variable in vars)
    return tf_variable(vars).ref()


def refs_to_vars(refs: Any) -> Any:
    """The variables again: a list for a tuple of references."""
    if isinstance(refs, tuple):
        return [refs_to_vars(reference) for reference in refs]
    return refs.deref()


def tf_variable(variable: Any) -> Any:
    """TensorFlow's variable under Keras 3's; anything else as it is."""
    inner = getattr(variable, "_value", None)
    return inner if isinstance(inner, tf.Variable) else variable


def name_of(source: Any) -> str:
    """How a variable or tensor is called, for messages; empty where it has no name."""
    if isinstance(source, tf.Variable) or hasattr(source, "path"):
        name = getattr(source, "path", None) or source.name
    else:
        name = "" if _executing_eagerly() else getattr(source, "name", "")
    return str(name).partition(":")[0]


def on_device(device: str) -> AbstractContextManager[Any]:
    """tf.device(device); "" leaves the placement alone."""
    context: AbstractContextManager[Any] = tf.device(device) if device else nullcontext()
    return context


def when(condition: Any, action: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """Run one of two functions as a scalar bool tensor says, for what they do.

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
    """Conditionals of a session's graph as it had them before they became functions.

    Those cannot use reference variables.
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
    """Whether code that runs now can use a tensor: an eager one, or one of a graph around here."""
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

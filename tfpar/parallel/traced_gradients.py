"""Lets graphs end whose operations have gradients of their own.

`tf.custom_gradient`, and with it `tf.recompute_grad` and some of Keras' activations, registers a function under a new
name for each call that is traced. TensorFlow 2.21 never removes it, and the function holds tensors of the graph, the
graph holds the variables: a process that trains one model after the other would keep all of them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

# Private: there is no function that lists or removes what `tf.RegisterGradient` has registered.
from tensorflow.python.framework import ops

_PREFIX = "CustomGradient-"
_KEPT = "_tfpar_kept_gradients"


class _OfGraph:
    """A gradient function that lives as long as its graph.

    Args:
      function: `(op, *upstream) -> gradients`; the graph must hold it.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = weakref.ref(function)

    def __call__(self, op: tf.Operation, *upstream: tf.Tensor) -> Any:
        """Calls the function; its graph is there, since it has `op`."""
        function = self.function()
        assert function is not None
        return function(op, *upstream)


@contextlib.contextmanager
def graphs_released() -> Iterator[None]:
    """Context at whose end graphs hold the gradients of their operations, in place of TensorFlow's registry.

    Gradients can still be computed in these graphs, and graphs that nothing else refers to can be collected.
    """
    try:
        yield
    finally:
        _release()


def _release() -> None:
    registered = ops.gradient_registry._registry
    # Another thread may trace, or end its own graphs, at the same time.
    for name, entry in registered.copy().items():
        if not name.startswith(_PREFIX):
            continue
        function = entry["type"]
        if not isinstance(function, _OfGraph):
            graph = _graph_of(function)
            if graph is not None:
                if not hasattr(graph, _KEPT):
                    setattr(graph, _KEPT, [])
                getattr(graph, _KEPT).append(function)
                entry["type"] = _OfGraph(function)
        elif function.function() is None:
            registered.pop(name, None)


def _graph_of(function: Any) -> tf.Graph | None:
    """The graph whose tensors a function of `tf.custom_gradient` refers to; None if it cannot be found."""
    for value in _variables_of(function):
        if callable(value):  # the function that a tape calls, which has the results of the call
            found = tf.nest.flatten(list(_variables_of(value)))
            graphs = (getattr(each, "graph", None) for each in found if tf.is_symbolic_tensor(each))
            return next((graph for graph in graphs if graph is not None), None)
    return None


def _variables_of(function: Any) -> list[Any]:
    """What a function refers to outside of itself."""
    return [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]

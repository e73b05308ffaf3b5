"""Everything private of Keras that concerns how a call runs: its scopes, the graph of a functional model, and what
layers prepare for it.

`INTERNALS` is as in `keras_internals.py`.
"""

from __future__ import annotations

import contextlib
import functools
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from tfpar.optim.keras_deferred import SEEDS, is_deferred
from tfpar.optim.keras_internals import Internal, all_layers

import keras
import numpy as np
from keras.src.backend.common import global_state  # not the object in it: `clear_session` makes a new one
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.models.functional import Functional

_GLOBAL_STATE = "keras.src.backend.common.global_state"

INTERNALS = (
    Internal("GLOBAL_STATE_TRACKER", _GLOBAL_STATE, "recompute", "scopes of this thread, `training` and autocast too"),
    Internal(
        "get_stateless_scope", "keras.src.backend.common.stateless_scope", "recompute", "the innermost `StatelessScope`"
    ),
    Internal("_functional", "Sequential", "recompute", "the graph that a Sequential model runs"),
    Internal("_nodes_by_depth", "Functional", "recompute", "calls of layers, the highest depth first"),
    Internal("_run_through_graph", "Functional", "recompute", "runs these calls, through `operation_fn`"),
    Internal("_call_context_args", "Layer", "pipeline", "options of a call that the layers inside get, as `training`"),
    Internal("_standardize_inputs", "Functional", "pipeline", "inputs of a call, flat and in the shapes of the graph"),
    Internal("_loss_ids", "Layer", "recompute, losses", "which losses of a `StatelessScope` `layer.losses` returns"),
    Internal("__call__", "Layer", "recompute", "looks `call` up on the object, after checks and conversions"),
)

_REPLACED = "tfpar_replaced_methods"


def innermost_scope() -> keras.StatelessScope | None:
    """The innermost open `keras.StatelessScope` of this thread."""
    return get_stateless_scope()


def add_loss(layer: keras.layers.Layer, scope: keras.StatelessScope, loss: Any) -> None:
    """`layer.add_loss` in a scope; functional models, which have none, take it too."""
    layer._loss_ids.add(id(loss))
    scope.add_loss(loss)


def has_added(layer: keras.layers.Layer, loss: Any) -> bool:
    """Whether a layer added a loss in a scope."""
    return id(loss) in layer._loss_ids


def thread_state() -> dict[str, Any]:
    """Keras' state in this thread: open scopes, `training` of the current call, autocast."""
    return dict(vars(global_state.GLOBAL_STATE_TRACKER))


@contextlib.contextmanager
def in_thread_state(state: dict[str, Any]) -> Iterator[None]:
    """Restores an earlier state of this thread within the context."""
    known = vars(global_state.GLOBAL_STATE_TRACKER)
    before = dict(known)
    known.clear()
    known.update(state)
    try:
        yield
    finally:
        known.clear()
        known.update(before)


@contextlib.contextmanager
def with_attribute(name: str, value: Any) -> Iterator[None]:
    """In this context `thread_state` also has this value, which `attribute` returns."""
    known = vars(global_state.GLOBAL_STATE_TRACKER)
    before = known.get(name)
    known[name] = value
    try:
        yield
    finally:
        known[name] = before


def attribute(name: str) -> Any:
    """A value of `with_attribute`; None outside of such a context."""
    return vars(global_state.GLOBAL_STATE_TRACKER).get(name)


def unseeded_generator() -> Any:
    """The generator from which Keras' random operations without a seed draw in this thread; None before any did."""
    return attribute(SEEDS)


def drawing_from(generator: Any) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which Keras' random operations without a seed draw from another generator, in this thread.

    Args:
      generator: Has the method `next` of a `keras.random.SeedGenerator`.
    """
    return with_attribute(SEEDS, generator)


def graph_of(model: keras.Model) -> Any:
    """The functional model that runs a model's graph: itself, or inside a Sequential one. None where there is none."""
    graph = model._functional if isinstance(model, keras.Sequential) else model
    return graph if isinstance(graph, Functional) and type(graph).call is Functional.call else None


def graph_nodes(graph: Any) -> list[Any]:
    """The calls of layers in a functional model, in the order in which they run; without its inputs."""
    depths = sorted(graph._nodes_by_depth.items(), reverse=True)
    return [node for _, nodes in depths for node in nodes if node.operation and not node.is_input]


def calls_within(graph: Any) -> list[Any]:
    """The calls of layers in a functional model and in the models that it calls, once for each call of those."""
    nodes = graph_nodes(graph)
    inner = [called for node in nodes if (called := graph_of(node.operation)) is not None]
    return [*nodes, *(node for called in inner for node in calls_within(called))]


def standard_inputs(graph: Any, given: Any) -> list[Any]:
    """The arguments of a functional model as a list, in the order of its inputs."""
    return list(graph._standardize_inputs(given))


def replace_call(layer: keras.layers.Layer, call: Callable[..., Any]) -> None:
    """Makes a layer run `call(layer, plain, *args, **kwargs)`, with `plain` its own `call`, until `restore_calls`."""
    _replace(layer, "call", call)


def is_called_otherwise(layer: keras.layers.Layer) -> bool:
    """Whether `replace_call` is in force."""
    return "call" in vars(layer).get(_REPLACED, ())


def replace_graph_run(graph: Any, run: Callable[..., Any]) -> None:
    """Makes a functional model run its graph by `run(graph, plain, inputs, operation_fn=, call_fn=)`."""
    _replace(graph, "_run_through_graph", run)


def runs_graph_otherwise(graph: Any) -> bool:
    """Whether `replace_graph_run` is in force."""
    return "_run_through_graph" in vars(graph).get(_REPLACED, ())


def restore_calls(model: keras.Model, layers: list[keras.layers.Layer]) -> None:
    """Undoes `replace_call` and `replace_graph_run` on a model and its layers."""
    for layer in (*layers, graph_of(model)):
        for name in vars(layer).pop(_REPLACED, ()) if layer is not None else ():
            vars(layer).pop(name)


def options_of_call(operation_fn: Callable[[Any], Any]) -> tuple[tuple[str, int], ...]:
    """The options that a call of a functional model hands to its layers, such as `training`: names, with the `id` of
    the values, some of which have no hash. Ids are the same while `operation_fn` lives.

    Args:
      operation_fn: As a function of `replace_graph_run` gets it.
    """
    return tuple(sorted((name, id(value)) for name, value in operation_fn(_TakesOptions())().items()))


class _TakesOptions:
    """Stands in for a layer that takes any option; a call returns the options."""

    class _Every:
        def __contains__(self, name: object) -> bool:
            return True

    _call_context_args = _Every()

    def __call__(self, **options: Any) -> dict[str, Any]:
        return options


@contextlib.contextmanager
def watched_calls(
    model: keras.Model, around: Callable[[keras.layers.Layer], contextlib.AbstractContextManager[Any]]
) -> Iterator[None]:
    """In this context a model and its layers run their own calls, each within `around(layer)`, whatever replaces them
    otherwise."""
    layers, graph = all_layers(model), graph_of(model)
    owners = {id(owner): vars(owner) for owner in (*layers, graph) if owner is not None}
    before = {key: dict(attributes) for key, attributes in owners.items()}
    for attributes in owners.values():
        for name in attributes.get(_REPLACED, ()):
            attributes.pop(name, None)
    for layer in layers:
        vars(layer)["call"] = functools.wraps(layer.call)(functools.partial(_run_within, around, layer, layer.call))
    try:
        yield
    finally:
        for key, attributes in owners.items():
            for name in ("call", *before[key].get(_REPLACED, ())):
                attributes.pop(name, None)
                if name in before[key]:
                    attributes[name] = before[key][name]


def _run_within(around: Callable[..., Any], layer: Any, plain: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with around(layer):
        return plain(*args, **kwargs)


def _replace(layer: Any, name: str, function: Callable[..., Any]) -> None:
    plain = getattr(layer, name)
    # Past Keras' `__setattr__`, which looks for things to track and to save.
    vars(layer)[name] = functools.wraps(plain)(functools.partial(function, layer, plain))
    vars(layer)[_REPLACED] = [*vars(layer).get(_REPLACED, ()), name]


@contextlib.contextmanager
def shapes_of_variables(shapes: Iterable[tuple[keras.Variable, Sequence[int]]]) -> Iterator[None]:
    """In this context variables say that they have these shapes, whatever their values have."""
    before = []
    for variable, shape in shapes:
        before.append((variable, variable._shape, variable._ndim))
        variable._shape, variable._ndim = tuple(shape), len(shape)
    try:
        yield
    finally:
        for variable, shape, rank in before:
            variable._shape, variable._ndim = shape, rank


def finalize_states(model: keras.Model) -> None:
    """Renews what layers derive from their variables and compute with; call it when values have been assigned.

    `Normalization` (3.15) computes with tensors that `finalize_state` makes from its variables. A layer without
    variables has nothing that was assigned, and one whose variables have no elements here is not run here.
    """
    for layer in all_layers(model):
        if (
            callable(getattr(layer, "finalize_state", None))
            and layer.weights
            and all(map(_has_elements, layer.weights))
        ):
            layer.finalize_state()


def _has_elements(variable: keras.Variable) -> bool:
    return not is_deferred(variable) and 0 not in variable.shape


def copy_vocabulary(layer: keras.layers.Layer, other: keras.layers.Layer) -> None:
    """Gives a copy of a layer the vocabulary that the layer has learned, which is not in its configuration.

    Raises:
      ValueError: The copy has another vocabulary, such as if a token contains a line break, which Keras' files lose.
    """
    if not callable(getattr(layer, "get_vocabulary", None)) or _vocabulary(layer) == _vocabulary(other):
        return
    store: dict[str, np.ndarray] = {}  # the weights of `tf_idf`, which are no variables of Keras
    layer.save_own_variables(store)
    with tempfile.TemporaryDirectory() as folder:
        layer.save_assets(folder)
        other.load_own_variables(store)
        other.load_assets(folder)
    if _vocabulary(layer) != _vocabulary(other):
        raise ValueError(f"the vocabulary of {layer.name} cannot be copied")


def _vocabulary(layer: Any) -> list[Any]:
    return [*layer.get_vocabulary()]


def without_surroundings(error: Exception) -> str:
    """The text of an error in the call of a layer, without the head line that Keras puts before it, and its colours."""
    return re.sub(r"\x1b\[\d+m|Exception encountered when calling .*", "", str(error)).strip()


def remove_mask(tensor: Any) -> None:
    """Removes the mask of a tensor, as Keras' attention removes those of its arguments."""
    tensor._keras_mask = None

"""Layers that must stay whole because of how the model uses them, which its structure and one trace of it show.

Devices cannot communicate in a loop or a branch (TensorFlow 2.21: they wait for each other forever), or in
`tf.vectorized_map`, which converts no collective. And only the calls of a divided layer compute with a part of its
weights as with the whole: another layer that reads them needs all.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import re
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tfpar.config import ConfigError
from tfpar.optim import keras_calls, keras_internals
from tfpar.parallel.held import held_by
from tfpar.parallel.model_axis import at_no_place, current_place, graph_of_program
from tfpar.parallel.split import model_split_of

import keras
import tensorflow as tf

_log = logging.getLogger(__name__)
_READABLE = "tfpar_weights_of_divided_calls"
# TensorFlow 2.21 traces the body of `vectorized_map` in the graph around it, in this name scope, and then converts it.
_VECTORIZED = re.compile(r"(^|/)loop_body(_\d+)?(/|$)")
_LOOPED = "calls in a loop or a branch, in which devices cannot communicate"
# By model, with its variables at that time: the layout of a model is looked for several times.
_known: weakref.WeakKeyDictionary[keras.Model, tuple[list[int], dict[int, str]]] = weakref.WeakKeyDictionary()


def obstacles_of(model: keras.Model) -> Mapping[int, str]:
    """Returns why layers cannot be divided, by `id` of the layer, such as "a weight that 'head' reads".

    It is empty for a model without symbolic inputs, or whose call cannot be traced with them: `check_call` and
    `check_read` refuse such layers when the program of a device is traced.

    Args:
      model: A built Keras model. Its call is traced once, without its values.
    """
    variables = [*map(id, model.variables)]
    if model not in _known or _known[model][0] != variables:
        _known[model] = variables, _traced(model)
    return _known[model][1]


def places_of(model: keras.Model) -> collections.Counter[int]:
    """Returns in how many places each layer is called, by `id`: calls in graphs, and layers that have it inside."""
    layers = keras_internals.all_layers(model)
    graphs = [graph for layer in layers if (graph := keras_calls.graph_of(layer)) is not None]
    calls = {id(node): node for graph in graphs for node in keras_calls.graph_nodes(graph)}  # graphs may share calls
    places = collections.Counter(id(node.operation) for node in calls.values())
    for layer in layers:
        if keras_calls.graph_of(layer) is None:
            inner = keras_internals.all_layers(layer, include_self=False, recursive=False)
            places.update({*map(id, inner)})
    return places


def obstacles_in(layers: Sequence[keras.layers.Layer], places: Mapping[int, int]) -> dict[int, str]:
    """Returns why some of these layers cannot be divided whatever they are called with, by `id`.

    A dropout in one place draws for divided values, other numbers on each device; in another place the same dropout may
    have to draw the same on all. And other weights of a table would get gradients of one device's tokens alone.

    Args:
      layers: Layers of a model.
      places: See `places_of`.
    """
    obstacles = {}
    for layer in layers:
        if isinstance(layer, keras.layers.Dropout) and places[id(layer)] > 1:
            obstacles[id(layer)] = f"dropout {layer.name!r}, which is called in several places"
        if isinstance(layer, keras.layers.Embedding) and (others := _beside_table(layer)):
            obstacles[id(layer)] = f"weights beside its table ({', '.join(others)})"
    return obstacles


def _beside_table(layer: keras.layers.Embedding) -> list[str]:
    """Returns the names of the weights of an Embedding layer, and of layers in it, that are not those of Keras."""
    own = re.compile(r"(lora_|reverse_)?embeddings(_\w+)?")
    weights = [weight for weight in layer.weights if not keras_internals.is_seed_state(weight)]
    return [weight.name for weight in weights if not own.fullmatch(weight.name)]


def check_call(layer: keras.layers.Layer) -> None:
    """Refuses a call of a divided layer in a loop or branch of the program of a device.

    Raises:
      ConfigError: With what to do.
    """
    if _is_in_loop():
        path = layer.path or layer.name
        raise ConfigError(
            f"--mesh: {type(layer).__name__} {path!r} has {_LOOPED}, but is divided over them. Keep it whole, with "
            f"layout={{{path!r}: 'whole'}}, or call it outside of loops and branches."
        )


def reading_parts(variables: Iterable[keras.Variable]) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which a device may read its parts of these weights, in addition to others."""
    readable = keras_calls.attribute(_READABLE) or frozenset()
    return keras_calls.with_attribute(_READABLE, readable | {*map(id, variables)})


def check_read(variable: keras.Variable) -> None:
    """Refuses a read of a divided weight in the program of a device outside the calls that compute with its part, and
    of a weight that only other workers of a pipeline have.

    Raises:
      ConfigError: With what to do.
    """
    held = held_by(variable)
    is_elsewhere = held is not None and not held.here and tuple(variable.shape) == held.absent_shape
    is_part = current_place() is not None and model_split_of(variable) is not None
    if not (is_elsewhere or is_part) or id(variable) in (keras_calls.attribute(_READABLE) or ()):
        return
    if is_elsewhere:
        raise ConfigError(
            f"--mesh: the model or its loss reads the weight {variable.path!r} outside of the layer that has it, on a "
            "worker of the pipeline that does not have it. Use a pipeline within a worker, or --mesh=data:... alone."
        )
    path = variable.path.rpartition("/")[0]
    raise ConfigError(
        f"--mesh: the model or its loss reads the weight {variable.path!r} outside of the layer that has it, where "
        "each device would read another part of it. Keep that layer whole, with "
        f"layout={{{path!r}: 'whole'}}."
    )


def _is_in_loop() -> bool:
    """Whether what this thread traces runs in a loop or branch (`tf.while_loop`, `tf.cond`, `tf.vectorized_map`) within
    the program of a device, or at all outside of such a program."""
    graph, program = tf.compat.v1.get_default_graph(), graph_of_program()
    while graph is not None:
        if _VECTORIZED.search(graph.get_name_scope()):
            return True
        if graph is program:
            return False
        if getattr(graph, "is_control_flow_graph", False):
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


def _traced(model: keras.Model) -> dict[int, str]:
    if not getattr(model, "inputs", None):
        return {}
    uses = _Uses(model)
    structure = (keras_calls.graph_of(model) or model).input  # a Sequential itself has none before it is called
    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in model.inputs]

    def call(*tensors: tf.Tensor) -> None:
        inputs = keras.tree.pack_sequence_as(structure, tensors)
        options = {"training": True} if keras_internals.takes_training(model) else {}
        with _NoValues(uses), keras_calls.watched_calls(model, uses.called):
            model(inputs, **options)

    try:
        with at_no_place(), tf.device("CPU:0"):
            tf.function(call, autograph=False).get_concrete_function(*specs)
    except Exception as error:  # of a layer of the user's, such as one that needs the sizes of a batch
        _log.debug("model axis: model %s cannot be traced without data: %s", model.name, error)
    return uses.obstacles


class _Uses:
    """The calls of layers and the reads of weights in one trace of a model.

    Attributes:
      obstacles: See `obstacles_of`.
    """

    def __init__(self, model: keras.Model) -> None:
        self.obstacles: dict[int, str] = {}
        self._calls: list[keras.layers.Layer] = [model]
        self._owners: dict[int, list[keras.layers.Layer]] = {}
        for layer in keras_internals.all_layers(model):
            for variable in keras_internals.weights_made_to_learn(layer):
                self._owners.setdefault(id(variable), []).append(layer)

    @contextlib.contextmanager
    def called(self, layer: keras.layers.Layer) -> Iterator[None]:
        """Returns the context of a layer's call."""
        if _is_in_loop():
            self.obstacles[id(layer)] = _LOOPED
        self._calls.append(layer)
        try:
            yield
        finally:
            self._calls.pop()

    def read(self, variable: keras.Variable) -> None:
        """Notes a read of a variable by the innermost call."""
        reader = self._calls[-1]
        for owner in self._owners.get(id(variable), ()):
            if owner is not reader:
                self.obstacles.setdefault(id(owner), f"a weight that {reader.path or reader.name!r} reads")


class _NoValues(keras.StatelessScope):
    """Variables are zeros of their shapes, in the graph of whoever reads them; what is assigned is dropped."""

    def __init__(self, uses: _Uses) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        self._uses = uses

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor:
        self._uses.read(variable)
        return tf.zeros(variable.shape, variable.dtype)

    def add_update(self, update: Any) -> None:
        del update

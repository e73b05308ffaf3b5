"""The layout of tensor parallelism: which layers of a model are divided over the model axis, and in which of `WAYS`.

`find_layout` applies the user's regular expressions on paths of layers, and then recognises: attention, divided by
heads; layers that declare their layout in `tensor_layout()`, as tfpar's blocks do; the feed-forward pairs of keras-hub
and of chains of Dense layers; keras-hub's experts; embeddings; other Dense layers, and convolutions, that are large.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence

from tfpar.config import ConfigError
from tfpar.optim import keras_calls, keras_internals
from tfpar.parallel.tensor.attention import obstacle_of, ways_of_attention
from tfpar.parallel.tensor.experts import experts_in, routers_in
from tfpar.parallel.tensor.feed_forward import ways_of_feed_forward
from tfpar.parallel.tensor.indivisible import Indivisible
from tfpar.parallel.tensor.obstacles import obstacles_in, obstacles_of, places_of
from tfpar.parallel.tensor.ways import (
    COLUMN,
    EXPERTS,
    GATHER,
    HEADS,
    OWN_NUMBERS,
    ROW,
    VOCABULARY,
    WAYS,
    WHOLE,
    Layouts,
    acts_on_each_output,
    can_gather,
    layout_of,
    weight_of,
)

import keras

# Below this many elements, or outputs of a Dense layer, gathering costs more than it saves: the gradient of the inputs
# is summed, however few outputs there are.
_LARGE = 1 << 12
_MANY_OUTPUTS = 64
_LARGE_CONVOLUTION = 1 << 16  # the same for convolutions, whose outputs are larger
_LOOPED = "calls in the loop of a recurrent layer, in which devices cannot communicate"
# Elementwise layers that may be between two Dense layers.
_ELEMENTWISE = (keras.layers.Activation, keras.layers.Dropout, keras.layers.ReLU, keras.layers.LeakyReLU)


def find_layout(model: keras.Model, size: int, rules: Mapping[str, str] | None = None) -> Layouts:
    """Returns the layout of a model, by `id` of the layer, without the layers that stay whole.

    Args:
      model: A built Keras model.
      size: Number of devices on the model axis.
      rules: Ways by regular expression, which is searched in the paths of layers; the first match wins. Rules take
        precedence over automatic choices.

    Raises:
      ConfigError: A rule is not a regular expression, names no way, matches no layer or only layers of earlier rules,
        or divides a layer that has no equal parts; or no layer can be divided.
    """
    finder = Finder(model, size)
    finder.take_rules(rules or {})
    finder.look(model)
    return some(finder.found, finder, model)


def some(layouts: Layouts, finder: Finder, model: keras.Model) -> Layouts:
    """Returns the layouts if there is at least one.

    Raises:
      ConfigError: There is no layout.
    """
    if not layouts:
        closest = finder.indivisible[:1]
        raise ConfigError(
            f"--mesh: model {model.name!r} has no layer that can be divided over {finder.size} devices: attention with "
            "a divisible number of heads, pairs of Dense layers in its graph, large Dense, EinsumDense or Embedding "
            "layers."
            + "".join(f" {each.path!r} has {each.reason}. {each.fitting}" for each in closest)
            + " Use --mesh=data:... alone, or name layers: layout={'REGEX': 'gather'}, or a pair of Dense layers: "
            "layout={'first': 'column', 'second': 'row'}."
        )
    return layouts


class Finder:
    """Finds the layouts of layers.

    Attributes:
      every: All layers of the model.
      layers: Those that may be divided: without those that recurrent layers call in a loop.
      size: Number of devices on the model axis.
      found: The layouts found so far.
      groups: Groups of `id`s of layers that can only be divided together.
      indivisible: Layers that would be divided, but for an obstacle, or because the axis does not divide their heads or
        units.
      obstacles: Why layers cannot be divided, by `id`; see `obstacles_of` and `obstacles_in`.
      places: See `places_of`.
    """

    def __init__(self, model: keras.Model, size: int) -> None:
        self.every = keras_internals.all_layers(model)
        looped = _in_loops(self.every)
        self.layers = [layer for layer in self.every if id(layer) not in looped]
        self.found: Layouts = {}
        self.groups: list[list[int]] = []
        self.indivisible: list[Indivisible] = []
        self.size = size
        self.places = places_of(model)
        self.obstacles = {
            **obstacles_in(self.layers, self.places),
            **obstacles_of(model),
            **dict.fromkeys(looped, _LOOPED),
        }
        self._asked: set[int] = set()
        self._by_heads: set[int] = set()
        self._routers: set[int] = set()

    def take_rules(self, rules: Mapping[str, str]) -> None:
        """Divides the layers that rules match; if several rules match a layer, the first one applies."""
        for pattern, way in rules.items():
            try:
                expression = re.compile(pattern)
            except re.error as error:
                raise ConfigError(f"layout: {pattern!r} is not a regular expression: {error}.") from None
            if way.partition(":")[0] not in WAYS:
                raise ConfigError(f"layout[{pattern!r}]={way!r} is not one of {', '.join(WAYS)}.")
            able = self._with_heads() if way == HEADS else [*filter(keras_internals.weights_made_to_learn, self.every)]
            matched = [layer for layer in able if expression.search(_path(layer))]
            if not matched:
                names = sorted(map(_path, able))
                shown = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "") if names else "none"
                kind = "attention layer" if way == HEADS else "layer with weights"
                raise ConfigError(f"layout: {pattern!r} matches no {kind}. The model has: {shown}.")
            take = self._take_heads if way == HEADS else self._take_layer
            if not [layer for layer in matched if take(layer, way, pattern)]:
                raise ConfigError(
                    f"layout[{pattern!r}]={way!r} has no effect: an earlier rule divides every layer that it matches, "
                    f"such as {_path(matched[0])!r}. Put it before that rule, or leave it out."
                )

    def _with_heads(self) -> list[keras.layers.Layer]:
        return [layer for layer in self.layers if _ways_of_heads(layer)]

    def _take_heads(self, layer: keras.layers.Layer, way: str, pattern: str) -> bool:
        """Divides an attention layer by heads, or raises; returns False if an earlier rule has divided it."""
        ways = _ways_of_heads(layer)
        if any(id(inner) in self._by_heads for inner in ways):
            return False
        if taken := [inner for inner in ways if id(inner) in self._asked]:
            raise ConfigError(
                f"layout[{pattern!r}]={way!r} divides {_path(layer)!r} as a whole, but an earlier rule divides "
                f"{_path(taken[0])!r}, which is part of it. Put this rule first, or leave one of them out."
            )
        self._check_obstacles(ways, way, pattern)
        if not self._take_all(layer, ways):
            found = self.indivisible[-1]
            raise ConfigError(
                f"layout[{pattern!r}]={way!r}: {type(layer).__name__} {found.path!r} has {found.reason}, which "
                f"{self.size} devices cannot divide into equal parts. {found.fitting} "
                "Use another --mesh, or leave the rule out: then only weights that can be divided otherwise are."
            )
        self._by_heads |= {id(inner) for inner in ways}
        self._asked |= self._by_heads
        return True

    def _take_layer(self, layer: keras.layers.Layer, way: str, pattern: str) -> bool:
        """Divides a layer in the way of a rule, or raises; returns False if an earlier rule has divided it."""
        if id(layer) in self._asked:
            return False
        self._asked.add(id(layer))
        if way != WHOLE:
            self._check_obstacles([layer], way, pattern)
        if way != WHOLE and not self._take(layer, way):
            raise ConfigError(self._cannot(layer, way, pattern))
        return True

    def _check_obstacles(self, layers: Iterable[keras.layers.Layer], way: str, pattern: str) -> None:
        for layer in layers:
            if id(layer) in self.obstacles:
                raise ConfigError(
                    f"layout[{pattern!r}]={way!r}: {type(layer).__name__} {_path(layer)!r} has "
                    f"{self.obstacles[id(layer)]}. Use 'whole', or a rule that does not match it."
                )

    def look(self, model: keras.Model) -> None:
        """Finds the layers that divide well, in addition to those in rules."""
        for layer in self.layers:
            self.look_at(layer)
        for chain in _dense_chains(model, self.places):
            self._check_asked(chain)
            self.pair_up(chain)
        self.take_large()

    def look_at(self, layer: keras.layers.Layer) -> None:
        """Divides this layer if its kind is known."""
        if ways := ways_of_attention(layer):
            self._take_all(layer, ways)
        elif own := getattr(layer, "tensor_layout", None):
            self._take_all(layer, own())
        elif isinstance(layer, keras.layers.Embedding):
            self._take_unasked(layer, VOCABULARY)
        if ways := ways_of_feed_forward(layer):
            self._take_all(layer, ways)
        for experts in experts_in(layer):
            self._take_all(experts, {experts: EXPERTS})
            self._routers |= {id(router) for router in routers_in(layer, experts)}

    def pair_up(self, chain: Sequence[keras.layers.Layer]) -> None:
        """Divides consecutive Dense layers alternately by columns and by rows; the last of an odd number stays whole.

        Args:
          chain: Dense layers, and dropout between them.
        """
        dense = [place for place, layer in enumerate(chain) if type(layer) is keras.layers.Dense]
        for first, second in zip(dense[::2], dense[1::2], strict=False):
            pair = chain[first], chain[second]
            if not {*map(id, pair)} & (self.found.keys() | self._asked | self.obstacles.keys()):
                between = dict.fromkeys(chain[first + 1 : second], OWN_NUMBERS)
                self._take_all(pair[0], {pair[0]: COLUMN, **between, pair[1]: ROW})

    def _check_asked(self, chain: Sequence[keras.layers.Layer]) -> None:
        """Refuses a rule that divides a Dense layer by columns if the next layer needs whole inputs."""
        dense = [layer for layer in chain if type(layer) is keras.layers.Dense]
        for layer, reader in itertools.pairwise(dense):
            asked, read = (self.found.get(id(each)) for each in (layer, reader))
            if id(layer) in self._asked and asked and asked[1].way == COLUMN and (read is None or read[1].way != ROW):
                raise ConfigError(
                    f"layout: {layer.path!r} is divided by columns, and {reader.path!r}, which reads it, not by rows. "
                    f"Divide both, such as {{{layer.path!r}: 'column', {reader.path!r}: 'row'}}, or gather the first."
                )

    def take_large(self) -> None:
        """Divides the remaining large Dense layers and convolutions, and gathers their outputs."""
        for layer in self.layers:
            if can_gather(layer) and id(layer) not in self._routers and _is_large(layer):
                self._take_unasked(layer, GATHER)

    def _take_all(self, owner: keras.layers.Layer, ways: Mapping[keras.layers.Layer, str]) -> bool:
        """Divides all of these layers, or none if one of them cannot be divided; returns whether it did.

        Args:
          owner: The layer that they belong to, or the first of them.
          ways: The way of each layer.
        """
        layouts = {id(layer): (layer, layout_of(layer, way, self.size)) for layer, way in ways.items()}
        if self._asked & layouts.keys():
            return False
        obstacle = next((self.obstacles[key] for key in layouts if key in self.obstacles), "")
        if not obstacle and ways.get(owner) == HEADS:
            obstacle = obstacle_of(owner)
        if obstacle or any(layout is None for _, layout in layouts.values()):
            self.indivisible.append(Indivisible.of(owner, ways, self.size, obstacle))
            return False
        self.found |= {key: (layer, layout) for key, (layer, layout) in layouts.items() if layout}
        self.groups.append([*layouts])
        return True

    def _take_unasked(self, layer: keras.layers.Layer, way: str) -> None:
        if id(layer) not in self._asked and id(layer) not in self.found:
            self._take(layer, way)

    def _take(self, layer: keras.layers.Layer, way: str) -> bool:
        layout = layout_of(layer, way, self.size)
        if layout is not None and (obstacle := self.obstacles.get(id(layer), "")):
            self.indivisible.append(Indivisible.of(layer, {layer: way}, self.size, obstacle))
            return False
        if layout is not None:
            self.found[id(layer)] = layer, layout
        return layout is not None

    def _cannot(self, layer: keras.layers.Layer, way: str, pattern: str) -> str:
        shapes = ", ".join(f"{each.name} {tuple(each.shape)}" for each in keras_internals.weights_made_to_learn(layer))
        found = Indivisible.of(layer, {layer: way}, self.size)
        reason = f": {found.reason}. {found.fitting}" if found.counts else "."
        return (
            f"layout[{pattern!r}]={way!r}: {type(layer).__name__} {_path(layer)!r} ({shapes}) cannot be "
            f"divided in this way over {self.size} devices{reason} Choose another of {', '.join(WAYS)}, or another "
            "--mesh."
        )


def find_indivisible(model: keras.Model, size: int, rules: Mapping[str, str] | None = None) -> list[Indivisible]:
    """Returns the layers that `find_layout` recognised but could not divide.

    Args:
      model: See `find_layout`.
      size: See `find_layout`.
      rules: See `find_layout`.
    """
    finder = Finder(model, size)
    finder.take_rules(rules or {})
    finder.look(model)
    return finder.indivisible


def _in_loops(layers: Sequence[keras.layers.Layer]) -> set[int]:
    """Returns the `id`s of the layers that recurrent layers call."""
    recurrent = [layer for layer in layers if isinstance(layer, keras.layers.RNN)]
    return {id(each) for layer in recurrent for each in keras_internals.all_layers(layer, include_self=False)}


def _path(layer: keras.layers.Layer) -> str:
    return layer.path or layer.name


def _ways_of_heads(layer: keras.layers.Layer) -> dict[keras.layers.Layer, str]:
    """Returns the ways of a layer divided by heads: attention, or a layer that declares its ways; empty for others."""
    if ways := ways_of_attention(layer):
        return ways
    own = layer.tensor_layout() if hasattr(layer, "tensor_layout") else {}
    return own if any("x" in way.partition(":")[2] for way in own.values()) else {}


def _dense_chains(model: keras.Model, places: Mapping[int, int]) -> list[list[keras.layers.Layer]]:
    """Returns chains of Dense layers in a model's graph, with the dropout between them.

    Each layer of a chain is the only reader of the previous one, and called nowhere else.

    Args:
      model: The model.
      places: See `places_of`.
    """
    graph = keras_calls.graph_of(model)
    nodes = [] if graph is None else keras_calls.graph_nodes(graph)
    readers: dict[int, list[int]] = {}
    for number, node in enumerate(nodes):
        for tensor in node.input_tensors:
            readers.setdefault(id(tensor), []).append(number)
    wanted = {id(tensor) for tensor in graph.outputs} if graph is not None else set()

    def following(number: int) -> list[int]:
        """Returns the path through elementwise layers to the Dense layer that alone reads this node's output, or []."""
        outputs = nodes[number].outputs
        if len(outputs) != 1 or id(outputs[0]) in wanted or len(found := readers.get(id(outputs[0]), [])) != 1:
            return []
        operation = nodes[found[0]].operation
        if isinstance(operation, _ELEMENTWISE) and _elementwise(operation, places):
            further = following(found[0])
            return [found[0], *further] if further else []
        return found if type(operation) is keras.layers.Dense and places[id(operation)] == 1 else []

    called = [node.operation for node in nodes]
    dense = [n for n, layer in enumerate(called) if type(layer) is keras.layers.Dense and places[id(layer)] == 1]
    after = {number: following(number) for number in dense}
    ends = {found[-1] for found in after.values() if found}
    chains = []
    for number in dense:
        if number in ends:
            continue
        chain = [number]
        while found := after[chain[-1]]:
            chain += found
        operations = [nodes[each].operation for each in chain]
        chains.append([each for each in operations if isinstance(each, (keras.layers.Dense, keras.layers.Dropout))])
    return chains


def _is_large(layer: keras.layers.Layer) -> bool:
    kernel = weight_of(layer, "kernel").shape
    if type(layer) is not keras.layers.Dense:
        return math.prod(kernel) >= _LARGE_CONVOLUTION
    return math.prod(kernel) >= _LARGE and kernel[-1] >= _MANY_OUTPUTS


def _elementwise(layer: keras.layers.Layer, places: Mapping[int, int]) -> bool:
    if layer.activity_regularizer is not None:
        return False
    if isinstance(layer, keras.layers.Dropout):
        # A mask that several units share, or one for whole activations in another place, is the same on all devices.
        return layer.noise_shape is None and places[id(layer)] == 1
    return not isinstance(layer, keras.layers.Activation) or acts_on_each_output(layer.activation)

"""The layout of tensor parallelism: which layers of a model are divided over the model axis, and in which of `WAYS`.

`find_layout` applies the user's regular expressions on paths of layers, and then recognises: attention, divided by
heads; layers that declare their layout in `tensor_layout()`, as tfpar's blocks do; the feed-forward pairs of keras-hub
and of chains of Dense layers; embeddings; other Dense layers, and convolutions, that are large.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence

from tfpar.config import ConfigError
from tfpar.optim import keras_calls, keras_internals
from tfpar.parallel.tensor.indivisible import Indivisible
from tfpar.parallel.tensor.ways import (
    COLUMN,
    GATHER,
    HEADS,
    OVER_OUTPUTS,
    OWN_NUMBERS,
    ROW,
    VOCABULARY,
    WAYS,
    WHOLE,
    Layouts,
    activation_of,
    can_gather,
    layout_of,
)

import keras

# Below this many elements, gathering costs more than it saves.
_LARGE = 1 << 12
_LARGE_CONVOLUTION = 1 << 16  # whose outputs are larger
# Elementwise layers that may be between two Dense layers.
_ELEMENTWISE = (keras.layers.Activation, keras.layers.Dropout, keras.layers.ReLU, keras.layers.LeakyReLU)
# Names of keras-hub's feed-forward layers.
_FEED_FORWARD = (
    (re.compile(r"feedforward_(intermediate|gate)_dense\d*$|feedforward_gate$"), COLUMN),
    (re.compile(r"feedforward_output_dense\d*$"), ROW),
)
_ATTENTION = ("query", "key", "value", "attention_output")


def find_layout(model: keras.Model, size: int, rules: Mapping[str, str] | None = None) -> Layouts:
    """The layout of a model, by `id` of the layer; whole layers are left out.

    Args:
      model: A built Keras model.
      size: Devices on the model axis.
      rules: Ways by regular expression, searched in the paths of layers; the first match wins. Rules take precedence
        over automatic choices.

    Raises:
      ConfigError: A rule is not a regular expression, names no way, matches no layer, or divides a layer that has no
        equal parts; or no layer can be divided.
    """
    finder = Finder(model, size)
    finder.take_rules(rules or {})
    finder.look(model)
    return some(finder.found, finder, model)


def some(layouts: Layouts, finder: Finder, model: keras.Model) -> Layouts:
    """The layouts, of which there must be at least one.

    Raises:
      ConfigError: There are none.
    """
    if not layouts:
        closest = finder.indivisible[:1]
        raise ConfigError(
            f"--mesh: model {model.name!r} has no layer that can be divided over {finder.size} devices: attention with "
            "a divisible number of heads, Dense, EinsumDense or Embedding layers."
            + "".join(f" {each.path!r} has {each.reason}. {each.fitting}" for each in closest)
            + " Use --mesh=data:... alone, or divide layers of your own by layout={'REGEX': 'gather'}."
        )
    return layouts


class Finder:
    """Layouts that have been found so far.

    Attributes:
      layers: All layers of the model.
      size: Devices on the model axis.
      found: The layouts.
      groups: The layers, by identity, that are divided together and could not be divided separately.
      indivisible: Layers that would be divided together, but whose heads or units the axis does not divide.
    """

    def __init__(self, model: keras.Model, size: int) -> None:
        self.layers = keras_internals.all_layers(model)
        self.found: Layouts = {}
        self.groups: list[list[int]] = []
        self.indivisible: list[Indivisible] = []
        self.size = size
        self._asked: set[int] = set()

    def take_rules(self, rules: Mapping[str, str]) -> None:
        expressions = []
        for pattern, way in rules.items():
            try:
                expressions.append((re.compile(pattern), way, pattern))
            except re.error as error:
                raise ConfigError(f"layout: {pattern!r} is not a regular expression: {error}.") from None
            if way.partition(":")[0] not in WAYS:
                raise ConfigError(f"layout[{pattern!r}]={way!r} is not one of {', '.join(WAYS)}.")
        used = {pattern for expression, way, pattern in expressions if way == HEADS and self._ask_heads(expression)}
        by_heads = {*self._asked}
        for layer in self.layers:
            for expression, way, pattern in expressions:
                if way == HEADS or not keras_internals.weights_made_to_learn(layer):
                    continue
                if expression.search(layer.path or layer.name):
                    used.add(pattern)
                    if id(layer) in by_heads:
                        raise ConfigError(
                            f"layout[{pattern!r}]={way!r}: {layer.path!r} is part of a layer that another rule divides "
                            "by heads, as a whole. Leave one of them out."
                        )
                    self._asked.add(id(layer))
                    if way != WHOLE and not self._take(layer, way):
                        raise ConfigError(self._cannot(layer, way, pattern))
                    break
        if unused := [pattern for pattern in rules if pattern not in used]:
            names = sorted(
                layer.path or layer.name for layer in self.layers if keras_internals.weights_made_to_learn(layer)
            )
            shown = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
            kind = "attention layer" if rules[unused[0]] == HEADS else "layer with weights"
            raise ConfigError(f"layout: {unused[0]!r} matches no {kind}. The model has: {shown}.")

    def _ask_heads(self, expression: re.Pattern[str]) -> bool:
        """Divides the attention layers that a rule names, or refuses; returns whether there are any."""
        matched = False
        for layer in self.layers:
            ways = _ways_of_heads(layer)
            if not ways or not expression.search(layer.path or layer.name):
                continue
            if not self._take_all(layer, ways):
                found = Indivisible.of(layer, ways, self.size)
                raise ConfigError(
                    f"layout[{expression.pattern!r}]={HEADS!r}: {type(layer).__name__} {found.path!r} has "
                    f"{found.reason}, which {self.size} devices cannot divide into equal parts. {found.fitting} "
                    "Use another --mesh, or leave the rule out: then only weights that can be divided otherwise are."
                )
            self._asked |= {id(inner) for inner in ways}
            matched = True
        return matched

    def look(self, model: keras.Model) -> None:
        """Finds the layers that divide well, in addition to those in rules."""
        for layer in self.layers:
            self.look_at(layer)
        for chain in _dense_chains(model):
            self._check_asked(chain)
            self.pair_up(chain)
        self.take_large()

    def look_at(self, layer: keras.layers.Layer) -> None:
        """Divides this layer if its kind is known."""
        if ways := _ways_of_attention(layer):
            self._take_all(layer, ways)
        elif own := getattr(layer, "tensor_layout", None):
            self._take_all(layer, own())
        elif isinstance(layer, keras.layers.Embedding):
            self._take_unasked(layer, VOCABULARY)
        else:
            for expression, way in _FEED_FORWARD:
                if expression.search(layer.name):
                    self._take_unasked(layer, way)

    def pair_up(self, chain: Sequence[keras.layers.Layer]) -> None:
        """Divides consecutive Dense layers alternately by columns and by rows; a last one without a partner stays
        whole.

        Args:
          chain: Dense layers, and dropout between them.
        """
        dense = [place for place, layer in enumerate(chain) if type(layer) is keras.layers.Dense]
        for first, second in zip(dense[::2], dense[1::2], strict=False):
            pair = chain[first], chain[second]
            if not {*map(id, pair)} & (self.found.keys() | self._asked):
                between = dict.fromkeys(chain[first + 1 : second], OWN_NUMBERS)
                self._take_all(pair[0], {pair[0]: COLUMN, **between, pair[1]: ROW})

    def _check_asked(self, chain: Sequence[keras.layers.Layer]) -> None:
        """Refuses a Dense layer that was asked for by columns where the next one needs whole inputs."""
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
            least = _LARGE if type(layer) is keras.layers.Dense else _LARGE_CONVOLUTION
            if can_gather(layer) and math.prod(layer.kernel.shape) >= least:
                self._take_unasked(layer, GATHER)

    def _take_all(self, owner: keras.layers.Layer, ways: Mapping[keras.layers.Layer, str]) -> bool:
        """Divides all of these layers, or none if one of them cannot be divided; returns whether it did.

        Args:
          owner: The layer that they belong to, or the first of them.
          ways: By layer.
        """
        layouts = {id(layer): (layer, layout_of(layer, way, self.size)) for layer, way in ways.items()}
        if self._asked & layouts.keys():
            return False
        if any(layout is None for _, layout in layouts.values()):
            self.indivisible.append(Indivisible.of(owner, ways, self.size))
            return False
        self.found |= {key: (layer, layout) for key, (layer, layout) in layouts.items() if layout}
        self.groups.append([*layouts])
        return True

    def _take_unasked(self, layer: keras.layers.Layer, way: str) -> None:
        if id(layer) not in self._asked and id(layer) not in self.found:
            self._take(layer, way)

    def _take(self, layer: keras.layers.Layer, way: str) -> bool:
        layout = layout_of(layer, way, self.size)
        if layout is not None:
            self.found[id(layer)] = layer, layout
        return layout is not None

    def _cannot(self, layer: keras.layers.Layer, way: str, pattern: str) -> str:
        shapes = ", ".join(f"{each.name} {tuple(each.shape)}" for each in keras_internals.weights_made_to_learn(layer))
        found = Indivisible.of(layer, {layer: way}, self.size)
        reason = f": {found.reason}. {found.fitting}" if found.counts else "."
        return (
            f"layout[{pattern!r}]={way!r}: {type(layer).__name__} {layer.path or layer.name!r} ({shapes}) cannot be "
            f"divided in this way over {self.size} devices{reason} Choose another of {', '.join(WAYS)}, or another "
            "--mesh."
        )


def find_indivisible(model: keras.Model, size: int, rules: Mapping[str, str] | None = None) -> list[Indivisible]:
    """What `find_layout` found and could not divide.

    Args:
      model: See `find_layout`.
      size: See `find_layout`.
      rules: See `find_layout`.
    """
    finder = Finder(model, size)
    finder.take_rules(rules or {})
    finder.look(model)
    return finder.indivisible


def _ways_of_attention(layer: keras.layers.Layer) -> dict[keras.layers.Layer, str]:
    """How attention is divided by heads, which Keras and keras-hub build from projections with these names; empty if
    the layer is not attention."""
    inner = keras_internals.all_layers(layer, include_self=False, recursive=False)
    children = {child.name: child for child in inner}
    if not all(isinstance(children.get(name), keras.layers.EinsumDense) for name in _ATTENTION):
        return {}
    projections = {children[name]: COLUMN for name in (*_ATTENTION[:-1], "gate") if name in children}
    masked = {child: OWN_NUMBERS for child in inner if isinstance(child, keras.layers.Dropout)}
    return {**projections, children[_ATTENTION[-1]]: ROW, layer: HEADS, **masked}


def _ways_of_heads(layer: keras.layers.Layer) -> dict[keras.layers.Layer, str]:
    """How a layer is divided by heads: attention, or a layer that declares how; empty for others."""
    if ways := _ways_of_attention(layer):
        return ways
    own = layer.tensor_layout() if hasattr(layer, "tensor_layout") else {}
    return own if any("x" in way.partition(":")[2] for way in own.values()) else {}


def _dense_chains(model: keras.Model) -> list[list[keras.layers.Layer]]:
    """Chains of Dense layers in a model's graph, each the only reader of the one before; with the dropout between
    them."""
    graph = keras_calls.graph_of(model)
    nodes = [] if graph is None else keras_calls.graph_nodes(graph)
    readers: dict[int, list[int]] = {}
    for number, node in enumerate(nodes):
        for tensor in node.input_tensors:
            readers.setdefault(id(tensor), []).append(number)
    wanted = {id(tensor) for tensor in graph.outputs} if graph is not None else set()
    uses = [id(node.operation) for node in nodes]

    def following(number: int) -> list[int]:
        """The Dense layer that alone reads the output of this node, through elementwise layers."""
        outputs = nodes[number].outputs
        if len(outputs) != 1 or id(outputs[0]) in wanted or len(found := readers.get(id(outputs[0]), [])) != 1:
            return []
        operation = nodes[found[0]].operation
        if isinstance(operation, _ELEMENTWISE) and _elementwise(operation):
            further = following(found[0])
            return [found[0], *further] if further else []
        return found if type(operation) is keras.layers.Dense and uses.count(id(operation)) == 1 else []

    dense = [
        n for n, node in enumerate(nodes) if type(node.operation) is keras.layers.Dense and uses.count(uses[n]) == 1
    ]
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


def _elementwise(layer: keras.layers.Layer) -> bool:
    return not isinstance(layer, keras.layers.Activation) or activation_of(layer) not in OVER_OUTPUTS

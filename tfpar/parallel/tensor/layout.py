"""The layout of tensor parallelism: which layers of a model are divided over the model axis, and how.

A layer is divided in one of these ways (Shoeybi et al. 2019, arXiv:1909.08053):

| way | layers | what a device has | what travels |
|---|---|---|---|
| `column` | Dense, EinsumDense | some outputs, which the next layer takes divided | gradient of the input, summed |
| `row` | Dense, EinsumDense | some inputs, which the layer before left divided | output, summed |
| `gather` | Dense, Conv1D to 3D | some outputs, or channels | outputs, gathered; gradient of the input, summed |
| `heads` | attention | some heads | gradient of the inputs, summed |
| `vocabulary` | Embedding | the vectors of some tokens | vectors, summed; logits of a tied head, gathered |
| `whole` | all others | all | nothing |

`find_layout` applies the user's regular expressions on paths of layers, and then recognises: attention, divided by
heads; layers that declare their layout in `tensor_layout()`, as tfpar's blocks do; the feed-forward pairs of keras-hub
and of chains of Dense layers; embeddings; other Dense layers, and convolutions, that are large.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping, Sequence

from tfpar.config import ConfigError
from tfpar.optim import keras_calls, keras_internals
from tfpar.parallel.split import Split

import keras

COLUMN, ROW, GATHER, HEADS, VOCABULARY, WHOLE = WAYS = ("column", "row", "gather", "heads", "vocabulary", "whole")
OWN_NUMBERS = "own_numbers"  # dropout on divided values: devices must not draw the same mask for different units
POSITIONS = "positions"  # a block, see `positions.py`

# Below this many elements, gathering costs more than it saves.
_LARGE = 1 << 12
_LARGE_CONVOLUTION = 1 << 16  # whose outputs are larger
# Activations that combine several outputs.
_OVER_OUTPUTS = ("softmax", "log_softmax", "sparsemax", "glu")
# Elementwise layers that may be between two Dense layers.
_ELEMENTWISE = (keras.layers.Activation, keras.layers.Dropout, keras.layers.ReLU, keras.layers.LeakyReLU)
# Names of keras-hub's feed-forward layers.
_FEED_FORWARD = (
    (re.compile(r"feedforward_(intermediate|gate)_dense\d*$|feedforward_gate$"), COLUMN),
    (re.compile(r"feedforward_output_dense\d*$"), ROW),
)
_CONVOLUTIONS = (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)
_ATTENTION = ("query", "key", "value", "attention_output")


@dataclasses.dataclass(frozen=True)
class LayerLayout:
    """How one layer is divided.

    Attributes:
      way: One of `WAYS`.
      splits: How its own variables are divided, by name; those not listed are whole.
      divides_positions: Whether the input of a column layer, or the output of a row layer, has divided positions.
      edges: For a block with divided positions, whether its input has all of them, and whether its output must.
    """

    way: str
    splits: Mapping[str, Split] = dataclasses.field(default_factory=dict)
    divides_positions: bool = False
    edges: tuple[bool, bool] = (True, True)


Layouts = dict[int, tuple[keras.layers.Layer, LayerLayout]]


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
    return some(finder.found, model, size)


def some(layouts: Layouts, model: keras.Model, size: int) -> Layouts:
    """The layouts, of which there must be at least one.

    Raises:
      ConfigError: There are none.
    """
    if not layouts:
        raise ConfigError(
            f"--mesh: model {model.name!r} has no layer that can be divided over {size} devices: attention with a "
            "divisible number of heads, Dense, EinsumDense or Embedding layers. Use --mesh=data:... alone, or divide "
            "layers of your own by layout={'REGEX': 'gather'}."
        )
    return layouts


class Finder:
    """Layouts that have been found so far.

    Attributes:
      layers: All layers of the model.
      found: The layouts.
      groups: The layers, by identity, that are divided together and could not be divided separately.
    """

    def __init__(self, model: keras.Model, size: int) -> None:
        self.layers = keras_internals.all_layers(model)
        self.found: Layouts = {}
        self.groups: list[list[int]] = []
        self._size = size
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
        used = set()
        for layer in self.layers:
            for expression, way, pattern in expressions:
                if keras_internals.weights_made_to_learn(layer) and expression.search(layer.path or layer.name):
                    used.add(pattern)
                    self._asked.add(id(layer))
                    if way != WHOLE and not self._take(layer, way):
                        raise ConfigError(self._cannot(layer, way, pattern))
                    break
        if unused := [pattern for pattern in rules if pattern not in used]:
            names = sorted(
                layer.path or layer.name for layer in self.layers if keras_internals.weights_made_to_learn(layer)
            )
            shown = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
            raise ConfigError(f"layout: {unused[0]!r} matches no layer with weights. The model has: {shown}.")

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
        if self._divide_heads(layer):
            return
        if own := getattr(layer, "tensor_layout", None):
            self._take_all(own())
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
                self._take_all({pair[0]: COLUMN, **between, pair[1]: ROW})

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
            if _can_gather(layer) and math.prod(layer.kernel.shape) >= least:
                self._take_unasked(layer, GATHER)

    def _divide_heads(self, layer: keras.layers.Layer) -> bool:
        """Divides attention, which Keras and keras-hub build from projections with these names; returns whether it
        did."""
        inner = keras_internals.all_layers(layer, include_self=False, recursive=False)
        children = {child.name: child for child in inner}
        if not all(isinstance(children.get(name), keras.layers.EinsumDense) for name in _ATTENTION):
            return False
        projections = {children[name]: COLUMN for name in (*_ATTENTION[:-1], "gate") if name in children}
        masked = {child: OWN_NUMBERS for child in inner if isinstance(child, keras.layers.Dropout)}
        self._take_all({**projections, children[_ATTENTION[-1]]: ROW, layer: HEADS, **masked})
        return True

    def _take_all(self, ways: Mapping[keras.layers.Layer, str]) -> None:
        """Divides all of these layers, or none if one of them cannot be divided."""
        layouts = {id(layer): (layer, layout_of(layer, way, self._size)) for layer, way in ways.items()}
        if self._asked & layouts.keys() or any(layout is None for _, layout in layouts.values()):
            return
        self.found |= {key: (layer, layout) for key, (layer, layout) in layouts.items() if layout}
        self.groups.append([*layouts])

    def _take_unasked(self, layer: keras.layers.Layer, way: str) -> None:
        if id(layer) not in self._asked and id(layer) not in self.found:
            self._take(layer, way)

    def _take(self, layer: keras.layers.Layer, way: str) -> bool:
        layout = layout_of(layer, way, self._size)
        if layout is not None:
            self.found[id(layer)] = layer, layout
        return layout is not None

    def _cannot(self, layer: keras.layers.Layer, way: str, pattern: str) -> str:
        shapes = ", ".join(f"{each.name} {tuple(each.shape)}" for each in keras_internals.weights_made_to_learn(layer))
        return (
            f"layout[{pattern!r}]={way!r}: {type(layer).__name__} {layer.path or layer.name!r} ({shapes}) cannot be "
            f"divided in this way over {self._size} devices. Choose another of {', '.join(WAYS)}, or another --mesh."
        )


def layout_of(layer: keras.layers.Layer, way: str, size: int) -> LayerLayout | None:
    """The layout of a layer; None if it cannot be divided in this way into equal parts.

    Args:
      layer: A built layer.
      way: `column:3` divides each of three blocks; `column:3x4` also keeps whole the four heads of each block.
      size: Devices on the model axis.
    """
    way, _, groups = way.partition(":")
    groups, _, heads = groups.partition("x")
    if heads and int(heads) % size:
        return None
    if way in (HEADS, OWN_NUMBERS):
        return LayerLayout(way)
    if way == VOCABULARY:
        table = getattr(layer, "embeddings", None)
        if table is None or not _can_pad(table.shape[0], size) or _is_special(layer):
            return None
        tables = {"embeddings": Split.padded(0, size, table.shape[0])}
        if getattr(layer, "reverse_embeddings", None) is not None:  # a head with its own table
            tables["reverse_embeddings"] = Split.padded(1, size, table.shape[0])
        return LayerLayout(way, tables)
    makers = {COLUMN: _column_splits, GATHER: _gather_splits, ROW: _row_splits}
    splits = makers[way](layer, size, int(groups or 1)) if way in makers else None
    return None if splits is None else LayerLayout(way, splits)


def _column_splits(layer: keras.layers.Layer, size: int, groups: int = 1) -> dict[str, Split] | None:
    if not _is_linear(layer) or _activation(layer) in _OVER_OUTPUTS:
        return None
    return _output_splits(layer, size, groups)


def _gather_splits(layer: keras.layers.Layer, size: int, groups: int = 1) -> dict[str, Split] | None:
    del groups  # gathered parts must be in order
    if not _can_gather(layer) or not _can_pad(layer.kernel.shape[-1], size):
        return None
    kernel, outputs = layer.kernel.shape, layer.kernel.shape[-1]
    splits = {"kernel": Split.padded(len(kernel) - 1, size, outputs)}
    return splits if layer.bias is None else {**splits, "bias": Split.padded(0, size, outputs)}


def _can_pad(length: int, size: int) -> bool:
    """Whether padding the last part makes all parts equal, without a part that is only padding."""
    return -length % size < -(-length // size)


def _can_gather(layer: keras.layers.Layer) -> bool:
    """Whether the last dimension of the layer's outputs is that of its kernel."""
    if type(layer) in _CONVOLUTIONS:
        return layer.groups == 1 and layer.data_format == "channels_last" and not _is_special(layer)
    return type(layer) is keras.layers.Dense and _is_linear(layer)


def _output_splits(layer: keras.layers.Layer, size: int, groups: int) -> dict[str, Split] | None:
    """Splits of kernel and bias by the first dimension of the output that is not one of the input."""
    axis, bias_axis = len(layer.kernel.shape) - 1, 0
    if isinstance(layer, keras.layers.EinsumDense):
        inputs, kernel, outputs = _equation(layer)
        own = [label for label in kernel if label in outputs and label not in inputs]
        if not own:
            return None
        axis = kernel.index(own[0])
        bias_axis = (layer.bias_axes or own[0]).find(own[0])
        if bias_axis < 0:
            return None
    splits = {"kernel": Split(axis, size, groups)}
    if layer.bias is not None:
        splits["bias"] = Split(bias_axis, size, groups)
    fits = splits["kernel"].divides(layer.kernel.shape)
    return splits if fits and ("bias" not in splits or splits["bias"].divides(layer.bias.shape)) else None


def _row_splits(layer: keras.layers.Layer, size: int, groups: int = 1) -> dict[str, Split] | None:
    if not _is_linear(layer):
        return None
    axis = 0
    if isinstance(layer, keras.layers.EinsumDense):
        inputs, kernel, outputs = _equation(layer)
        summed = [label for label in kernel if label in inputs and label not in outputs]
        if not summed:
            return None
        axis = kernel.index(summed[0])
    split = Split(axis, size, groups)
    return {"kernel": split} if split.divides(layer.kernel.shape) else None


def _is_linear(layer: keras.layers.Layer) -> bool:
    return type(layer) in (keras.layers.Dense, keras.layers.EinsumDense) and not _is_special(layer)


def _is_special(layer: keras.layers.Layer) -> bool:
    """Whether its weights are more than kernel and bias: quantised, with LoRA, or with a constraint on the whole."""
    constrained = any(weight.constraint is not None for weight in layer.weights)
    return bool(getattr(layer, "quantization_mode", None)) or getattr(layer, "lora_enabled", False) or constrained


def _activation(layer: keras.layers.Layer) -> str:
    return getattr(layer.activation, "__name__", type(layer.activation).__name__)


def _equation(layer: keras.layers.EinsumDense) -> tuple[str, str, str]:
    """Labels of input, kernel and output."""
    operands, outputs = layer.equation.replace("...", "").split("->")
    inputs, kernel = operands.split(",")
    return inputs.strip(), kernel.strip(), outputs.strip()


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
    return not isinstance(layer, keras.layers.Activation) or _activation(layer) not in _OVER_OUTPUTS

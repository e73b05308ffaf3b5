"""Layouts by weight: they name the axis along which each dimension of a weight is divided, like
`keras.distribution.LayoutMap`.

XLA can divide a product along any of its dimensions and inserts the necessary communication. tfpar divides layers in
the ways of `ways.py`, so a layout by weight is translated: attention and feed-forward layers are divided together or
not at all; and if a layout names another dimension of a weight than the one along which its layer is divided, the
layer's dimension is used, which takes the same memory.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfpar.config import ConfigError
from tfpar.optim import keras_internals
from tfpar.parallel.tensor.attention import weights_of_all_heads
from tfpar.parallel.tensor.layout import Finder, some
from tfpar.parallel.tensor.ways import COLUMN, EXPERTS, GATHER, ROW, VOCABULARY, WAYS, Layouts, layout_of, weight_of
from tfpar.process.listing import listed

import keras

_log = logging.getLogger(__name__)

MODEL, _DATA = "model", ("data", "batch")
Rules = Mapping[str, Any]


def names_weights(rules: Rules | None) -> bool:
    """Whether a layout names weights: a `LayoutMap`, or a dict whose values are axes by dimension, or dimensions.

    Raises:
      ConfigError: It is no layout; or some of its values are for weights and some for layers.
    """
    if not rules:
        return False
    if isinstance(rules, keras.distribution.LayoutMap):
        return True
    if not isinstance(rules, Mapping):
        raise ConfigError(f"layout={rules!r}: give a dict, such as {{'REGEX': 'gather'}}, or a LayoutMap.")
    of_layers = [key for key, value in rules.items() if isinstance(value, str)]
    if of_layers and len(of_layers) < len(rules):
        other = next(key for key in rules if key not in of_layers)
        raise ConfigError(
            f"layout[{of_layers[0]!r}]={rules[of_layers[0]]!r} names a way for layers ({', '.join(WAYS)}), and "
            f"layout[{other!r}]={rules[other]!r} axes for weights. Use one kind for all of them."
        )
    return not of_layers


def find_weight_layout(model: keras.Model, size: int, rules: Rules) -> Layouts:
    """Returns the layout of a model from rules for its weights; weights without a rule stay whole.

    Args:
      model: A built Keras model.
      size: Number of devices on the model axis.
      rules: A `LayoutMap`, whose keys are exact paths or expressions that match whole paths; or a dict whose keys are
        expressions that are searched in paths (the first match wins), and whose values are one axis per dimension, such
        as `(None, "model")`, or the number of the dimension that is divided over the model axis, or None.

    Raises:
      ConfigError: A rule cannot be carried out; the message names the weight and the reason.
    """
    wanted = _wanted(model, size, rules)
    finder = Finder(model, size)
    finder.look(model)
    found: Layouts = {}
    for group in _groups(finder):
        found |= _group(finder.found, group, wanted)
    shared = {id(weight) for weight in weights_of_all_heads(found)}  # keras-hub's maps name the only head of keys, too
    for layer in finder.every:
        if id(layer) not in found and shared.isdisjoint(map(id, keras_internals.weights_made_to_learn(layer))):
            found |= _by_itself(layer, finder, wanted)
    if whole := [request.path for key, request in wanted.items() if key in shared and request.dim is not None]:
        _log.info("layout: whole, because all heads share them: %s", listed(whole, 3, "; "))
    elsewhere = [
        f"{request.path} along dim {split.axis}, not {request.dim}"
        for layer, layout in found.values()
        for name, split in layout.splits.items()
        if (request := wanted.get(id(weight_of(layer, name)))) and request.dim not in (None, split.axis)
    ]
    if elsewhere:
        _log.info(
            "layout: divided along other dims than requested, with the same memory: %s",
            listed(elsewhere, 3, "; "),
        )
    return some(found, finder, model)


def _groups(finder: Finder) -> list[list[int]]:
    """Returns groups of layers that are divided together: they were found together, or belong to one layer."""
    groups = [[key for key in group if key in finder.found] for group in finder.groups]
    by_parent: dict[Any, list[int]] = {}
    for key, (layer, layout) in finder.found.items():
        if not any(key in group for group in groups):
            parent = layer.path.rpartition("/")[0] if layout.way in (COLUMN, ROW) else key
            by_parent.setdefault(parent, []).append(key)
    return [*groups, *by_parent.values()]


@dataclasses.dataclass(frozen=True)
class _Request:
    """The rule for a weight.

    Attributes:
      path: Path of the weight.
      dim: The dimension that is divided over the model axis, None for a whole weight.
      rule: The key in the layout, with its value.
    """

    path: str
    dim: int | None
    rule: str


def _wanted(model: keras.Model, size: int, rules: Rules) -> dict[int, _Request]:
    """Returns the requests by `id` of the weight, without the weights that have no rule."""
    look_up = _of_map(rules, size) if isinstance(rules, keras.distribution.LayoutMap) else _of_expressions(rules)
    wanted: dict[int, _Request] = {}
    used = set()
    variables = _ruled(model)
    for variable in variables:
        if (entry := look_up(variable.path)) is not None:
            key, value = entry
            used.add(key)
            rule = f"layout[{key!r}]={value!r}"
            wanted[id(variable)] = _Request(variable.path, _dim(variable, value, rule), rule)
    unused = [key for key in rules if key not in used]
    if unused and not isinstance(rules, keras.distribution.LayoutMap):  # a map may be made for models of several kinds
        paths = [variable.path for variable in variables]
        shown = ", ".join(paths[:12]) + (", ..." if len(paths) > 12 else "")
        raise ConfigError(f"layout: {unused[0]!r} matches no weight. The model has: {shown}.")
    return wanted


def _ruled(model: keras.Model) -> list[keras.Variable]:
    """Returns the weights that rules are for, frozen ones too; adapters are divided like their kernels."""
    own = map(keras_internals.weights_made_to_learn, keras_internals.all_layers(model))
    return [variable for variables in own for variable in variables if not variable.name.startswith("lora_")]


Lookup = Callable[[str], tuple[str, Any] | None]


def _of_map(rules: Any, size: int) -> Lookup:
    mesh = rules.device_mesh
    if mesh is not None and MODEL in mesh.axis_names:
        found = mesh.shape[list(mesh.axis_names).index(MODEL)]
        if found != size:
            raise ConfigError(
                f"layout: its DeviceMesh has {found} devices on the axis {MODEL!r}, and --mesh has {size}. Use "
                f"--mesh=model:{found}, or create the DeviceMesh for {size}."
            )

    def look_up(path: str) -> tuple[str, Any] | None:
        try:
            layout = rules[path]
        except ValueError as error:
            raise ConfigError(f"layout: {error}") from None
        if layout is None:
            return None
        return next(key for key in rules if rules[key] is layout), tuple(layout.axes)

    return look_up


def _of_expressions(rules: Rules) -> Lookup:
    expressions = []
    for pattern, value in rules.items():
        try:
            expressions.append((re.compile(pattern), pattern, value))
        except re.error as error:
            raise ConfigError(f"layout: {pattern!r} is not a regular expression: {error}.") from None

    def look_up(path: str) -> tuple[str, Any] | None:
        return next(((pattern, value) for regex, pattern, value in expressions if regex.search(path)), None)

    return look_up


def _dim(variable: keras.Variable, value: Any, rule: str) -> int | None:
    """Returns the dimension that is divided over the model axis, or None."""
    rank = len(variable.shape)
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        axes: Sequence[Any] = [MODEL if dim == value else None for dim in range(rank)]
        if value is not None and MODEL not in axes:
            raise ConfigError(f"{rule}: {variable.path} {tuple(variable.shape)} has no dim {value}.")
    elif isinstance(value, (tuple, list)):
        axes = value
    else:
        raise ConfigError(f"{rule}: expected an axis for each dim, such as (None, 'model'), a dim, or None.")
    if len(axes) != rank:
        raise ConfigError(f"{rule}: {variable.path} {tuple(variable.shape)} has {rank} dims, not {len(axes)}.")
    unknown = [axis for axis in axes if axis not in (None, MODEL, *_DATA)]
    if unknown:
        raise ConfigError(
            f"{rule}: {unknown[0]!r} is not an axis over which layers can be divided. Use {MODEL!r}; along "
            f"{' or '.join(map(repr, _DATA))} weights are whole."
        )
    if list(axes).count(MODEL) > 1:
        raise ConfigError(f"{rule}: {variable.path} cannot be divided along {MODEL!r} in two dims.")
    return list(axes).index(MODEL) if MODEL in axes else None


def _group(layouts: Layouts, group: Sequence[int], wanted: Mapping[int, _Request]) -> Layouts:
    """Returns the layouts of a group: all of its layers are divided if rules name all of their kernels and tables.

    Biases, and the second table of a head, are divided with them.
    """
    kernels = {
        id(variable): variable
        for key in group
        for name in layouts[key][1].splits
        if (name in ("kernel", "embeddings") or (layouts[key][1].way == EXPERTS and not name.endswith("bias")))
        and (variable := weight_of(layouts[key][0], name)) is not None
    }
    asked = [key for key in kernels if key in wanted and wanted[key].dim is not None]
    if kernels and len(asked) == len(kernels):
        return {key: layouts[key] for key in group}
    if asked and not all(_can_gather(layouts[key][0], wanted) for key in group if _asks(layouts[key][0], wanted)):
        request = wanted[asked[0]]
        others = ", ".join(variable.path for key, variable in kernels.items() if key not in asked)
        raise ConfigError(
            f"{request.rule}: {request.path} can only be divided together with {others}: one layer's divided output "
            "is the other's input. Name all of them, or none."
        )
    return {}


def _by_itself(layer: keras.layers.Layer, finder: Finder, wanted: Mapping[int, _Request]) -> Layouts:
    """Returns the layout of a layer that is not divided together with others."""
    request = _asks(layer, wanted)
    if request is None:
        return {}
    if obstacle := finder.obstacles.get(id(layer)):
        raise ConfigError(
            f"{request.rule}: {request.path} cannot be divided: {type(layer).__name__} {layer.path!r} has {obstacle}. "
            "Set it to None."
        )
    layout = None
    if _can_gather(layer, wanted):
        layout = layout_of(layer, GATHER, finder.size)
    elif request.dim == 0 and hasattr(layer, "embeddings"):
        layout = layout_of(layer, VOCABULARY, finder.size)
    if layout is None:
        shapes = ", ".join(f"{each.name} {tuple(each.shape)}" for each in keras_internals.weights_made_to_learn(layer))
        whole = f"{type(layer).__name__} ({shapes}) needs all of that dim."
        for each in finder.indivisible:
            if layer in each.layers:
                whole = f"{type(each.layer).__name__} {each.path!r} has {each.reason}. {each.fitting}"
        raise ConfigError(
            f"{request.rule}: {request.path} cannot be divided over {finder.size} devices along dim {request.dim}: "
            f"{whole} Set it to None, or use another --mesh."
        )
    return {id(layer): (layer, layout)}


def _asks(layer: keras.layers.Layer, wanted: Mapping[int, _Request]) -> _Request | None:
    """Returns the request for the largest weight of the layer itself that a rule divides."""
    weights = sorted(keras_internals.weights_made_to_learn(layer), key=lambda each: -len(each.shape))
    requests = [wanted[id(each)] for each in weights if id(each) in wanted and wanted[id(each)].dim is not None]
    return requests[0] if requests else None


def _can_gather(layer: keras.layers.Layer, wanted: Mapping[int, _Request]) -> bool:
    """Whether the requests are for the last dims of a layer whose outputs can be gathered."""
    request = _asks(layer, wanted)
    kernel = getattr(layer, "kernel", None)
    if request is None or kernel is None or layout_of(layer, GATHER, 1) is None:
        return False
    return request.dim == len(kernel.shape) - 1

"""A model whose weights are divided over the devices of the model axis."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tfpar.config import ConfigError
from tfpar.optim.optimizers import ELEMENTWISE, WHOLE_TENSORS
from tfpar.parallel.division import Split
from tfpar.parallel.model_axis import ModelAxis
from tfpar.parallel.split import whole_elements
from tfpar.parallel.tensor import layout as tensor_layout
from tfpar.parallel.tensor.calls import divide_calls, heads_of
from tfpar.parallel.tensor.indivisible import Indivisible
from tfpar.parallel.tensor.positions import divide_positions, mark_gradients_in_parts
from tfpar.parallel.tensor.ways import WAYS, Layouts, weight_of
from tfpar.parallel.tensor.weight_layouts import find_weight_layout, names_weights
from tfpar.process.listing import listed
from tfpar.training.core import Core

import keras

_log = logging.getLogger(__name__)
_NAMED = 3  # layers in a warning


def divide_layers(
    model: keras.Model,
    axis: ModelAxis,
    rules: Mapping[str, Any] | None = None,
    *,
    sequence_parallel: bool = False,
    whole: Collection[int] = (),
    announced: bool = False,
) -> dict[int, Split]:
    """Makes the layers of a model compute with parts of their weights whenever the program of a device is traced.

    Args:
      model: The calls of its layers are replaced; its variables do not change.
      axis: The devices.
      rules: See `tensor_layout.find_layout`, or `weight_layouts.find_weight_layout`.
      sequence_parallel: Whether blocks divide positions, see `positions.divide_positions`.
      whole: See `positions.divide_positions`.
      announced: Whether to log what is divided.

    Returns:
      How to divide the variables, by their identity; see `move_to_devices`.

    Raises:
      ConfigError: Nothing can be divided, or a rule cannot hold.
    """
    find = find_weight_layout if names_weights(rules) else tensor_layout.find_layout
    layouts = find(model, axis.size, rules or {})
    splits = {
        id(weight_of(layer, name)): split for layer, layout in layouts.values() for name, split in layout.splits.items()
    }
    mark_gradients_in_parts(layouts)
    blocks = divide_positions(model, layouts, axis.size, whole) if sequence_parallel else 0
    divide_calls(layouts, heads_of(model))
    if announced:
        positions = f"; positions divided in {blocks} blocks" if blocks else ""
        _log.info("%s%s", _describe(model, axis, layouts, splits), positions)
        if not names_weights(rules):  # a layout by weight divides what it names, or is refused
            _log_undivided(model, tensor_layout.find_indivisible(model, axis.size, rules), splits)
    return splits


def check_divided(optimizer: keras.optimizers.Optimizer, core: Core, *, deals_out: bool = True) -> None:
    """Refuses optimizers and models that need whole tensors, which no device has.

    Args:
      optimizer: Built for the model.
      core: The model.
      deals_out: Whether devices that divide layers put whole tensors together for the optimizer, see `DealtTensors`.

    Raises:
      ConfigError: With what to use.
    """
    if core.overwritten:
        raise ConfigError(
            f"--mesh: model {core.model.name!r} has float8 layers, whose statistics cover whole tensors. Use "
            "--mesh=data:... alone."
        )
    if type(optimizer) not in (*ELEMENTWISE, *(WHOLE_TENSORS if deals_out else ())):
        names = ", ".join(sorted(kind.__name__.lower() for kind in ELEMENTWISE))
        raise ConfigError(
            f"--mesh: {type(optimizer).__name__} needs whole tensors, but they are divided over devices. Use an "
            f"elementwise optimizer ({names}), or --mesh=data:... alone."
        )
    if optimizer.clipnorm or optimizer.global_clipnorm:
        raise ConfigError(
            f"--mesh: clipnorm and global_clipnorm of {type(optimizer).__name__} would apply to the part of one "
            "device. Use --clip_norm, which clips by the norm of the whole gradient."
        )


def _describe(model: keras.Model, axis: ModelAxis, layouts: Layouts, splits: Mapping[int, Split]) -> str:
    weights = model.trainable_variables
    whole = whole_elements(weights)
    parts = [(math.prod(each.shape), splits[id(each)].part_shape(each.shape)) for each in weights if id(each) in splits]
    own = whole - sum(elements - math.prod(part) for elements, part in parts)
    ways = [layout.way for _, layout in layouts.values()]
    counts = ", ".join(f"{ways.count(way)} {way}" for way in WAYS if way in ways)
    return (
        f"model axis: each of {axis.size} devices has {own:,} of {whole:,} trainable weights "
        f"({own / max(whole, 1):.0%}); layers divided: {counts}"
    )


def _log_undivided(model: keras.Model, indivisible: Sequence[Indivisible], splits: Mapping[int, Split]) -> None:
    """Names layers that automatic rules would divide if the size of the axis fitted, and the weights that stay whole
    because of it."""
    total = whole_elements(model.trainable_variables)
    by_reason: dict[tuple[str, str], list[Indivisible]] = {}
    for each in indivisible:
        by_reason.setdefault((each.reason, each.fitting), []).append(each)
    for (reason, fitting), group in by_reason.items():
        weights = {id(weight): weight for each in group for layer in each.layers for weight in layer.trainable_weights}
        kept = sum(math.prod(weight.shape) for key, weight in weights.items() if key not in splits)
        if not kept:  # they are divided in another way
            continue
        _log.warning(
            "model axis: %s: %s, so %s of the trainable weights (%.0f%%) stay whole on every device. %s",
            listed([each.path for each in group], _NAMED),
            reason if group[0].fits else f"{reason}, not a multiple of {group[0].size}",
            f"{kept:,}",
            100 * kept / max(total, 1),
            fitting,
        )

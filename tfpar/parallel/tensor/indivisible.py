"""Layers whose heads or units the model axis cannot divide into equal parts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

from tfpar.parallel.tensor.experts import units_of
from tfpar.parallel.tensor.ways import COLUMN, EXPERTS, ROW, layout_of, parse_way, weight_of

import keras

_SHOWN = 8  # sizes in a message
_PROJECTION = 3  # number of dims of a kernel with a dim of heads


class Count(NamedTuple):
    """The heads or units of a layer, which must be shared equally by the devices.

    Attributes:
      layer: Name of the layer.
      number: Number of heads or units.
      noun: "heads" or "units".
    """

    layer: str
    number: int
    noun: str


@dataclasses.dataclass(frozen=True, eq=False)
class Indivisible:
    """Layers that can only be divided together, but not over a model axis of this size.

    Attributes:
      layer: The layer that they belong to, such as an attention layer; or the first of them.
      layers: The layers that have weights.
      counts: The heads or units of the layers that have them.
      size: Number of devices on the model axis.
      obstacle: What is in the way at any size, such as weights of a kind that is not known; empty if only numbers are.
    """

    layer: keras.layers.Layer
    layers: tuple[keras.layers.Layer, ...]
    counts: tuple[Count, ...]
    size: int
    obstacle: str = ""

    @classmethod
    def of(
        cls, owner: keras.layers.Layer, ways: Mapping[keras.layers.Layer, str], size: int, obstacle: str = ""
    ) -> Indivisible:
        """Describes layers of which at least one cannot be divided in its way, see `layout_of`; or with an obstacle."""
        counts = [count for layer, way in ways.items() if (count := _count(layer, way))]
        return cls(owner, tuple(layer for layer in ways if layer.weights), tuple(counts), size, obstacle)

    @property
    def fits(self) -> bool:
        """Whether the size divides all heads and units, so that something else is in the way."""
        return bool(self.obstacle) or all(count.number % self.size == 0 for count in self.counts)

    @property
    def path(self) -> str:
        """Path of the layer."""
        return self.layer.path or self.layer.name

    @property
    def reason(self) -> str:
        """The heads or units that are not divisible, e.g. "3 heads"; or that the weights cannot be divided at all."""
        if self.obstacle:
            return self.obstacle
        wrong = [count for count in self.counts if count.number % self.size]
        if not wrong:
            return (
                "weights that cannot be cut in this way: a constraint, an activity regularizer, quantised values, or a "
                "function of all outputs"
            )
        heads = {count.number for count in self.counts if count.noun == "heads"}
        texts: dict[str, list[str]] = {}
        for count in wrong:
            texts.setdefault(f"{count.number} {count.noun}", []).append(count.layer)
        of_one_kind = len(heads) == 1 or len(self.counts) == 1
        return ", ".join(
            text if of_one_kind and text.endswith("heads") else f"{text} ({', '.join(names)})"
            for text, names in texts.items()
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """The smallest sizes of the axis above 1 that divide all of them."""
        common = math.gcd(*(count.number for count in self.counts)) if self.counts else 1
        return tuple(size for size in range(2, common + 1) if common % size == 0)[:_SHOWN]

    @property
    def fitting(self) -> str:
        """A sentence with the sizes that would fit."""
        if self.fits:
            return "No size of the model axis divides them."
        if not self.sizes:
            return "No size of the model axis above 1 divides all of them."
        *others, last = map(str, self.sizes)
        return f"A model axis of {', '.join(others)}{' or ' * bool(others)}{last} devices divides them."


def _count(layer: keras.layers.Layer, way: str) -> Count | None:
    """Returns the heads or units of a layer; None if it is divided by neither, or is not divisible at any size."""
    kind, groups, heads = parse_way(way)
    if kind == EXPERTS:
        return Count(layer.name, units_of(layer), "units") if units_of(layer) else None
    if kind not in (COLUMN, ROW):
        return None
    if heads:
        return Count(layer.name, heads, "heads")
    layout = layout_of(layer, way, 1)
    if layout is None:
        return None
    shape = weight_of(layer, "kernel").shape
    units = shape[layout.splits["kernel"].axis] // groups
    return Count(layer.name, units, "heads" if len(shape) == _PROJECTION else "units")

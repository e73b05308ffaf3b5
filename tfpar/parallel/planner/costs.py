"""The costs of the layers of a model, as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weight:
    """A variable of the model, or a device's part of it.

    Attributes:
      index: Identifies the variable; layers that share a variable have the same index.
      size: Bytes on a device.
      trainable: Whether it is trained.
      divided: Whether this is a part.
    """

    index: int
    size: int
    trainable: bool = True
    divided: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerCost:
    """One layer of the graph, in a forward and a backward pass on one device.

    Attributes:
      name: Its path.
      flops: FLOPs of its matrix products and convolutions in the forward pass, for an example.
      kept: Bytes of activations that it keeps for the backward pass, for an example.
      kept_recomputed: The same where `--recompute=blocks` computes activations again.
      recomputed: Whether `--recompute=blocks` calls this layer again.
      sums: Bytes that it sums or gathers over the model axis for an example, a number for each call: those of the
        forward pass and those of the backward pass.
      weights: Its variables.
    """

    name: str
    flops: float
    kept: float = 0.0
    kept_recomputed: float = 0.0
    recomputed: bool = False
    sums: tuple[float, ...] = ()
    weights: tuple[Weight, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelCosts:
    """A model.

    Attributes:
      name: Its name.
      layers: The layers in the order in which they run, by the size of the model axis: 1, and each size over which the
        model can be divided. All sizes have the same layers.
      cut_costs: The cost of each layer that a cut into stages should balance.
      crossing: Bytes per example that cross a cut before each layer; negative where no cut is allowed, empty if the
        model cannot be cut.
      bytes_per_value: Bytes of one value of the activations that are sent.
      undivided: Why the model cannot be divided over other sizes of the model axis, by size.
      uncut: Why the model cannot be cut.
    """

    name: str
    layers: Mapping[int, tuple[LayerCost, ...]]
    cut_costs: Sequence[int] = ()
    crossing: Sequence[int] = ()
    undivided: Mapping[int, str] = dataclasses.field(default_factory=dict)
    uncut: str = ""

    @property
    def whole(self) -> tuple[LayerCost, ...]:
        """The layers of a model that is not divided."""
        return self.layers[1]

    @property
    def flops(self) -> float:
        """FLOPs of a forward pass, for an example."""
        return sum(layer.flops for layer in self.whole)

    @property
    def parameters(self) -> int:
        """Bytes of all weights."""
        return sum(weight.size for weight in distinct(self.whole))


def distinct(layers: Sequence[LayerCost]) -> list[Weight]:
    """The weights of layers, each once."""
    return list({weight.index: weight for layer in layers for weight in layer.weights}.values())

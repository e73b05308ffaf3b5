"""What the layers of a model cost, as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weight:
    """A variable of the model, or a device's part of it.

    Attributes:
      index: Which one; layers that share it name the same.
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
      recomputed: Whether that calls this layer again.
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
      layers: By number of devices on the model axis, in the order in which they run: 1, and what the model can be
        divided over. All have the same layers.
      cut_costs: What a cut into stages is to make even: a number for each layer.
      crossing: Bytes that cross a cut in front of each layer, for an example; negative where none may be, empty where
        the model cannot be cut.
      bytes_per_value: Of activations that travel.
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

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
      state: Bytes of the optimizer's state for it on a device.
      trainable: Whether it is trained.
      divided: Whether this is a part.
      assigned: Whether the forward pass assigns it, although it is trained, as `SpectralNormalization` does.
    """

    index: int
    size: int
    state: int = 0
    trainable: bool = True
    divided: bool = False
    assigned: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerCost:
    """One layer of the graph, in a forward and a backward pass on one device.

    Attributes:
      name: Path of the layer.
      flops: FLOPs per example of its matrix products and convolutions in the forward pass.
      kept: Bytes of activations per example that it keeps for the backward pass.
      kept_recomputed: The same with `--recompute`, which computes activations again.
      recomputed: Whether `--recompute` calls this layer again.
      kept_gathered: The same as `kept` with `--shard=weights`, which calls layers that gather weights again.
      gathers: Whether `--shard=weights` calls this layer again.
      sums: Bytes per example that each call sums or gathers over the model axis, for the calls of the forward pass and
        for those of the backward pass.
      forward_sums: Those of the forward pass.
      weights: The variables of the layer.
    """

    name: str
    flops: float
    kept: float = 0.0
    kept_recomputed: float = 0.0
    recomputed: bool = False
    kept_gathered: float = 0.0
    gathers: bool = False
    sums: tuple[float, ...] = ()
    forward_sums: tuple[float, ...] = ()
    weights: tuple[Weight, ...] = ()

    @property
    def assigns(self) -> bool:
        """Whether the forward pass assigns any of its weights that are trained."""
        return any(weight.assigned for weight in self.weights)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelCosts:
    """The costs of a model.

    Attributes:
      name: Name of the model.
      layers: For each size of the model axis (1, and the sizes over which the model can be divided), the layers in the
        order in which they run. All sizes have the same layers.
      cut_costs: The cost of each layer that a cut into stages should balance.
      crossing: Bytes per example that cross a cut before each layer; negative where no cut is allowed, empty if the
        model cannot be cut.
      bytes_per_value: Bytes of one value of the activations that are sent.
      undivided: For each other size of the model axis, the reason why the model cannot be divided over it.
      uncut: The reason why the model cannot be cut; empty if it can.
      kept_whole: The reason why a run would refuse `--recompute` for the model; empty if it would not.
      example: Bytes of the inputs of an example.
    """

    name: str
    layers: Mapping[int, tuple[LayerCost, ...]]
    cut_costs: Sequence[int] = ()
    crossing: Sequence[int] = ()
    undivided: Mapping[int, str] = dataclasses.field(default_factory=dict)
    uncut: str = ""
    kept_whole: str = ""
    example: int = 0

    @property
    def whole(self) -> tuple[LayerCost, ...]:
        """The layers of the undivided model."""
        return self.layers[1]

    @property
    def flops(self) -> float:
        """FLOPs of a forward pass per example."""
        return sum(layer.flops for layer in self.whole)

    @property
    def parameters(self) -> int:
        """Bytes of all weights."""
        return sum(weight.size for weight in distinct(self.whole))


def distinct(layers: Sequence[LayerCost]) -> list[Weight]:
    """Returns the weights of layers, each once."""
    return list({weight.index: weight for layer in layers for weight in layer.weights}.values())


def state_of(weights: Sequence[Weight]) -> int:
    """Returns the bytes of the optimizer's state for weights; frozen ones have none."""
    return sum(weight.state for weight in weights if weight.trainable)

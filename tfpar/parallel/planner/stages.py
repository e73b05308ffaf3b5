"""The stages of a model on a mesh: what each device of a replica computes, keeps, sums and sends."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

from tfpar.parallel.mesh import Mesh
from tfpar.parallel.pipeline.cuts import BY_WEIGHTS, cut_evenly, micro_batches_in_flight
from tfpar.parallel.pipeline.turns import FORWARD, turns
from tfpar.parallel.planner.costs import LayerCost, ModelCosts, Weight
from tfpar.parallel.planner.machine import OPS, PROGRAM
from tfpar.parallel.planner.plan import Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Again:
    """What a stage does if its backward pass calls some layers again, or none; numbers are per example.

    Attributes:
      flops: FLOPs that are computed again.
      kept: Bytes of activations that are kept nevertheless.
      largest: Bytes of the activations of the largest layer that is called again.
      sums: Bytes of each call along the model axis that is made again.
    """

    flops: float
    kept: float
    largest: float
    sums: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """Consecutive layers; numbers are per example unless stated otherwise.

    Attributes:
      flops: FLOPs of a forward pass.
      kept: Bytes of activations.
      recomputing: What it does with `--recompute`.
      gathering: What it does with `--shard=weights`.
      most_gathered: The most bytes of a layer's whole trainable weights, their gradients, and those of the layer behind
        it, which are still on their way to the owners of shards; not per example.
      sums: Bytes of each call along the model axis.
      received: Bytes that cross the cut before the stage.
    """

    flops: float
    kept: float
    recomputing: Again
    gathering: Again
    most_gathered: int
    sums: tuple[float, ...]
    received: float

    def again(self, plan: Plan) -> Again:
        """Returns what the stage does again in the backward pass of a plan."""
        if plan.shard != "weights":
            return self.recomputing if plan.recompute != "none" else Again(flops=0.0, kept=self.kept, largest=0.0)
        if plan.recompute == "none":
            return self.gathering
        both = self.recomputing, self.gathering  # layers that gather weights outside of blocks become blocks
        return Again(
            flops=max(each.flops for each in both),
            kept=min(each.kept for each in both),
            largest=max(each.largest for each in both),
            sums=max((each.sums for each in both), key=sum),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replica:
    """The stages of a replica, assigned in turn to the devices of the pipeline axis.

    Attributes:
      stages: All stages, in order.
      devices: Number of devices on the pipeline axis.
      weights: The variables of each of these devices.
      here: Number of these devices on each worker, if the pipeline spans several workers; otherwise 0.
    """

    stages: Sequence[Stage]
    devices: int
    weights: Sequence[Sequence[Weight]]
    here: int = 0

    def way_of_update(self, shard: str) -> str:
        """How the optimizer's update runs if XLA compiles it where it can: not where one program would have to update
        the variables of several stages, see `Program.compiles_update`.

        Args:
          shard: A value of `--shard`; the share of each device is updated by a program of its own.
        """
        return PROGRAM if self.devices == 1 or self.here == 1 or shard != "none" else OPS

    def of_device(self, device: int) -> Sequence[Stage]:
        """Returns the stages of one device."""
        return self.stages[device :: self.devices]

    def in_flight(self, stage: int, micro_batches: int, schedule: str) -> int:
        """Returns the number of micro-batches whose activations a stage keeps at once."""
        if len(self.stages) == 1:
            return 1
        if self.here:
            place, workers = stage % self.devices // self.here, self.devices // self.here
            chunks = len(self.stages) // self.devices
            return _in_flight_on_worker(place, workers, micro_batches, schedule, chunks)[stage // self.devices]
        limit = micro_batches_in_flight(stage, len(self.stages), self.devices, schedule)
        return micro_batches if limit is None else min(limit, micro_batches)


@functools.cache
def _in_flight_on_worker(place: int, workers: int, micro_batches: int, schedule: str, chunks: int) -> list[int]:
    """Returns the most micro-batches that each chunk of a worker keeps at once; arguments as of `turns`."""
    if chunks == 1:
        limit = micro_batches_in_flight(place, workers, workers, schedule)
        return [micro_batches if limit is None else min(limit, micro_batches)]
    now, most = [0] * chunks, [0] * chunks
    for kind, _, chunk in turns(place, workers, micro_batches, schedule, chunks):
        now[chunk] += 1 if kind == FORWARD else -1
        most[chunk] = max(most[chunk], now[chunk])
    return most


def replica_of(
    model: ModelCosts, mesh: Mesh, stages_per_device: int = 1, stage_balance: str = "flops", *, here: int = 0
) -> Replica | None:
    """Returns the stages of a model on a mesh; None if it cannot be cut or divided in this way.

    Args:
      model: The model.
      mesh: The mesh; the size of its model axis must be a key of `model.layers`.
      stages_per_device: Number of stages per device of a pipeline.
      stage_balance: The quantity that stages share equally, see `--stage_balance`.
      here: See `Replica`.
    """
    layers = model.layers.get(mesh.model)
    if layers is None:
        return None
    number = mesh.pipeline * (stages_per_device if mesh.pipeline > 1 else 1)
    cuts: list[int] | None = []
    if number > 1:
        # A run cuts the whole model, and divides its layers afterwards.
        sizes = [{weight.index: weight.size for weight in layer.weights} for layer in model.whole]
        balanced = sizes if stage_balance == BY_WEIGHTS else None
        cuts = cut_evenly(model.cut_costs, model.crossing.__getitem__, number, balanced) if model.crossing else None
    if cuts is None:
        return None
    bounds = [0, *cuts, len(layers)]
    seen: set[tuple[int, int]] = set()  # a weight that two stages share belongs to the first of each worker
    weights: list[list[Weight]] = [[] for _ in range(mesh.pipeline)]
    stages = []
    for number, (start, end) in enumerate(itertools.pairwise(bounds)):
        stages.append(_stage(layers[start:end], model.crossing[start] if start else 0.0))
        place = number % mesh.pipeline
        for weight in (weight for layer in layers[start:end] for weight in layer.weights):
            held = (place // here if here else 0), weight.index
            if held not in seen:
                seen.add(held)
                weights[place].append(weight)
    return Replica(stages=stages, devices=mesh.pipeline, weights=weights, here=here)


def _stage(layers: Sequence[LayerCost], received: float) -> Stage:
    recomputed = [layer.kept_recomputed if layer.recomputed else None for layer in layers]
    gathering = [layer.kept_gathered if layer.gathers else None for layer in layers]
    return Stage(
        flops=sum(layer.flops for layer in layers),
        kept=sum(layer.kept for layer in layers),
        recomputing=_again(layers, recomputed),
        gathering=_again(layers, gathering),
        most_gathered=_most_gathered([_trained(layer) for layer in layers if layer.gathers]),
        sums=tuple(size for layer in layers for size in layer.sums),
        received=received,
    )


def _again(layers: Sequence[LayerCost], kept: Sequence[float | None]) -> Again:
    """Returns the sums over layers; `kept` has what each keeps if it is called again, None for those that are not."""
    called = [layer for layer, own in zip(layers, kept, strict=True) if own is not None]
    return Again(
        flops=sum(layer.flops for layer in called),
        kept=sum(layer.kept if own is None else own for layer, own in zip(layers, kept, strict=True)),
        largest=max((layer.kept for layer in called), default=0.0),
        sums=tuple(size for layer in called for size in layer.forward_sums),
    )


def _trained(layer: LayerCost) -> int:
    return sum(weight.size for weight in layer.weights if weight.trainable)


def _most_gathered(sizes: Sequence[int]) -> int:
    """Returns `Stage.most_gathered` from the bytes of the trainable weights of each layer that gathers."""
    return max((2 * size + behind for size, behind in itertools.pairwise([*sizes, 0])), default=0)

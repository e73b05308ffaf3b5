"""Chooses the placement of replicas under a running strategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfpar.config import ConfigError
from tfpar.config.sections import TrainConfig
from tfpar.config.sections.train import AUTO_SEGMENTS
from tfpar.parallel import strategies
from tfpar.training.offload.placing import OffloadingPlacing
from tfpar.training.pipeline import PipelinePlacing
from tfpar.training.placing.base import Placing
from tfpar.training.segments.placing import SegmentedPlacing
from tfpar.training.sharding.weights import DividedGatheringPlacing, GatheringPlacing
from tfpar.training.tensor_parallel import DividedPlacing


def placing_of(
    runtime: strategies.Runtime, layout: Mapping[str, Any] | None = None, options: TrainConfig | None = None
) -> Placing:
    """The placement of the parts of replicas.

    Args:
      runtime: The running strategy.
      layout: How layers are divided over a model axis, see `find_layout`.
      options: `shard`, `jit_segments` and `offload` are used.

    Raises:
      ConfigError: There is a layout, but the mesh has no devices over which to divide layers.
    """
    mesh, options = runtime.topology.mesh, options or TrainConfig()
    sharded = options.shard != "none" and runtime.topology.replicas > 1
    if mesh.pipeline > 1 and (mesh.model > 1 or not layout):
        return PipelinePlacing(runtime, layout, sharded=sharded)
    gathers = sharded and options.shard == "weights"
    if mesh.model > 1:
        return DividedGatheringPlacing(runtime, layout) if gathers else DividedPlacing(runtime, layout)
    if layout:
        raise ConfigError("layout determines how layers are divided, but no mesh divides them. Add mesh='model:2'.")
    divides = runtime.topology.name in ("mirrored", "multi_worker") and options.shard == "none"
    if options.jit_segments > 1 or (options.jit_segments == AUTO_SEGMENTS and divides):
        return SegmentedPlacing(runtime)
    if options.offload != "none":
        return OffloadingPlacing()
    return GatheringPlacing(runtime) if gathers else Placing()

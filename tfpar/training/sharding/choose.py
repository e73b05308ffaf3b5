"""Chooses the training step with sharded state."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from tfpar.training.pipeline.over_workers import DividedOverWorkersStep, OverWorkersStep
from tfpar.training.pipeline.step import DividedPipelineStep, PipelineStep
from tfpar.training.sharding.optimizer import OwnShare
from tfpar.training.sharding.pipeline_step import (
    DividedOverWorkersScatteringStep,
    DividedOverWorkersShardedStep,
    DividedPipelineScatteringStep,
    DividedPipelineShardedStep,
    OverWorkersScatteringStep,
    OverWorkersShardedStep,
    PipelineScatteringStep,
    PipelineShardedStep,
)
from tfpar.training.sharding.step import DividedScatteringStep, DividedShardedStep, ScatteringStep, ShardedStep
from tfpar.training.step import TrainStep
from tfpar.training.tensor_parallel.step import DividedStep

_SHARDED: dict[Any, type[ShardedStep]] = {
    TrainStep: ShardedStep,
    DividedStep: DividedShardedStep,
    PipelineStep: PipelineShardedStep,
    DividedPipelineStep: DividedPipelineShardedStep,
    OverWorkersStep: OverWorkersShardedStep,
    DividedOverWorkersStep: DividedOverWorkersShardedStep,
}
_SCATTERING: dict[Any, type[ScatteringStep]] = {
    TrainStep: ScatteringStep,
    DividedStep: DividedScatteringStep,
    PipelineStep: PipelineScatteringStep,
    DividedPipelineStep: DividedPipelineScatteringStep,
    OverWorkersStep: OverWorkersScatteringStep,
    DividedOverWorkersStep: DividedOverWorkersScatteringStep,
}


def sharded_step(share: OwnShare, step: Callable[..., TrainStep]) -> Callable[..., ShardedStep]:
    """The constructor of the step for this kind of share; takes the arguments of `TrainStep`.

    Args:
      share: This worker's share.
      step: From `Placing.step_class`: the constructor of the step without shards.
    """
    kind, arguments = (step.func, step.args) if isinstance(step, functools.partial) else (step, ())
    kinds: Mapping[Any, type[ShardedStep]] = _SCATTERING if share.scatters else _SHARDED
    return functools.partial(kinds[kind], share, *arguments)

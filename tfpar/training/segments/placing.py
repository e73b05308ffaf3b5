"""Replicas on one device each, whose passes are several XLA programs."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from tfpar import models
from tfpar.config import ConfigError, ExperimentConfig
from tfpar.config.sections.train import AUTO_SEGMENTS
from tfpar.optim import keras_calls
from tfpar.parallel import strategies
from tfpar.parallel.pipeline.cuts import GPIPE, cut_evenly
from tfpar.parallel.pipeline.devices import PipelineDevices
from tfpar.process.activity import activity
from tfpar.training.core import Core
from tfpar.training.model import recompute
from tfpar.training.model.support import known_summary
from tfpar.training.pipeline.graph import costs_of, crossing_elements, steps_of
from tfpar.training.pipeline.stage_program import Stage, stages_of
from tfpar.training.pipeline.stages import Pipeline
from tfpar.training.pipeline.step import PipelineCore
from tfpar.training.placing.base import Placing
from tfpar.training.segments.check import model_obstacle
from tfpar.training.segments.choose import chosen_for
from tfpar.training.segments.step import SegmentedStep
from tfpar.training.step import TrainStep

import keras

_log = logging.getLogger(__name__)


class SegmentedPlacing(Placing):
    """The stages of a pipeline, all of which are on the one device of a replica: each is a separate program.

    Args:
      runtime: The running strategy.
    """

    in_segments = True
    own_step = "--jit_segments"
    core_class: type[Core] = PipelineCore

    def __init__(self, runtime: strategies.Runtime) -> None:
        self._runtime = runtime
        self._devices = PipelineDevices(runtime.strategy.extended.worker_devices, 1)
        self._pipeline: Pipeline | None = None

    def place(self, model: keras.Model, config: ExperimentConfig, *, announced: bool) -> models.ModelSummary | None:
        """See `Placing`."""
        if config.train.jit_segments == AUTO_SEGMENTS and self._chosen(model, config, announced=announced) == 1:
            return None
        summary = known_summary(model)
        graph = keras_calls.graph_of(model)
        stages = segments_of(model, self.segments or config.train.jit_segments)
        recomputes = config.train.recompute != recompute.NONE and keras_calls.runs_graph_otherwise(graph)
        self._pipeline = Pipeline(model, stages, self._devices, GPIPE, recompute=recomputes, option="--jit_segments")
        keras_calls.replace_graph_run(graph, self._pipeline.run)
        if announced:
            named = [next(step.name for step in stage.steps if step.operation is not None) for stage in stages]
            _log.info("forward and backward pass in %d segments, from %s", len(stages), ", ".join(named))
        return summary

    def _chosen(self, model: keras.Model, config: ExperimentConfig, *, announced: bool) -> int:
        """Chooses the number of segments. If it is 1, the replica is as without segments."""
        with activity("measuring for --jit_segments=auto", shown=announced):
            choice = chosen_for(model, config, self._runtime)
        self.segments = choice.segments
        if self.segments == 1:
            self.in_segments, self.core_class = False, Core
        if announced:
            _log.info("jit_segments auto: %d (%s)", choice.segments, choice.reason)
        return self.segments

    def step_class(self, model: keras.Model) -> Callable[..., TrainStep]:
        """See `Placing`."""
        if self._pipeline is None:
            return super().step_class(model)
        return functools.partial(SegmentedStep, self._pipeline)


def segments_of(model: keras.Model, number: int) -> list[Stage]:
    """The segments that a model is cut into, each of about the same cost.

    Args:
      model: A built functional model.
      number: The number of segments.

    Raises:
      ConfigError: The model cannot be cut, or not into this number of segments.
    """
    flag = f"--jit_segments={number}"
    if found := model_obstacle(model):
        raise ConfigError(f"{flag}: model {model.name!r} {found.reason}. {found.remedy}")
    graph: Any = keras_calls.graph_of(model)
    steps = steps_of(graph)
    costs = costs_of(model, graph, steps)
    cuts = cut_evenly(costs.flops, crossing_elements(graph, steps, costs).__getitem__, number)
    if cuts is None:
        names = dict.fromkeys(step.name for step in steps if step.operation is not None)
        raise ConfigError(
            f"{flag}: model {model.name!r} has {len(names)} layers in its graph ({', '.join(names)}), too few for "
            f"{number} segments. Use fewer."
        )
    return stages_of(graph, steps, cuts, 1)

"""A model whose layers are divided among the devices of a pipeline."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tfpar.config import ConfigError, ExperimentConfig, StrategyConfig
from tfpar.optim import keras_calls
from tfpar.optim.keras_internals import is_seed_state
from tfpar.parallel.division import Split
from tfpar.parallel.held import Held
from tfpar.parallel.model_axis import ModelAxis
from tfpar.parallel.pipeline.cuts import BY_WEIGHTS, cut_at, cut_evenly
from tfpar.parallel.pipeline.devices import PipelineDevices
from tfpar.parallel.replica_peers import ReplicaPeers
from tfpar.parallel.split import hold, move_to_devices, whole_elements
from tfpar.training.core import Core
from tfpar.training.model import recompute
from tfpar.training.model.adapting import all_weights
from tfpar.training.pipeline.between_workers import PipelineWorker
from tfpar.training.pipeline.graph import GraphStep, StepCosts, beginnings_of, costs_of, crossing_elements, steps_of
from tfpar.training.pipeline.replica_sums import ReplicaSums, check_synchronized
from tfpar.training.pipeline.stage_program import Stage, stages_of
from tfpar.training.pipeline.stages import Pipeline
from tfpar.training.tensor_parallel.model import divide_layers

import keras
import tensorflow as tf

_log = logging.getLogger(__name__)


def make_pipeline(
    model: keras.Model,
    devices: PipelineDevices,
    experiment: ExperimentConfig,
    *,
    axis: ModelAxis | None = None,
    rules: Mapping[str, Any] | None = None,
    worker: PipelineWorker | None = None,
    layer_peers: ReplicaPeers | None = None,
    sums: ReplicaSums | None = None,
    announced: bool,
) -> Pipeline:
    """Cuts a model that was built on the host into stages, and moves each to its device. Call it under the strategy.

    Args:
      model: Its variables are replaced by ones on the devices, and calls of it may run in stages.
      devices: The devices. Their `creating` must be open, outside the strategy's scope.
      experiment: The options for cuts and the schedule. Its `--recompute` has been applied to the model.
      axis: If layers are divided as well, the devices that divide them.
      rules: How layers are divided, see `find_layout`.
      worker: If the pipeline spans several workers, this worker.
      layer_peers: If several workers divide the layers of a stage, those that have the same stage as this worker.
      sums: If several replicas synchronise batch statistics, the sums over them.
      announced: Whether to log the stages.

    Raises:
      ConfigError: The model cannot be cut.
    """
    config = experiment.strategy
    if tf.distribute.get_strategy().num_replicas_in_sync > 1:
        check_synchronized(model, config.mesh)
    graph = keras_calls.graph_of(model)
    if graph is None:
        raise ConfigError(
            f"--mesh={config.mesh}: model {model.name!r} has its own call method, not a graph of layers, so it cannot "
            "be cut into stages. Build it with the functional API or as a Sequential, or use --mesh=model:..."
        )
    steps = steps_of(graph)
    costs = costs_of(model, graph, steps)
    places = devices.places * (worker.peers.size if worker else 1)
    cuts = _cuts(model, graph, steps, costs, places * config.stages_per_device, config)
    stages = stages_of(graph, steps, cuts, places)
    recomputes = experiment.train.recompute != recompute.NONE and keras_calls.runs_graph_otherwise(graph)
    pipeline = Pipeline(
        *(model, stages, devices, config.pipeline_schedule), recompute=recomputes, axis=axis, worker=worker, sums=sums
    )
    keras_calls.replace_graph_run(graph, pipeline.run)
    if announced:
        _announce(stages, costs, places, experiment.train.accumulate_steps, worker)
    splits = _divided(model, axis, rules, stages, config, announced=announced) if axis else {}
    if worker:
        _hold_own(model, stages, worker, layer_peers, splits)
        return pipeline
    place_by_variable = _places(stages)
    for variable in model.variables:
        move_to_devices(variable, splits.get(id(variable)), place_by_variable.get(id(variable), 0))
    return pipeline


def _divided(
    model: keras.Model,
    axis: ModelAxis,
    rules: Mapping[str, Any] | None,
    stages: Sequence[Stage],
    config: StrategyConfig,
    *,
    announced: bool,
) -> dict[int, Split]:
    """Divides the layers; tensors that cross to another stage are whole."""
    crossing = {tensor for stage in stages for tensor in stage.given}
    sequence_parallel = config.sequence_parallel
    return divide_layers(model, axis, rules, sequence_parallel=sequence_parallel, whole=crossing, announced=announced)


def _hold_own(
    model: keras.Model,
    stages: Sequence[Stage],
    worker: PipelineWorker,
    layer_peers: ReplicaPeers | None,
    splits: Mapping[int, Split],
) -> None:
    """Keeps the variables of this worker's stages, or parts of them, and only the names of the others.

    Raises:
      ConfigError: Stages of several workers would change the same statistics.
    """
    weights = {id(variable) for variable in all_weights(model)}
    for variable in model.variables:
        using = [stage for stage in stages if any(each is variable for each in stage.variables)]
        ranks = sorted({worker.of_stage(stage) for stage in using}) or [0]
        own = [stage.place % worker.places for stage in using if worker.has(stage)]
        if is_seed_state(variable):  # every step derives them again
            ranks = list(range(worker.peers.size))
        elif len(ranks) > 1 and id(variable) not in weights:
            raise ConfigError(
                f"--mesh: stages of several workers call the layer of {variable.path!r}, and each of these workers "
                "would change its own copy. Cut the model elsewhere with --stages, so that all calls are on one "
                "worker, or use a pipeline within a worker."
            )
        held = Held(tuple(variable.shape), tuple(ranks), worker.peers, splits.get(id(variable)), layer_peers)
        hold(variable, held, own[0] if own else 0)


def check_pipeline(core: Core) -> None:
    """Refuses models that stages do not support.

    Raises:
      ConfigError: With what to use.
    """
    if core.overwritten:
        raise ConfigError(
            f"--mesh: model {core.model.name!r} has float8 layers, which stages of a pipeline cannot train yet. Use "
            "--mesh=data:... alone."
        )


def _cuts(
    model: keras.Model,
    graph: Any,
    steps: Sequence[GraphStep],
    costs: StepCosts,
    number: int,
    config: StrategyConfig,
) -> list[int]:
    if config.stages:
        return cut_at(config.stages, beginnings_of(steps), number)
    sizes = [{id(each): math.prod(each.shape) for each in step.variables} for step in steps]
    weights = sizes if config.stage_balance == BY_WEIGHTS else None
    cuts = cut_evenly(costs.flops, crossing_elements(graph, steps, costs).__getitem__, number, weights)
    if cuts is None:
        names = dict.fromkeys(step.name for step in steps if step.operation is not None)
        raise ConfigError(
            f"--mesh={config.mesh}: model {model.name!r} has {len(names)} layers in its graph ({', '.join(names)}), "
            f"too few for {number} stages. Use fewer."
        )
    return cuts


def _places(stages: Sequence[Stage]) -> dict[int, int]:
    """The place of each variable, by its identity: that of the first stage whose layers have it."""
    places: dict[int, int] = {}
    for stage in stages:
        for variable in stage.variables:
            places.setdefault(id(variable), stage.place)
    return places


def _announce(
    stages: Sequence[Stage], costs: StepCosts, places: int, micro_batches: int, worker: PipelineWorker | None
) -> None:
    total, start = sum(costs.flops), 0
    lines = []
    for stage in stages:
        share = sum(costs.flops[start : start + len(stage.steps)]) / max(total, 1)
        weights = {id(each): each for each in stage.variables if each.trainable}
        named = [step.name for step in stage.steps if step.operation is not None]
        sends = sum(costs.elements.get(each, 0) for each in stage.made) if stage is not stages[-1] else 0
        start += len(stage.steps)
        lines.append(
            f"  stage {stage.number} on {_where(stage, worker)}: {named[0]} .. {named[-1]}, {share:.0%} of the FLOPs, "
            f"{whole_elements([*weights.values()]):,} weights"
            + (f", sends {sends:,} values per example" if sends else "")
        )
    lines.append("  " + _busy(len(stages), places, micro_batches))
    _log.info("pipeline of %d stages\n%s", len(stages), "\n".join(lines))


def _where(stage: Stage, worker: PipelineWorker | None) -> str:
    if worker is None:
        return f"device {stage.place}"
    device = f", device {stage.place % worker.places}" if worker.places > 1 else ""
    number = worker.number_of(worker.of_stage(stage))
    first = number // worker.step * worker.step
    several = f"workers {first} to {first + worker.step - 1}"
    return f"{several if worker.step > 1 else f'worker {number}'}{device}"


def _busy(stages: int, places: int, micro_batches: int) -> str:
    """The largest share of the time for which a device can be busy, and how to increase it."""

    def share(count: int) -> float:
        turns = count * (stages // places)
        return turns / (turns + places - 1)

    noun = "micro-batch keeps" if micro_batches == 1 else "micro-batches keep"
    text = f"{micro_batches} {noun} a device busy for at most {share(micro_batches):.0%} of a step"
    more = 4 * places
    return text if micro_batches >= more else f"{text}; --accumulate_steps={more} for {share(more):.0%}"

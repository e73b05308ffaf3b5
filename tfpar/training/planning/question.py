"""The question for the planner, from the options of an experiment."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

from tfpar.collectives.cost_model import COPYING, Link
from tfpar.config import ConfigError, ExperimentConfig, OuterConfig
from tfpar.config.sections import TrainConfig
from tfpar.config.sections.train import AUTO_SEGMENTS
from tfpar.exchange import spec as specs
from tfpar.parallel.mesh import AUTO, parse_sizes
from tfpar.parallel.planner.costs import ModelCosts
from tfpar.parallel.planner.machine import Machine
from tfpar.parallel.planner.plan import Plan
from tfpar.parallel.planner.search import Question
from tfpar.parallel.planner.step_time import Exchange
from tfpar.parallel.topology import Topology
from tfpar.training.placing.check import check_on_topology
from tfpar.training.planning.facts import Facts
from tfpar.training.uneven_batches import train_input

# Exchanges that `--exchange=auto` may choose, as far as they are known before it measures.
_CODECS = ("none", "bf16", "int8")
# Batches that a step has at once, the current and the next one, beside those that are prepared in a CPU's memory.
_BATCHES_OF_STEP = 2


def question_of(
    config: ExperimentConfig,
    facts: Facts,
    machine: Machine,
    *,
    given: Mapping[str, object] | None = None,
    keeps_exchange: bool = False,
    device_type: str = "CPU",
    kept_examples: int = 0,
) -> Question:
    """The situation for which plans are sought.

    Args:
      config: The experiment. Of the options that a plan decides, those with default values are free.
      facts: Facts about its model.
      machine: Devices and links.
      given: Options that must keep their values even if these are the defaults.
      keeps_exchange: Whether `--exchange` keeps its value, even `auto`, with which a run takes the fastest.
      device_type: `CPU` or `GPU`.
      kept_examples: Bytes that the source of the examples keeps in the memory of each worker.
    """
    train, strategy, given = config.train, config.strategy, given or {}
    shards = next(each.metadata["choices"] for each in dataclasses.fields(TrainConfig) if each.name == "shard")

    def choices(name: str, value: str, possible: tuple[str, ...]) -> tuple[str, ...]:
        return (value,) if value != "none" or name in given else possible

    fixed_micro_batches = train.accumulate_steps if train.accumulate_steps > 1 or "accumulate_steps" in given else 0
    return Question(
        model=facts.costs,
        machine=machine,
        batch=config.input.global_batch_size,
        uneven_batches=train_input(config).uneven_batches,
        outer_per_weight=_outer_per_weight(config.outer),
        recomputes=choices("recompute", train.recompute, ("none", "blocks")),
        shards=choices("shard", train.shard, shards),
        exchanges=exchanges_of(config, keeps=keeps_exchange),
        micro_batches=fixed_micro_batches,
        meshes={} if strategy.mesh == AUTO else parse_sizes(strategy.mesh),
        schedule=strategy.pipeline_schedule,
        stages_per_device=strategy.stages_per_device,
        stage_balance=strategy.stage_balance,
        compiled=facts.compiled,
        compiles_update=facts.compiles_update,
        in_groups=facts.in_groups,
        batches=_BATCHES_OF_STEP + (config.input.prefetch if machine.shares_memory else 0),
        kept_examples=kept_examples,
        refusal=_refusals(config, facts, machine, device_type),
    )


def exchanges_of(config: ExperimentConfig, *, keeps: bool = False) -> tuple[Exchange, ...]:
    """The exchanges to consider: the given one, or for `auto`, unless it is kept, those that it may choose."""
    text = config.exchange.exchange
    every = max(config.outer.local_steps, 1)  # of a length that is measured, nothing is known
    if text.partition(":")[0] != "auto":
        return (_exchange(text, every),)
    among = tuple(_exchange(name, every) for name in _CODECS)
    return (Exchange(text, among=among),) if keeps else among


def _exchange(text: str, every: int) -> Exchange:
    spec = specs.parse(text)
    if not spec.compresses:
        return Exchange(text, every=every)

    def seconds(elements: int, workers: int, link: Link) -> float:
        return spec.cost(elements, workers, link, COPYING).seconds

    return Exchange(text, seconds, remembers=spec.options.error_feedback, every=every)


def _outer_per_weight(outer: OuterConfig) -> int:
    """Bytes of outer weights and of the outer optimizer's state per float32 weight."""
    if not outer.uses_rounds:
        return 0
    return 4 + 4 * (2 if outer.optimizer == "adam" else outer.momentum > 0.0)


def _refusal_of_assigning(costs: ModelCosts, plan: Plan) -> str:
    """Why a run would refuse a plan for a model that assigns weights in its forward pass; empty if it would not."""
    layers = [layer for layer in costs.whole if layer.assigns]
    if plan.shard == "weights":  # refuses only what it calls again
        layers = [layer for layer in layers if layer.gathers or plan.mesh.devices_of_replica > 1]
    if not layers or (plan.shard == "none" and plan.mesh.devices_of_replica == 1):
        return ""
    divided = f"--shard={plan.shard}" if plan.mesh.devices_of_replica == 1 else f"--mesh={plan.mesh_text}"
    return (
        f"{divided}: {layers[0].name} assigns its trainable weights in the forward pass (as SpectralNormalization does)"
    )


def _refusal_by_facts(facts: Facts, plan: Plan, *, over_workers: bool) -> str:
    """Why a run would refuse a plan for this model, optimizer, objective or layout; empty if it would not.

    Args:
      facts: The facts about them.
      plan: The plan.
      over_workers: Whether it has a pipeline over several workers.
    """
    divided = plan.mesh.model > 1 or (over_workers and plan.shard == "none")
    joined = facts.joins_parts and plan.shard != "weights"  # not those of a model axis and of replicas
    if divided and not joined and not facts.elementwise:
        return "the optimizer needs whole tensors, which are divided over devices"
    if facts.clips_norms and (divided or plan.shard != "none"):
        return "clipnorm and global_clipnorm of the optimizer need whole gradients; --clip_norm works everywhere"
    if facts.own_objective and over_workers:
        return "objective=... calls the model, of which each worker of a pipeline has a part"
    if facts.has_layout and plan.mesh.model == 1:
        return "layout determines how layers are divided, but no mesh divides them"
    if facts.synchronizes and plan.shard == "weights":
        return "--shard=weights: the model synchronises batch statistics, which a second forward pass cannot repeat"
    return _refusal_of_assigning(facts.costs, plan)


def _refusals(config: ExperimentConfig, facts: Facts, machine: Machine, device_type: str) -> Callable[[Plan], str]:
    """A function that returns why a run would refuse a plan."""

    @functools.cache
    def of_layout(plan: Plan) -> str:
        mesh = plan.mesh
        spans = max(1, mesh.devices_of_replica // machine.devices)
        if reason := _refusal_by_facts(facts, plan, over_workers=mesh.pipeline > 1 and spans > 1):
            return reason
        planned = ExperimentConfig.from_flat_dict({**config.as_flat_dict(), **plan.options()})
        topology = Topology(
            name="multi_worker" if machine.workers > 1 else "mirrored",
            workers=machine.workers,
            local_replicas=max(1, machine.devices // mesh.devices_of_replica),
            replica_workers=spans,
            pipeline_devices=mesh.pipeline,
            model_devices=mesh.model,
            device_type=device_type,
        )
        try:
            check_on_topology(planned, topology)
        except ConfigError as error:
            return str(error)
        return ""

    def refusal(plan: Plan) -> str:
        if plan.recompute != "none" and facts.costs.kept_whole:
            return facts.costs.kept_whole
        # Of micro-batches, only segments know.
        micro_batches = 1 if config.train.jit_segments in (1, AUTO_SEGMENTS) else plan.micro_batches
        return of_layout(Plan(mesh=plan.mesh, shard=plan.shard, exchange=plan.exchange, micro_batches=micro_batches))

    return refusal

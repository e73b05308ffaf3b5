"""`--mesh=auto`: makes a plan for a run, the same on every worker; also checks whether a given mesh fits."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from typing import Any

from tfpar import cluster, inputs, models
from tfpar.checkpoint import checkpointer
from tfpar.checkpoint.model_files import task_spec
from tfpar.cluster import rendezvous
from tfpar.config import CUSTOM, ConfigError, ExperimentConfig
from tfpar.parallel.mesh import AUTO
from tfpar.parallel.planner.machine import Machine, parse_size
from tfpar.parallel.planner.plan import Plan
from tfpar.parallel.planner.search import Question, check_fits, search
from tfpar.parallel.planner.table import describe_machine, table
from tfpar.parallel.strategies import has_cluster
from tfpar.parallel.topology import Topology, choose_topology, without_auto
from tfpar.process.activity import activity
from tfpar.process.exit_codes import PeerLostError
from tfpar.training.optimizer_spec import OptimizerSpec
from tfpar.training.planning.facts import Build, Facts, find_facts
from tfpar.training.planning.machines import Given, between_cpus, machine_of
from tfpar.training.planning.offline import model_axis_sizes
from tfpar.training.planning.question import question_of

import keras

_log = logging.getLogger(__name__)

_CHARACTER_BYTES = 12  # the most that JSON needs for one: two escapes of a surrogate each
# The options that a plan decides; --exchange stays as given.
_DECIDED = ("mesh", "accumulate_steps", "recompute", "shard")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """The subject of a plan.

    Attributes:
      build: The model, or a function that builds it; None if it is not known yet.
      optimizer: By default the one that the configuration names.
      layout: How layers are divided, see `find_layout`.
      own_objective: Whether the objective is the user's own, which calls the model.
      kept_examples: Bytes that the source of the examples keeps in the memory of each worker, if it is known.
    """

    build: Build | keras.Model | None
    optimizer: OptimizerSpec | None = None
    layout: Mapping[str, Any] | None = None
    own_objective: bool = False
    kept_examples: int = 0

    @classmethod
    def named(cls, config: ExperimentConfig, train: inputs.AnySource | None) -> Subject:
        """The model that a configuration names, for some data."""
        if train is None or config.model.model == CUSTOM:
            return cls(build=None)
        return cls(
            build=lambda: models.build(config.model.model, task_spec(train), **config.model.arguments()),
            kept_examples=getattr(train, "kept_bytes", 0),
        )


def is_auto(config: ExperimentConfig) -> bool:
    """Whether to make a plan."""
    return config.strategy.mesh == AUTO


def planned(config: ExperimentConfig, subject: Subject) -> dict[str, Any]:
    """The options that `--mesh=auto` chooses. All workers call it, before the strategy starts.

    Args:
      config: The experiment.
      subject: Its model.

    Returns:
      The options by flag name: the chief's choice, on every worker.

    Raises:
      ConfigError: No plan fits, or the model is not known. On every worker.
      PeerLostError: A worker did not join.
    """
    topology = choose_topology(without_auto(config.strategy), cluster.detect())
    if topology.name in ("tpu", "parameter_server"):
        raise ConfigError(f"--mesh=auto does not work with --strategy={topology.name}. Leave it out.")
    if subject.build is None:
        raise ConfigError(
            "--mesh=auto counts the model before the strategy starts, and it is not known yet. Give the Trainer a "
            "function that builds it, without runtime=..., or tfpar.initialize(config, model=build)."
        )
    if topology.cluster is None or topology.workers == 1:
        return _decide(config, subject, topology)
    if has_cluster():
        raise ConfigError(
            "--mesh=auto is chosen before the strategy starts, and this process is connected to its cluster already. "
            "Give the Trainer the runtime of the first, runtime=trainer.runtime, or name its mesh."
        )
    message = ""
    if topology.is_chief:
        try:
            message = json.dumps({"options": _decide(config, subject, topology)})
        except ConfigError as error:
            message = _error_message(str(error))
    text = rendezvous.wait_for_all(topology.cluster, topology.start_timeout, message)
    if not text:  # its server answered, not the chief itself
        raise PeerLostError("the chief is already training and no longer makes plans; start all workers again")
    decision = json.loads(text)
    if "error" in decision:
        raise ConfigError(decision["error"])
    return decision["options"]


def _error_message(error: str) -> str:
    """The chief's error as a message to the other workers, which is cut to the length that they read."""
    message = json.dumps({"error": error})
    while (excess := len(message) - rendezvous.MESSAGE_BYTES) > 0:
        error = error[: -(excess // _CHARACTER_BYTES + 1)]
        message = json.dumps({"error": error})
    return message


def _decide(config: ExperimentConfig, subject: Subject, topology: Topology) -> dict[str, Any]:
    tells = config.monitor.verbose > 0
    kept = _of_saved_run(config, subject, tells)
    if kept:
        return kept
    assert subject.build is not None
    with activity("planning --mesh=auto", shown=tells):
        facts = _facts(config, subject, topology, measures=topology.device_type == "CPU", option="--mesh=auto")
        machine = _machine(config, topology, facts)
        answer = search(_question(config, subject, topology, facts, machine))
    best = answer.best
    options = {name: best.plan.options()[name] for name in _DECIDED}
    if tells:
        flags = " ".join(f"--{name}={value}" for name, value in options.items())
        _log.info("mesh auto: %s\n%s\nchosen: %s", describe_machine(machine), table(answer), flags)
    return options


def _of_saved_run(config: ExperimentConfig, subject: Subject, tells: bool) -> dict[str, Any]:
    """The plan of the run to resume; empty if there is none, if other options are given, or if the devices have
    changed."""
    workdir = config.checkpoint.workdir
    saved = checkpointer.saved_config(workdir) if workdir else None
    if saved is None:
        return {}
    options = {name: saved[name] for name in _DECIDED if name in saved}
    if reason := _contradiction(config, options, subject):
        if tells:
            _log.info("mesh auto: the plan of the run in %s does not hold (%s); making a new one", workdir, reason)
        return {}
    if tells:
        _log.info("mesh auto: --mesh=%s and the other options of the plan of the run in %s", options["mesh"], workdir)
    return options


def _contradiction(config: ExperimentConfig, options: Mapping[str, Any], subject: Subject) -> str:
    """Why a run cannot have these options of a plan: others are given, or the devices differ. Empty if it can."""
    asked, defaults = config.as_flat_dict(), ExperimentConfig().as_flat_dict()
    for name, value in options.items():
        if name != "mesh" and asked[name] not in (defaults[name], value):
            return f"--{name}={asked[name]}, not {value}"
    planned = ExperimentConfig.from_flat_dict({**asked, **options})
    try:
        choose_topology(planned.strategy, cluster.detect())
        if planned.strategy.device_memory:
            check_memory(planned, subject)
    except ConfigError as error:
        return str(error)
    return ""


def check_memory(config: ExperimentConfig, subject: Subject) -> None:
    """Refuses a mesh that does not fit in `--device_memory`, as far as the model is known.

    Raises:
      ConfigError: With what would fit.
    """
    topology = choose_topology(config.strategy, cluster.detect())
    if subject.build is None or topology.name in ("tpu", "parameter_server"):
        return
    train = config.train
    with activity("predicting memory", shown=config.monitor.verbose > 0 and topology.is_chief):
        facts = _facts(config, subject, topology, measures=False, option="--device_memory")
    plan = Plan(
        mesh=topology.mesh,
        micro_batches=train.accumulate_steps,
        recompute=train.recompute,
        shard=train.shard,
        exchange=config.exchange.exchange,
    )
    recompute = "none" if train.recompute in ("none", "blocks") else train.recompute  # the one that was counted
    anything = dataclasses.replace(
        config,
        strategy=dataclasses.replace(config.strategy, mesh=AUTO, stages=""),
        train=dataclasses.replace(train, accumulate_steps=1, recompute=recompute, shard="none"),
    )
    machine = _machine(config, topology, facts)
    check_fits(_question(anything, subject, topology, facts, machine), plan)


def _question(
    config: ExperimentConfig, subject: Subject, topology: Topology, facts: Facts, machine: Machine
) -> Question:
    return question_of(
        *(config, facts, machine),
        keeps_exchange=True,
        device_type=topology.device_type,
        kept_examples=subject.kept_examples,
    )


def _facts(config: ExperimentConfig, subject: Subject, topology: Topology, *, measures: bool, option: str) -> Facts:
    assert subject.build is not None
    sizes = model_axis_sizes(topology.local_devices, topology.workers, topology.model_devices)
    facts = find_facts(
        *(subject.build, config, sizes),
        optimizer=subject.optimizer,
        layout=subject.layout,
        most_examples=config.input.global_batch_size if measures else 0,
        devices=topology.workers * topology.local_devices,
        workers_here=topology.workers_here,
        option=option,
    )
    return dataclasses.replace(facts, own_objective=subject.own_objective, has_layout=bool(subject.layout))


def _machine(config: ExperimentConfig, topology: Topology, facts: Facts) -> Machine:
    # With `auto`, all workers are expected to be able to use what this one can.
    may_use_gloo = topology.transport == "auto" and not topology.transport_reason
    transport = "gloo" if may_use_gloo else topology.transport
    return machine_of(
        *(topology.workers, topology.local_devices, topology.device_type),
        precision=config.precision.precision,
        measured=facts.measured,
        given=Given(
            memory=parse_size(config.strategy.device_memory),
            between=None if topology.device_type == "GPU" else between_cpus(transport),
        ),
        workers_here=topology.workers_here,
    )

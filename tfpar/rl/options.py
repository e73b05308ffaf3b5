"""The configuration of reinforcement learning: what follows from other options, and what cannot work."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from tfpar.config import CUSTOM, ConfigError, ExperimentConfig, InputConfig, ReinforcementConfig
from tfpar.config.sections.reinforcement_presets import check_used, suited
from tfpar.parallel.planner.machine import format_size
from tfpar.parallel.topology import Topology
from tfpar.process.memory import main_memory
from tfpar.rl import environments
from tfpar.rl.dqn import replay_specs
from tfpar.rl.environments import AnyEnvironment, Discrete, HostEnvironment
from tfpar.training.planning.machines import device_memory

_EVALUATIONS = 10  # evaluations per run if --eval_every is not set
# Options that `complete` sets, and what to do instead of giving them.
_FOLLOWING = {
    "dataset": "Examples come from an environment: give --env.",
    "global_batch_size": "Give --replay_batch (dqn), or --environments, --rollout_steps and --minibatches.",
    "model_args": "Bind arguments to the function that builds the policy.",
}


def with_options(config: ExperimentConfig | None, options: Mapping[str, Any]) -> ExperimentConfig:
    """Returns a configuration of reinforcement learning with some options replaced.

    Without the section `reinforcement`, options that are neither given nor changed in `config` get what suits
    environment and algorithm.

    Raises:
      ConfigError: An option that does not exist, that the algorithm does not use or that follows from others, or an
        invalid value.
    """
    options = dict(options)
    if isinstance(options.get("jit_compile"), bool):
        options["jit_compile"] = str(options["jit_compile"]).lower()
    if config is not None and config.reinforcement is not None:
        whole = config.as_flat_dict() | options
        check_used(whole, options)
        merged = ExperimentConfig.from_flat_dict(whole)
        _check_following(merged, options)
        return merged
    defaults = ExperimentConfig(reinforcement=ReinforcementConfig()).as_flat_dict()
    changed = {
        name: value for name, value in (config.as_flat_dict() if config else {}).items() if value != defaults[name]
    }
    given = changed | options
    merged = ExperimentConfig.from_flat_dict(defaults | given | suited(defaults | given, given))
    _check_following(merged, given)
    return merged


def _check_following(config: ExperimentConfig, given: Mapping[str, Any]) -> None:
    """Refuses options that are given, but that `complete` would replace by something else."""
    idle = ExperimentConfig().as_flat_dict()
    following = {"dataset": CUSTOM, "global_batch_size": reinforcement_of(config).batch_size, "model_args": ""}
    for name, follows in following.items():
        if name in given and given[name] not in (idle[name], follows):
            raise ConfigError(f"--{name}={given[name]} has no effect on reinforcement learning. {_FOLLOWING[name]}")


def reinforcement_of(config: ExperimentConfig) -> ReinforcementConfig:
    """Returns the configuration's options of reinforcement learning."""
    assert config.reinforcement is not None
    return config.reinforcement


def complete(config: ExperimentConfig) -> ExperimentConfig:
    """Returns the configuration with the options that follow from others: steps, batch size and data set.

    Raises:
      ConfigError: The length of the run is not set, or set twice or in epochs.
    """
    options, train = reinforcement_of(config), config.train
    if train.epochs:
        raise ConfigError("--epochs: an environment has no epochs. Give --env_steps, or --steps.")
    steps = train.steps
    if options.env_steps:
        if steps and steps != _steps_of(options):
            raise ConfigError(
                f"--env_steps={options.env_steps} and --steps={steps} both say how long the run is. Give one of them."
            )
        steps = _steps_of(options)
    if not steps:
        raise ConfigError("how long is the run? Give --env_steps, steps of all environments together, or --steps.")
    every = train.eval_every or options.steps_per_rollout * max(1, steps // options.steps_per_rollout // _EVALUATIONS)
    return dataclasses.replace(
        config,
        train=dataclasses.replace(train, steps=steps, eval_every=every),
        input=dataclasses.replace(config.input, dataset=CUSTOM, global_batch_size=options.batch_size),
        model=dataclasses.replace(config.model, model=CUSTOM, model_args=""),
    )


def _steps_of(options: ReinforcementConfig) -> int:
    """Returns the training steps in a run of `env_steps`, rounded up to whole rollouts."""
    rollouts = -(-options.env_steps // options.transitions_per_rollout)
    return rollouts * options.steps_per_rollout


def check(config: ExperimentConfig, topology: Topology) -> None:
    """Refuses options that do not work with reinforcement learning.

    Raises:
      ConfigError: There is such an option; the message says what to do instead.
    """
    options = reinforcement_of(config)
    _check_no_input(config)
    if not topology.synchronous:
        raise ConfigError(
            "--strategy=parameter_server: its workers run steps in no fixed order, and rollouts need one. Use "
            "--strategy=one_device, mirrored or multi_worker."
        )
    if topology.mesh.devices_of_replica > 1:
        raise ConfigError(
            "--mesh: a policy must fit on one device. Leave --mesh out; --devices=N splits the environments."
        )
    for name, value, idle in (
        ("shard", config.train.shard, "none"),
        ("offload", config.train.offload, "none"),
        ("jit_segments", config.train.written_segments, 1),
    ):
        if value != idle:
            raise ConfigError(f"--{name}={value} does not work with reinforcement learning. Use --{name}={idle}.")
    if config.outer.uses_rounds:
        raise ConfigError(
            f"--local_steps={config.outer.local_steps} does not work with reinforcement learning, whose workers "
            "exchange in every step. Leave it, --round_seconds and --outer_optimizer out."
        )
    if options.environments % topology.replicas:
        raise ConfigError(
            f"--environments={options.environments} is not divisible by the {topology.replicas} replicas, which have "
            "equal shares. Choose a multiple."
        )
    if config.schedule.schedule == "plateau":
        raise ConfigError(
            "--schedule=plateau watches the loss of evaluations, and those of a policy have returns instead. Use "
            "--schedule=constant or cosine."
        )
    own = options.batch_size // topology.replicas
    if own % config.train.accumulate_steps:
        raise ConfigError(
            f"--accumulate_steps={config.train.accumulate_steps} does not divide the {own} transitions of a step on a "
            "replica. Choose a divisor, or 1."
        )


def _check_no_input(config: ExperimentConfig) -> None:
    """Refuses options about examples that are read: those of a rollout are made."""
    given = {
        **vars(config.input),
        "eval_batch_size": config.train.eval_batch_size,
        "eval_steps": config.train.eval_steps,
    }
    idle = {**vars(InputConfig()), "eval_batch_size": 0, "eval_steps": 0}
    for name, value in given.items():
        if name not in _FOLLOWING and value != idle[name]:
            text = str(value).lower() if isinstance(value, bool) else value
            raise ConfigError(
                f"--{name}={text} has no effect on reinforcement learning, whose examples come from an environment. "
                "Leave it out."
            )


def check_actions(options: ReinforcementConfig, environment: AnyEnvironment) -> None:
    """Refuses an algorithm that cannot choose such actions.

    Raises:
      ConfigError: It cannot; the message says what to do instead.
    """
    if options.algorithm == "dqn" and not isinstance(environment.actions, Discrete):
        raise ConfigError(
            f"--algorithm=dqn values actions one by one, and {environment.name} has {environment.actions.text}. Use "
            "--algorithm=ppo."
        )


def check_host(options: ReinforcementConfig, environment: AnyEnvironment, topology: Topology) -> None:
    """Refuses options that actors on the host do not support, and options of actors if there are none.

    Raises:
      ConfigError: There is such an option; the message says what to do instead.
    """
    if not isinstance(environment, HostEnvironment):
        if options.actors > 1 or options.env_processes:
            raise ConfigError(
                f"--actors={options.actors} and --env_processes={options.env_processes} apply to environments of the "
                f"host, and {environment.name} runs on the device. Leave them out, or give --env=gym:NAME."
            )
        return
    if options.env_processes and environment.name.startswith(environments.POOL_PREFIX):
        raise ConfigError(f"--env_processes: EnvPool steps {environment.name} in its own threads. Leave the flag out.")
    if topology.device_type == "TPU":
        raise ConfigError(
            f"--env={environment.name}: a step on a TPU is one program, which cannot wait for environments that run "
            "on the host. Use --strategy=one_device, mirrored or multi_worker, or an environment that runs on the "
            "device."
        )
    own = options.environments // topology.replicas
    if own % options.actors:
        raise ConfigError(
            f"--actors={options.actors} does not divide the {own} environments of a replica "
            f"(--environments={options.environments}). Choose a divisor."
        )


class Room(NamedTuple):
    """Memory for the replay of one replica.

    Attributes:
      available: Bytes; 0 if they are unknown.
      copies: How many copies of the replay are there at a time.
      use: What all copies take, and when, for a message.
      more: What there could be more of, for a message.
    """

    available: int
    copies: int
    use: str
    more: str


def rooms_for_replays(topology: Topology, *, saves: bool) -> list[Room]:
    """Returns the memories that the replay of one replica and its copies must fit in.

    Args:
      topology: The workers and devices of the run.
      saves: Whether the run writes checkpoints. A checkpoint is written from a copy in the memory of the host, while
        the policy learns on and may add a rollout.
    """
    memory = main_memory()
    of_host = memory[0] // (topology.local_replicas * topology.workers_here) if memory else 0
    if topology.device_type == "CPU":
        use = "three times that while a checkpoint is written" if saves else "twice that while a rollout is added"
        return [Room(of_host, 2 + saves, use, "machines")]
    of_device = device_memory(topology.device_type, topology.local_replicas)
    rooms = [Room(of_device, 2, "twice that while a rollout is added", "replicas")]
    if saves:
        rooms.append(Room(of_host, 1, "as much of the host's memory while a checkpoint is written", "machines"))
    return rooms


def check_replay(options: ReinforcementConfig, environment: AnyEnvironment, replicas: int, room: Room) -> None:
    """Refuses a replay that does not fit in memory, together with its copies.

    Args:
      options: The options of reinforcement learning.
      environment: The environment.
      replicas: Number of replicas of all workers, which have equal shares of the replay.
      room: The memory for the replay of one replica.

    Raises:
      ConfigError: It does not fit; the message says which size does.
    """
    if options.algorithm != "dqn" or not room.available:
        return
    rollout = options.transitions_per_rollout
    needed = bytes_of_replay(options, environment, replicas)
    rollouts = options.replay_size // rollout
    if room.copies * needed <= room.available:
        return
    largest = room.available * rollouts // (room.copies * needed) * rollout
    remedy = f"Give at most --replay_size={largest}" if largest >= 2 * rollout else "Give fewer --environments"
    raise ConfigError(
        f"--replay_size={options.replay_size}: the replay of {environment.name} takes {format_size(needed)} on each "
        f"replica, and {room.use}; {format_size(room.available)} are available for it. {remedy}, or use more "
        f"{room.more}."
    )


def bytes_of_replay(options: ReinforcementConfig, environment: AnyEnvironment, replicas: int) -> int:
    """Returns the bytes of the replay of one of several replicas, with the priorities if there are any."""
    specs = replay_specs(options, environment, options.environments // replicas)
    parts = [*specs, specs.reward] if options.replay_priority else [*specs]
    return sum(spec.shape.num_elements() * spec.dtype.size for spec in parts)

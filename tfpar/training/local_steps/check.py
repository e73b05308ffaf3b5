"""Refuses options that do not work with local steps, before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfpar import models
from tfpar.config import ConfigError, ExperimentConfig, OuterConfig
from tfpar.config.sections.outer import AUTO
from tfpar.exchange import spec as specs
from tfpar.parallel.topology import Topology


def check_local_steps(config: ExperimentConfig, topology: Topology) -> None:
    """Refuses options that do not work with local steps.

    Raises:
      ConfigError: The first of them, with what to use instead.
    """
    outer = config.outer
    outer.check_lengths()
    _check_time_share(outer)
    if not outer.uses_rounds:
        _check_unused(outer)
        return
    if outer.outer_own_share >= 0.0 and not outer.streams:
        raise ConfigError(
            f"--outer_own_share={outer.outer_own_share} has no effect: workers wait for the exchange, and continue "
            "from its result. Add --outer_fragments=4 or --outer_delay=1, or leave it out."
        )
    flag = f"--local_steps={'auto' if outer.local_steps == AUTO else outer.local_steps}"
    flag += f" --outer_optimizer={outer.outer_optimizer}" if outer.local_steps == 1 else ""
    flag = f"--round_seconds={outer.round_seconds:g}" if outer.round_seconds else flag
    if topology.name in ("parameter_server", "tpu"):
        why = (
            "has no rounds: its workers push when they are ready"
            if topology.name == "parameter_server"
            else ("moves all replicas in one program")
        )
        raise ConfigError(f"{flag} does not work with --strategy={topology.name}, which {why}. Use multi_worker.")
    _check_mesh(flag, config, topology)
    _check_stall(flag, config)
    if config.train.shard != "none":
        raise ConfigError(
            f"{flag} does not work with --shard={config.train.shard}: workers that train by themselves need all of the "
            "optimizer's state. Leave one of them out."
        )
    if config.optimizer.ema:
        raise ConfigError(
            f"{flag} does not work with --ema={config.optimizer.ema}: the averages would be of weights that one worker "
            "alone has. Leave one of them out; the outer weights are an average themselves."
        )
    spec = specs.parse(config.exchange.exchange)
    if not spec.options.sends_only_gradient:
        raise ConfigError(
            f"{flag} does not work with momentum or a ramp in --exchange={config.exchange.exchange}, which are for "
            "gradients of single steps. Use topk:SHARE alone; --outer_momentum gives rounds momentum."
        )
    options = models.options(config.model.model) if config.model.model in models.names() else {}
    if topology.data_workers > 1 and (options | config.model.arguments()).get("normalization") == "sync_batch":
        raise ConfigError(
            f"{flag} does not work with --model_args=normalization=sync_batch, which needs all workers in every step. "
            "Use normalization=batch: its statistics are averaged at the end of a round."
        )


def _check_mesh(flag: str, config: ExperimentConfig, topology: Topology) -> None:
    outer = config.outer
    if topology.replica_workers > 1 and outer.round_seconds:
        raise ConfigError(
            f"{flag} does not work with --mesh={config.strategy.mesh} on these workers: {topology.replica_workers} of "
            "them hold a replica between them and take every step together, so that none can take more than another. "
            "Use --local_steps=50."
        )
    if outer.streams and topology.mesh.devices_of_replica > 1 and topology.device_type == "GPU":
        given = {"outer_fragments": outer.outer_fragments > 1, "outer_delay": outer.outer_delay > 0}
        names = " ".join(f"--{name}={getattr(outer, name)}" for name, is_given in given.items() if is_given)
        raise ConfigError(
            f"{names} does not work with --mesh={config.strategy.mesh} on GPUs: steps communicate within a replica, "
            "and an exchange at the same time would mix its calls of NCCL with theirs. Leave one of them out."
        )


def _check_stall(flag: str, config: ExperimentConfig) -> None:
    """Refuses rounds in which a worker that waits for the others would be taken for one that hangs."""
    seconds, limit = config.outer.round_seconds, config.strategy.stall_timeout
    if 0.0 < limit <= seconds:
        raise ConfigError(
            f"{flag} does not work with --stall_timeout={limit:g}: a worker may wait for the others until the end of "
            f"a round, and would be ended as one that hangs. Give shorter rounds, or --stall_timeout={2 * seconds:g}."
        )


def _check_time_share(outer: OuterConfig) -> None:
    if outer.local_steps == AUTO or outer.outer_time_share == OuterConfig.outer_time_share:
        return
    instead = (
        f"--round_seconds={outer.round_seconds:g}" if outer.round_seconds else f"--local_steps={outer.local_steps}"
    )
    raise ConfigError(
        f"--outer_time_share={outer.outer_time_share} has no effect with {instead}: rounds have that length. Use "
        "--local_steps=auto, or leave it out."
    )


def _check_unused(outer: OuterConfig) -> None:
    given = {"outer_learning_rate": outer.outer_learning_rate > 0.0, "outer_momentum": outer.outer_momentum >= 0.0}
    given |= {"outer_own_share": outer.outer_own_share >= 0.0}
    for name in (name for name in given if given[name]):
        raise ConfigError(
            f"--{name}={getattr(outer, name)} has no effect: without local steps there is no outer optimizer. Add "
            "--local_steps=50, or leave it out."
        )


def check_resumed_rounds(saved: Mapping[str, Any], config: ExperimentConfig) -> None:
    """Refuses to resume a run with rounds if it had none, or without rounds if it had some; likewise with a delay, and
    with momentum.

    Args:
      saved: The saved options by name. The options of rounds are missing if an older version has saved them.
      config: The experiment.

    Raises:
      ConfigError: Only one of the two has rounds, a delay, or momentum; names the saved options.
    """
    steps, optimizer = saved.get("local_steps", 1), saved.get("outer_optimizer", "auto")
    seconds = saved.get("round_seconds", 0.0)
    had = steps != 1 or optimizer != "auto" or seconds > 0.0
    if had != config.outer.uses_rounds:
        raise ConfigError(
            f"--local_steps={config.outer.local_steps}: the run in {config.checkpoint.workdir} has "
            f"--local_steps={steps} --round_seconds={seconds:g} --outer_optimizer={optimizer}, and "
            "the pending residuals of its exchange are "
            f"{'movements of weights' if had else 'gradients'}. Resume it with these, or start in another --workdir "
            f"with --warm_start={config.checkpoint.workdir}."
        )
    delay, fragments = saved.get("outer_delay", -1), saved.get("outer_fragments", 1)
    streamed = fragments > 1 or delay > 0
    if fragments == config.outer.outer_fragments and streamed != config.outer.streams:
        raise ConfigError(
            f"--outer_delay={config.outer.outer_delay}: the run in {config.checkpoint.workdir} has "
            f"--outer_delay={delay}, and {'exchanges while steps run' if streamed else 'waits for each exchange'}. "
            f"Resume it with a delay {'of 1 or more' if streamed else 'of 0'}, or start in another --workdir with "
            f"--warm_start={config.checkpoint.workdir}."
        )
    if had:
        _check_resumed_momentum(saved, config)


def _check_resumed_momentum(saved: Mapping[str, Any], config: ExperimentConfig) -> None:
    """Refuses momentum where the saved outer optimizer had none, and vice versa: SGD without it has no slots."""
    name, now = "outer_momentum", config.outer
    before = saved.get(name, -1.0)
    if before < 0.0:
        before = OuterConfig(outer_optimizer=now.outer_optimizer).momentum
    if now.optimizer == "adam" or bool(before) == bool(now.momentum):
        return
    raise ConfigError(
        f"--{name}={now.momentum:g}: the run in {config.checkpoint.workdir} has --{name}={before:g}, and its outer "
        f"optimizer keeps {'movements' if before else 'no movements'} of earlier rounds. Resume it with a momentum "
        f"{'above 0' if before else 'of 0'}, or start in another --workdir with "
        f"--warm_start={config.checkpoint.workdir}."
    )

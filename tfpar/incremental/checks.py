"""The checks of incremental learning before anything starts."""

from __future__ import annotations

import dataclasses
import os

from tfpar import cluster
from tfpar.config import ConfigError, ExperimentConfig, IncrementalConfig
from tfpar.parallel.topology import Topology, choose_topology

_NEVER = 1 << 60  # steps


def check(config: ExperimentConfig, topology: Topology | None = None) -> None:
    """Refuses options that do not work with incremental learning.

    Args:
      config: The whole configuration.
      topology: The topology of the run; by default the one that follows from the configuration and the cluster.

    Raises:
      ConfigError: There is such an option; the message says what to do instead.
    """
    topology = topology or choose_topology(config.strategy, cluster.detect())
    if topology.name in ("parameter_server", "tpu"):
        raise ConfigError(
            f"--strategy={topology.name} does not work with incremental learning yet. Use one_device, mirrored or "
            "multi_worker."
        )
    watches = bool(incremental_of(config).watch)
    for name, value, idle in (
        ("mesh", config.strategy.mesh if topology.mesh.devices_of_replica > 1 else "", ""),
        ("shard", config.train.shard, "none"),
        ("local_steps", config.outer.local_steps, 1),
        ("round_seconds", config.outer.round_seconds, 0.0),
        ("warm_start", "" if watches else config.checkpoint.warm_start, ""),
        ("lora", config.train.lora, ""),
    ):
        if value != idle:
            raise ConfigError(
                f"--{name}={value} does not work with incremental learning yet, which passes whole weights from task "
                "to task. Leave it out."
            )
    if config.input.shard_by == "file":
        raise ConfigError(
            "--shard_by=file: the examples of a task or a delivery are not in the order of files. Use "
            "--shard_by=example."
        )
    if watches:
        _check_watching(config)


def incremental_of(config: ExperimentConfig) -> IncrementalConfig:
    """Returns the configuration's options of incremental learning."""
    return config.incremental or IncrementalConfig()


def watching(config: ExperimentConfig) -> ExperimentConfig:
    """Returns the configuration of the run that learns all arriving files, if `--watch` is set.

    The run has no end, and reads each example once, in the order of `OnlineLearner`.
    """
    if not incremental_of(config).watch:
        return config
    return dataclasses.replace(
        config,
        input=dataclasses.replace(config.input, cache="none", shuffle=False),
        train=dataclasses.replace(config.train, epochs=0.0, steps=_NEVER, eval_every=config.train.eval_every or _NEVER),
    )


def _check_watching(config: ExperimentConfig) -> None:
    """Refuses options that do not work with --watch."""
    options = incremental_of(config)
    if options.method not in ("finetune", "replay"):
        raise ConfigError(
            f"--method={options.method} works with --tasks, not with --watch. Use replay, which keeps examples of "
            "--dataset, or finetune."
        )
    if options.grow_head:
        raise ConfigError("--grow_head works with --tasks only: with --watch, --dataset determines the classes.")
    if config.input.remainder == "drop":
        raise ConfigError(
            "--remainder=drop: with --watch, each example is learned exactly once. Use --remainder=pad, which weights "
            "a last batch that is not full correctly."
        )
    if config.schedule.schedule != "constant":
        raise ConfigError(
            f"--schedule={config.schedule.schedule} needs the length of a run, which is not known with --watch. Use "
            "--schedule=constant, optionally with --warmup_steps."
        )
    if 0.0 < config.schedule.warmup_steps < 1.0:
        raise ConfigError(
            f"--warmup_steps={config.schedule.warmup_steps:g} is a share of a run's steps, whose number is not known "
            "with --watch. Give a number of steps, e.g. --warmup_steps=100."
        )
    if not config.checkpoint.workdir:
        raise ConfigError("--watch needs a --workdir, where it records which files were learned.")
    if not os.path.isdir(options.watch):
        raise ConfigError(f"--watch={options.watch}: no such directory. Create it first.")

"""Refuses options that do not work with optimizer state in host memory, before anything starts."""

from __future__ import annotations

from tfpar.config import ConfigError, ExperimentConfig
from tfpar.parallel.topology import Topology


def check_offload(config: ExperimentConfig, topology: Topology) -> None:
    """Refuses options that do not work with `--offload`.

    Raises:
      ConfigError: The first of them, with what to use instead.
    """
    train = config.train
    if train.offload == "none":
        return
    flag = f"--offload={train.offload}"
    if topology.name in ("parameter_server", "tpu"):
        raise ConfigError(f"{flag} does not work with --strategy={topology.name}. Leave it out.")
    if topology.mesh.devices_of_replica > 1:
        raise ConfigError(f"{flag} does not work yet with --mesh={config.strategy.mesh}. Leave one of them out.")
    if topology.local_replicas > 1:
        raise ConfigError(
            f"{flag} keeps one copy of the state in a worker, which has {topology.local_replicas} devices that would "
            "update it. Start a worker for each device (python -m tfpar.launch), or leave it out."
        )
    for name, value, idle in (
        ("shard", train.shard, "none"),
        ("jit_segments", train.written_segments, 1),
        ("ema", config.optimizer.ema, 0.0),
        ("local_steps", config.outer.local_steps, 1),
        ("round_seconds", config.outer.round_seconds, 0.0),
        ("outer_optimizer", config.outer.outer_optimizer, "auto"),
    ):
        if value != idle:
            raise ConfigError(f"{flag} does not work yet with --{name}={value}. Leave one of them out.")

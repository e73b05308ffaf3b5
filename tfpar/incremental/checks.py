"""What incremental learning refuses before anything starts."""

from __future__ import annotations

from tfpar import cluster
from tfpar.config import ConfigError, ExperimentConfig
from tfpar.parallel.topology import choose_topology


def check(config: ExperimentConfig) -> None:
    """Refuses options that do not go with tasks.

    Raises:
      ConfigError: With what to do.
    """
    topology = choose_topology(config.strategy, cluster.detect())
    if topology.name in ("parameter_server", "tpu"):
        raise ConfigError(
            f"--strategy={topology.name} does not work with incremental learning yet. Use one_device, mirrored or "
            "multi_worker."
        )
    for name, value, idle in (
        ("mesh", config.strategy.mesh if topology.mesh.devices_of_replica > 1 else "", ""),
        ("shard", config.train.shard, "none"),
        ("local_steps", config.outer.local_steps, 1),
        ("warm_start", config.checkpoint.warm_start, ""),
        ("lora", config.train.lora, ""),
    ):
        if value != idle:
            raise ConfigError(
                f"--{name}={value} does not work with incremental learning yet, whose tasks hand whole weights on. "
                "Leave it out."
            )

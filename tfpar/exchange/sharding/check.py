"""Checks, before anything starts, that the options work with sharded state."""

from __future__ import annotations

from tfpar.config import ConfigError, ExperimentConfig
from tfpar.exchange import spec as specs
from tfpar.exchange.sharding.codecs import check_exchange
from tfpar.parallel.topology import Topology


def check_sharding(config: ExperimentConfig, topology: Topology) -> None:
    """Refuses `--shard` with options that do not work with it.

    Args:
      config: The experiment.
      topology: The devices.

    Raises:
      ConfigError: With what to leave out.
    """
    flag = f"--shard={config.train.shard}"
    if config.train.shard == "none":
        return
    if topology.name in ("parameter_server", "tpu"):
        raise ConfigError(f"{flag} does not work with --strategy={topology.name}. Use --shard=none.")
    if topology.workers > 1:
        check_exchange(specs.parse(config.exchange.exchange), config.train.shard)

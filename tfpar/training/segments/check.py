"""What cannot be cut into segments, refused before anything starts."""

from __future__ import annotations

from tfpar.config import ConfigError, ExperimentConfig
from tfpar.parallel.topology import Topology


def check_segments(config: ExperimentConfig, topology: Topology) -> None:
    """Refuses options that do not go with `--jit_segments`.

    Raises:
      ConfigError: The first of them, with what to use instead.
    """
    train = config.train
    if train.jit_segments == 1:
        return
    flag = f"--jit_segments={train.jit_segments}"
    if topology.name in ("parameter_server", "tpu"):
        why = "exchanges no gradients" if topology.name == "parameter_server" else "compiles a step as one program"
        raise ConfigError(f"{flag} does not work with --strategy={topology.name}, which {why}. Leave it out.")
    if topology.mesh.model > 1 or topology.mesh.pipeline > 1 or topology.replica_workers > 1:
        raise ConfigError(
            f"{flag} does not work with --mesh={config.strategy.mesh}, whose layers are cut already. Leave one of them "
            "out."
        )
    if topology.replicas == 1:
        raise ConfigError(f"{flag}: a single replica exchanges nothing, so nothing could begin earlier. Leave it out.")
    if train.jit_compile == "false":
        raise ConfigError(
            f"{flag} does not work with --jit_compile=false: without XLA, the exchange overlaps the backward pass "
            "anyway. Leave one of them out."
        )
    if train.accumulate_steps > 1:
        raise ConfigError(
            f"{flag} does not work with --accumulate_steps={train.accumulate_steps}: gradients are complete only after "
            "the last micro-batch, all of them at once. Leave one of them out."
        )
    if train.shard != "none":
        raise ConfigError(f"{flag} does not work with --shard={train.shard} yet. Leave one of them out.")
    if config.outer.uses_rounds:
        raise ConfigError(
            f"{flag} does not work with --local_steps={config.outer.local_steps}: no gradients are exchanged. Leave "
            "one of them out."
        )

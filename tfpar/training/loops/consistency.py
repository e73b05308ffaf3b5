"""Whether all workers were given the same run: asked before the first step.

Workers with data or options of their own would make calls of different lengths, and wait for each other for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfpar.collectives.agreement import WorkerAgreement
from tfpar.config import ConfigError, ExperimentConfig

# Options that belong to a host or to the chief alone. Of `dataset`, which may be a path, the data tells.
HOSTS_OWN = frozenset(
    {
        *("strategy", "devices", "tpu", "peer_timeout", "start_timeout", "stall_timeout"),
        *("dataset", "data_dir", "cache", "prefetch", "input_threads", "data_service"),
        *("workdir", "warm_start", "keep_checkpoints", "on_checkpoint_error", "verbose"),
    }
)


def check(
    agreement: WorkerAgreement, config: ExperimentConfig, facts: Mapping[str, Any], shown: Mapping[str, str]
) -> None:
    """Compares what the workers were given. All workers call it, and all of them raise.

    Args:
      agreement: Between the workers.
      config: This worker's options.
      facts: What else must be the same, by the name it has in the message.
      shown: What the message says of facts instead of their values; it may differ, as paths do.

    Raises:
      ConfigError: What differs, with this worker's values.
    """
    given = {f"--{name}": value for name, value in config.as_flat_dict().items() if name not in HOSTS_OWN} | {**facts}
    if agreement.all_equal(given):
        return
    differ = [name for name, value in given.items() if not agreement.all_equal(value)]
    text = ", ".join(f"{name} (here {shown.get(name, given[name])})" for name in differ)
    raise ConfigError(
        f"the workers were not given the same: {text}. Each worker must get the same flags, see the same data and "
        "build the same model; compare what the others say."
    )

"""Whether all workers were given the same run: asked before the first step.

Workers with data or options of their own would make calls of different lengths, and wait for each other for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfpar.collectives.agreement import Agreement
from tfpar.config import PER_HOST_OPTIONS, ConfigError, ExperimentConfig


def check(agreement: Agreement, config: ExperimentConfig, facts: Mapping[str, Any], shown: Mapping[str, str]) -> None:
    """Compares what the workers were given. All workers call it, and all of them raise.

    Args:
      agreement: Between the workers.
      config: This worker's options.
      facts: What else must be the same, by the name it has in the message.
      shown: What the message says of facts instead of their values; it may differ, as paths do.

    Raises:
      ConfigError: What differs, with this worker's values.
    """
    given = {f"--{name}": value for name, value in config.as_flat_dict().items() if name not in PER_HOST_OPTIONS} | {
        **facts
    }
    if _same(agreement, given):
        return
    differ = [name for name, value in given.items() if not _same(agreement, value)]
    text = ", ".join(f"{name} (here {shown.get(name, given[name])})" for name in differ)
    raise ConfigError(
        f"the workers were not given the same: {text}. Each worker must get the same flags, see the same data and "
        "build the same model; compare what the others say."
    )


def _same(agreement: Agreement, value: Any) -> bool:
    return agreement.all_equal([*repr(value).encode()])

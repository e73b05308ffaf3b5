"""What the workers of the exchange tests share.

python -m tests.cluster.scripts.MODULE OUTPUT_DIR DEVICES SPEC...
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable

import tfpar
from tfpar import ExperimentConfig
from tfpar.parallel import strategies
from tfpar.parallel.topology import choose_topology

import numpy as np


def main(exchange_all: Callable[[str, strategies.Runtime], dict[str, np.ndarray]], transport: str = "auto") -> None:
    """Exchanges with every spec of the command line, and writes what came back to `OUTPUT_DIR/NUMBER-WORKER.npz`."""
    directory, devices, *specs = sys.argv[1:]
    options = {"strategy": "multi_worker", "devices": int(devices), "transport": transport}
    config = ExperimentConfig.from_flat_dict(options)
    runtime = strategies.build(choose_topology(config.strategy, tfpar.cluster.detect()))
    for number, spec in enumerate(specs):
        np.savez(pathlib.Path(directory) / f"{number}-{runtime.topology.worker}.npz", **exchange_all(spec, runtime))

"""One worker of tests/integration/test_transport.py: exchanges with every spec, over Gloo and over TensorFlow.

python -m tests.integration.scripts.both_transports OUTPUT_DIR SPEC...

Writes what came back to `OUTPUT_DIR/TRANSPORT-NUMBER-WORKER.npz`, and how many buckets were exchanged in one
operation.
"""

from __future__ import annotations

import pathlib
import sys

import tfpar
from tests.integration.scripts.exchange_sums import exchange_all
from tfpar import ExperimentConfig
from tfpar.collectives.gloo import PipelinedGlooGroup
from tfpar.collectives.tensorflow import use_transport, world_group
from tfpar.parallel import strategies
from tfpar.parallel.topology import choose_topology

import numpy as np


def main() -> None:
    directory, *specs = sys.argv[1:]
    config = ExperimentConfig.from_flat_dict({"strategy": "multi_worker", "transport": "gloo"})
    runtime = strategies.build(choose_topology(config.strategy, tfpar.cluster.detect()))
    topology = runtime.topology
    pipelined: list[object] = []
    exchange = PipelinedGlooGroup.exchange

    def counted(*arguments):
        pipelined.append(arguments)
        return exchange(*arguments)

    PipelinedGlooGroup.exchange = counted
    for transport, kind in (("Gloo", "PipelinedGloo"), ("TensorFlow", "TensorFlow")):
        if transport == "TensorFlow":
            use_transport(None)
        assert type(world_group(topology.workers, topology.worker)).__name__ == f"{kind}Group"
        for number, spec in enumerate(specs):
            path = pathlib.Path(directory) / f"{transport}-{number}-{topology.worker}.npz"
            pipelined.clear()
            np.savez(path, **exchange_all(spec, runtime), pipelined=len(pipelined))


if __name__ == "__main__":
    main()

"""One worker of tests/integration/test_attacks.py, which attacks its port while the workers connect, and later.

python -m tests.integration.scripts.attacked DIRECTORY

Writes where it listens to `DIRECTORY/RANK.address`, connects once `DIRECTORY/connect` is there, and sums until
`DIRECTORY/end` is.
"""

from __future__ import annotations

import pathlib
import sys
import time

from tfpar import cluster
from tfpar.collectives.gloo import GlooGroup
from tfpar.collectives.tensorflow import world_group
from tfpar.config import StrategyConfig
from tfpar.parallel import strategies
from tfpar.parallel.topology import choose_topology
from tfpar_ops.transport_library import TransportLibrary

import numpy as np
import tensorflow as tf


def main() -> None:
    directory = pathlib.Path(sys.argv[1])
    info = cluster.current()
    rank, connect, meshes = info.worker_rank, TransportLibrary.connect, []

    def when_told(library, mesh, addresses):
        (directory / f"{rank}.tmp").write_text(addresses[rank])
        (directory / f"{rank}.tmp").rename(directory / f"{rank}.address")
        while not (directory / "connect").exists():
            time.sleep(0.01)
        connect(library, mesh, addresses)
        meshes.append((library, mesh))

    TransportLibrary.connect = when_told
    strategies.build(choose_topology(StrategyConfig(strategy="multi_worker", transport="gloo"), info))
    group = world_group(info.num_workers, rank)
    assert isinstance(group, GlooGroup)

    @tf.function
    def total(values):
        return group.all_reduce(values, 7)

    values = np.random.default_rng(rank).normal(size=5000).astype(np.float32)
    expected = sum(np.random.default_rng(other).normal(size=5000).astype(np.float32) for other in range(group.size))
    calls, ended = 0, 0.0
    while ended < group.size:  # all see the end in the same call
        np.testing.assert_allclose(total(tf.constant(values)), expected, rtol=1e-5, atol=1e-5)
        if calls == 0:
            (directory / f"{rank}.connected").touch()
        calls += 1
        ended = float(total(tf.constant([float((directory / "end").exists())]))[0])
    (library, mesh), *_ = meshes
    print(f"dropped {library.dropped(mesh)}", "listens" if library.address(mesh) else "closed", flush=True)


if __name__ == "__main__":
    main()

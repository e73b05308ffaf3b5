"""Sets up a cluster, and tries the ports of all workers under an address of the machine that is not in TF_CONFIG.

reach.py ADDRESS
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys

from tfpar import cluster
from tfpar.collectives.agreement import WorkerAgreement
from tfpar.collectives.tensorflow import world_group
from tfpar.config import StrategyConfig
from tfpar.parallel import strategies
from tfpar.parallel.topology import choose_topology

info = cluster.current()
topology = choose_topology(StrategyConfig(strategy="multi_worker"), info)
strategies.build(topology)
agreement = WorkerAgreement(world_group(topology.workers, topology.worker))
agreement.all_equal([0])  # all have set up theirs
reached = {}
for address in info.cluster["worker"]:
    port = int(address.rpartition(":")[2])
    for host in ("127.0.0.1", sys.argv[1]):
        reached[f"{host} {port}"] = False
        with contextlib.suppress(TimeoutError), socket.create_connection((host, port), timeout=1.0):
            reached[f"{host} {port}"] = True
print("reached", json.dumps(reached), flush=True)
agreement.all_equal([1])  # and nobody leaves before all have tried

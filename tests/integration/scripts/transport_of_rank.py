"""One worker of tests/integration/test_transport.py, with a transport of its own:
transport_of_rank.py MESH TRANSPORT...

Of TRANSPORT:WHAT, WHAT is in this worker's way: `firewall` (the others cannot reach its port), `library` (it has none),
`address` (it cannot listen on its own), or `end` (it ends instead); `reference` is not: it encodes without a library.
"""

from __future__ import annotations

import os
import sys

from tfpar import cluster
from tfpar.collectives import gloo_mesh
from tfpar.collectives.replicas import sum_over_replicas
from tfpar.collectives.tensorflow import world_group
from tfpar.config import ConfigError, StrategyConfig
from tfpar.parallel import strategies
from tfpar.parallel.topology import choose_topology
from tfpar_ops import transport_library

import tensorflow as tf

REDUCTIONS = {"CollectiveReduceV2", "CollectiveReduceV3", "TfparAllReduce"}


def sum_and_gradient():
    """Of all replicas: the sum of their ranks from 1 on, and the gradient with respect to a rank of thrice the sum."""
    value = tf.constant([1.0 + info.worker_rank])
    with tf.GradientTape() as tape:
        tape.watch(value)
        summed = sum_over_replicas(value)
        thrice = 3.0 * summed
    return summed, tape.gradient(thrice, value)


info = cluster.current()
transport, _, obstacle = sys.argv[2 + info.worker_rank].partition(":")
gloo_mesh._CONNECT_S = 3.0
if obstacle == "library":
    gloo_mesh.why_unusable = lambda: "it was built without Gloo. Install it."
elif obstacle == "firewall":  # on port 1 of this machine, nothing listens
    transport_library.TransportLibrary.address = lambda *_: "127.0.0.1 1"
elif obstacle == "reference":
    os.environ["TFPAR_OPS"] = "reference"
elif obstacle == "end":
    transport_library.TransportLibrary.listen = lambda *_: os._exit(0)
elif obstacle == "address":
    listen = transport_library.TransportLibrary.listen
    transport_library.TransportLibrary.listen = lambda library, rank, names, host, *rest: listen(
        library, rank, names, "192.0.2.1", *rest
    )
config = StrategyConfig(strategy="multi_worker", mesh=sys.argv[1], transport=transport, start_timeout=60.0)
try:
    runtime = strategies.build(choose_topology(config, info))
    topology = runtime.topology
    group = world_group(info.num_workers, info.worker_rank)
    total = tf.function(lambda: group.all_reduce(tf.ones([3]), 5))()
    print(topology.describe(), "|", type(group).__name__, total.numpy().tolist(), flush=True)
    sums = tf.function(lambda: runtime.strategy.run(sum_and_gradient)).get_concrete_function()
    operations = {node.op for function in sums.graph.as_graph_def().library.function for node in function.node_def}
    operations |= {operation.type for operation in sums.graph.get_operations()}
    print("sums", [part.numpy().tolist() for part in sums()], sorted(operations & REDUCTIONS), flush=True)
except ConfigError as error:
    print("error:", error, flush=True)

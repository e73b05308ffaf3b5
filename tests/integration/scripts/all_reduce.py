"""Real TensorFlow: every worker adds its rank + 1 to a sum. In the first start, worker 1 finds its port taken."""

import os
import socket
import sys
from pathlib import Path

from tfpar import cluster

import tensorflow as tf

info = cluster.detect()
assert info is not None
cluster.export_tf_config(info)  # under Slurm or Kubernetes, TensorFlow would not know
marker = Path(sys.argv[1])
if info.worker_rank == 1 and not marker.exists():
    marker.touch()
    taken = socket.socket()
    taken.bind(("", int(info.address.rpartition(":")[2])))
    taken.listen()

strategy = tf.distribute.MultiWorkerMirroredStrategy()


@tf.function(autograph=False)
def total() -> tf.Tensor:
    def replica() -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        return context.all_reduce("sum", tf.constant(info.worker_rank + 1))

    return strategy.run(replica)


print(f"restarts={os.environ.get('TFPAR_RESTARTS')} replicas={strategy.num_replicas_in_sync} sum={int(total())}")

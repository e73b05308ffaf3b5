"""Plain Keras scripts on a cluster: every process runs its own `fit` on its share of the data.

There is no tf.distribute strategy around the model. The optimizer that `DistributedOptimizer` returns exchanges
gradients before it applies them, over the transport that `init_cluster` connects.
"""

from tfpar.drop_in.callbacks import AverageMetrics, BroadcastInitialWeights
from tfpar.drop_in.optimizer import DistributedOptimizer
from tfpar.drop_in.workers import init_cluster, rank, shard, size

__all__ = ["AverageMetrics", "BroadcastInitialWeights", "DistributedOptimizer", "init_cluster", "rank", "shard", "size"]

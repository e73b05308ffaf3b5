"""Small agreements between workers, outside the training step."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfpar.training import replica


def sum_over_workers(strategy: tf.distribute.Strategy, value: tf.Tensor, workers: int) -> tf.Tensor:
    """Sums a tensor over workers, each counted once however many replicas it has.

    Call inside a `tf.function`, in cross-replica context, on every worker.

    Args:
      strategy: A synchronous strategy.
      value: This worker's contribution.
      workers: Number of workers; with one, `value` is returned as it is.
    """
    if workers == 1:
        return value
    local_replicas = strategy.num_replicas_in_sync // workers

    def contribute(value: tf.Tensor) -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        mine = value if replica.static_replica_id() % local_replicas == 0 else tf.zeros_like(value)
        return context.all_reduce(tf.distribute.ReduceOp.SUM, mine)

    return strategy.experimental_local_results(strategy.run(contribute, args=(value,)))[0]


def all_equal(strategy: tf.distribute.Strategy, workers: int, numbers: list[int]) -> bool:
    """Whether all workers hold the same small integers (below 2^50 / workers). Call on every worker, eagerly."""
    mine = np.asarray(numbers, np.float64)
    if workers == 1:
        return True
    # v and v^2 have the sums N v and N v^2 on every worker exactly when all the v are equal (Cauchy-Schwarz).
    reduce = tf.function(lambda value: sum_over_workers(strategy, value, workers), autograph=False)
    total = reduce(tf.constant(np.concatenate([mine, mine**2]))).numpy()
    sums, squares = np.split(total, 2)
    return bool(np.all(workers * squares == sums**2))

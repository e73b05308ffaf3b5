"""Small agreements between workers, outside the training step."""

from __future__ import annotations

import hashlib

from tfpar.parallel import replica

import numpy as np
import tensorflow as tf


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
        # The reduction looks up the tensor's device, which a function's argument does not have: hence the identity.
        mine = tf.identity(value) if replica.static_replica_id() % local_replicas == 0 else tf.zeros_like(value)
        return context.all_reduce(tf.distribute.ReduceOp.SUM, mine)

    return strategy.experimental_local_results(strategy.run(contribute, args=(value,)))[0]


def _in_own_place(strategy: tf.distribute.Strategy, value: tf.Tensor, workers: int) -> tf.Tensor:
    """The value of each worker: a sum of vectors in which each has filled its own place."""
    local_replicas = strategy.num_replicas_in_sync // workers

    def contribute(value: tf.Tensor) -> tf.Tensor:
        worker, replica_of_worker = divmod(replica.static_replica_id(), local_replicas)
        mine = tf.one_hot(worker, workers, on_value=1, off_value=0, dtype=value.dtype) * value
        mine = mine if replica_of_worker == 0 else tf.zeros_like(mine)
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, mine)

    return strategy.experimental_local_results(strategy.run(contribute, args=(value,)))[0]


class Agreement:
    """Small agreements between the workers of a strategy, outside the training step.

    Every worker makes the same calls in the same order. With one worker nothing travels.

    Args:
      strategy: A synchronous strategy.
      workers: Its number of workers.
    """

    def __init__(self, strategy: tf.distribute.Strategy, workers: int) -> None:
        self._workers = workers
        self._sum = tf.function(lambda value: sum_over_workers(strategy, value, workers), autograph=False)
        self._gather = tf.function(lambda value: _in_own_place(strategy, value, workers), autograph=False)

    def mean(self, value: float) -> float:
        """The mean of the workers' values, the same bits on each."""
        return self.sums([value])[0] / self._workers

    def sums(self, values: list[float]) -> list[float]:
        """Each value summed over the workers, the same bits on each."""
        if self._workers == 1:
            return values
        return self._sum(tf.constant(values, tf.float64)).numpy().tolist()

    def gather(self, number: int) -> list[int]:
        """The workers' integers (each below 2^62 in magnitude), in the order of their ranks."""
        if self._workers == 1:
            return [number]
        return self._gather(tf.constant(number, tf.int64)).numpy().tolist()

    def all_equal(self, numbers: list[int]) -> bool:
        """Whether all workers hold the same integers."""
        if self._workers == 1:
            return True
        # Their hash: of one length for all calls, which then share a program, and of numbers whose squares fit.
        mine = np.frombuffer(hashlib.blake2b(repr(numbers).encode(), digest_size=24).digest(), np.uint8)
        mine = mine.astype(np.int64)
        # Values v with sum S and sum of squares Q are all equal exactly when N Q = S^2 (Cauchy-Schwarz).
        total = self._sum(tf.constant(np.concatenate([mine, mine**2]))).numpy().tolist()
        sums, squares = total[: len(mine)], total[len(mine) :]
        return all(self._workers * q == s * s for s, q in zip(sums, squares, strict=True))

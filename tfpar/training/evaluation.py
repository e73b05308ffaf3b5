"""Evaluation over all replicas: every example once, one sum over the workers at the end."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from tfpar.collectives.agreement import WorkerAgreement
from tfpar.parallel import replica
from tfpar.training.core import Core

import keras
import numpy as np
import tensorflow as tf


class Evaluation:
    """Computes loss and metrics of a model on a data set.

    Args:
      core: Model, loss and metrics.
      strategy: A synchronous strategy that the model was created under.
      agreement: Between the workers of the strategy.
      jit_compile: Compile the forward pass with XLA.
      weights: The trainable weights to use, in order: the model's own, or their moving averages.
    """

    def __init__(
        self,
        core: Core,
        strategy: tf.distribute.Strategy,
        *,
        agreement: WorkerAgreement,
        jit_compile: bool,
        weights: Sequence[keras.Variable],
    ) -> None:
        self._core = core
        self._strategy = strategy
        self._agreement = agreement
        self.weights = list(weights)
        on_tpu = isinstance(strategy, tf.distribute.TPUStrategy)
        compile_here = jit_compile and not on_tpu
        self._sums = (
            tf.function(self._batch_sums, jit_compile=True, autograph=False) if compile_here else self._batch_sums
        )
        self._run = tf.function(self._loop, autograph=False)
        self._run._omit_frequent_tracing_warning = True  # see `TrainStep`

    def run(self, iterator: Iterator[Any], batches: int) -> dict[str, float]:
        """Evaluates.

        Args:
          iterator: Distributed iterator over elements `(x, y, weight)` with a leading axis of 1.
          batches: How many elements each replica takes; the same on every worker.

        Returns:
          `loss` (mean over examples), `examples`, and one entry per metric.
        """
        sums = self._run(iterator, tf.constant(batches)).numpy()
        loss, count, *metrics = self._split(self._agreement.sum_arrays(sums))
        # Without any example, where all were skipped, there is no loss.
        results = {"loss": float(loss / count) if count else math.nan, "examples": float(count)}
        return results | self._core.metric_results(metrics)

    def _loop(self, iterator: Iterator[Any], batches: tf.Tensor) -> tf.Tensor:
        length = 2 + sum(int(np.prod(variable.shape)) for variable in self._core.metric_variables)

        def body(index: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            vector = self._strategy.run(self._replica_sums, args=(next(iterator),))
            parts = self._strategy.experimental_local_results(vector)
            # float64: counts must stay exact past 2^24 examples.
            return index + 1, total + tf.add_n([tf.cast(part, tf.float64) for part in parts])

        start = (tf.constant(0), tf.zeros([length], tf.float64))
        _, total = tf.while_loop(lambda index, _: index < batches, body, start, parallel_iterations=1)
        return total

    def _replica_sums(self, batch: Any) -> tf.Tensor:
        state = replica.read(self._core.model.non_trainable_variables)
        return self._sums(replica.read(self.weights), state, batch)

    def _batch_sums(self, params: list[tf.Tensor], state: list[tf.Tensor], batch: Any) -> tf.Tensor:
        sums = self._core.evaluate(params, state, batch)
        return tf.concat(
            [tf.stack([sums.loss, sums.count]), *[tf.reshape(part, [-1]) for part in sums.metrics]], axis=0
        )

    def _split(self, vector: np.ndarray) -> list[np.ndarray]:
        shapes = [(), (), *[tuple(variable.shape) for variable in self._core.metric_variables]]
        ends = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]
        return [part.reshape(shape) for part, shape in zip(np.split(vector, ends), shapes, strict=True)]

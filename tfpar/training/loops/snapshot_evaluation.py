"""Evaluation of a snapshot of the weights on the chief, beside the training on parameter servers."""

from __future__ import annotations

import concurrent.futures
import functools
from typing import TYPE_CHECKING

from tfpar import inputs

import numpy as np
import tensorflow as tf

if TYPE_CHECKING:
    from tfpar.training.trainer import Trainer

_CHIEF = "/job:chief/replica:0/task:0/device:CPU:0"


class SnapshotEvaluation:
    """Evaluates in a thread of its own, one snapshot at a time.

    Args:
      trainer: A trainer on the chief of `parameter_server`.
      validation: The examples.

    Attributes:
      latest: The update after which the latest snapshot that has been evaluated was taken; -1 if none has.
    """

    def __init__(self, trainer: Trainer, validation: inputs.Source) -> None:
        self.latest = -1
        self._trainer = trainer
        self._validation = validation
        self._batch_sums = tf.function(trainer.core.evaluate, jit_compile=trainer.jit_compile or None, autograph=False)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="evaluation")
        self._pending: concurrent.futures.Future[tuple[int, dict[str, float]]] | None = None

    def start(self, step: int) -> None:
        """Takes a snapshot of the weights after update `step`. What was started before has been collected."""
        self._pending = self._thread.submit(self._evaluate, step, *self._snapshot())

    def collect(self, *, wait: bool) -> tuple[int, dict[str, float]] | None:
        """The update and the results of what was started: `loss`, `examples` and metrics; once, and None before.

        Args:
          wait: Wait for it.
        """
        if self._pending is None or not (wait or self._pending.done()):
            return None
        self.latest, results = self._pending.result()
        self._pending = None
        return self.latest, results

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown()

    def _snapshot(self) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        with tf.device(_CHIEF):
            model = self._trainer.model
            return (
                [tf.identity(variable.value) for variable in self._trainer.eval_weights()],
                [tf.identity(variable.value) for variable in model.non_trainable_variables],
            )

    def _evaluate(self, step: int, params: list[tf.Tensor], state: list[tf.Tensor]) -> tuple[int, dict[str, float]]:
        core = self._trainer.core
        total: list[np.ndarray] | None = None
        with tf.device(_CHIEF):
            for batch in self._batches:
                sums = self._batch_sums(params, state, batch)
                row = [np.asarray(part, np.float64) for part in (sums.loss, sums.count, *sums.metrics)]
                total = row if total is None else [a + b for a, b in zip(total, row, strict=True)]
            if total is None:
                return step, {}
            loss, count, *metrics = total
            return step, {"loss": float(loss / count), "examples": float(count), **core.metric_results(metrics)}

    @functools.cached_property
    def _batches(self) -> tf.data.Dataset:
        """Made once: TensorFlow 2.21 tells all workers of every function that is traced, and does so with Python's lock
        held, so that a worker which does not answer then keeps the chief from noticing."""
        pipeline = inputs.Pipeline(
            self._validation,
            self._trainer.config.input,
            accumulate_steps=1,
            replicas=1,
            workers=1,
            seed=0,
            training=False,
        )
        return pipeline.dataset(0, 1)

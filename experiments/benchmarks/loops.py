"""tfpar's training step as benchmarks drive it: without evaluation, checkpoints and reports around it."""

from __future__ import annotations

import tfpar
from tfpar import inputs, precision
from tfpar.training.synchronous import SynchronousRun

import tensorflow as tf


class FrameworkLoop:
    """Runs steps as `Trainer.fit` does, on batches of the trainer's own pipeline.

    Args:
      trainer: Where the step comes from.
      source: Training examples.
    """

    def __init__(self, trainer: tfpar.Trainer, source: inputs.Source) -> None:
        run = SynchronousRun(trainer, source, None, 1 << 30, None)
        self._step = run.step
        self._iterator = iter(trainer.distribute(run.pipeline))
        self._scale = precision.initial(trainer.config.precision)
        self._done = 0

    def __call__(self, steps: int) -> float:
        """Runs so many steps in one call; the loss of the last."""
        position = tf.constant(self._done, tf.int64), tf.constant(steps)
        result = self._step.run(self._iterator, *position, self._scale, tf.constant(1.0), tf.constant(True))
        self._scale = result.loss_scale
        self._done += steps
        return float(result.loss[-1])

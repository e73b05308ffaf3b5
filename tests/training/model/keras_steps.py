"""What Keras' own `fit` computes, to compare with: one process, the same batches in the same order."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf


def batches_of(x, y, count: int):
    """Cuts arrays, or structures of them, into so many batches."""
    return list(
        zip(
            *(zip(*(np.array_split(part, count) for part in tf.nest.flatten(data)), strict=True) for data in (x, y)),
            strict=True,
        )
    )


def fit(model: keras.Model, optimizer, loss, x, y, batch_size: int, **options) -> list[float]:
    """Runs one epoch of `fit` in order; returns the loss of every step."""
    losses: list[float] = []

    class Note(keras.callbacks.Callback):
        total = 0.0

        def on_train_batch_end(self, batch, logs=None):
            mean = logs["loss"] * (batch + 1)  # Keras reports the mean over the epoch so far
            losses.append(mean - self.total)
            self.total = mean

    model.compile(optimizer, loss, jit_compile=False, **options)
    model.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0, callbacks=[Note()])
    return losses


def accumulate(model: keras.Model, optimizer, loss, steps) -> list[float]:
    """Keras' `train_step` for each micro-batch, and one update with the mean of their gradients.

    Args:
      model: The model.
      optimizer: Its optimizer.
      loss: `loss(y, outputs)` -> mean.
      steps: For each step a list of micro-batches `(x, y)`.
    """
    optimizer.build(model.trainable_variables)
    losses = []
    for micro_batches in steps:
        total, gradients = 0.0, []
        for x, y in micro_batches:
            with tf.GradientTape() as tape:
                value = loss(y, model(x, training=True)) + sum(model.losses)
            gradients.append(tape.gradient(value, [variable.value for variable in model.trainable_variables]))
            total += float(value)
        count = len(micro_batches)
        mean = [sum(map(tf.convert_to_tensor, parts)) / count for parts in zip(*gradients, strict=True)]
        optimizer.apply(mean, model.trainable_variables)
        losses.append(total / count)
    return losses

"""Trains one model with `keras.Model.fit` and with the training step on some replicas, on the same batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tests.training.harness import strategy_of
from tfpar.exchange import Exchange
from tfpar.inputs import Weighted
from tfpar.precision import LossScale
from tfpar.training.core import Core
from tfpar.training.objective import Goal, SupervisedObjective
from tfpar.training.step import TrainStep

import keras
import numpy as np
import tensorflow as tf

LEARNING_RATE = 0.5


def fit(build: Callable[[], keras.Model], data: Sequence[Any], batch: int, **compile_options) -> tuple[Any, Any, Any]:
    """Plain Keras on one process: history of one epoch, evaluation of the whole data before it, weights after it.

    Args:
      build: Builds the model.
      data: `(x, y)` or `(x, y, sample_weight)`.
      batch: Examples of a step.
      **compile_options: Arguments of `compile`.
    """
    model = build()
    model.compile(keras.optimizers.SGD(LEARNING_RATE), run_eagerly=True, **compile_options)
    arguments = dict(zip(("x", "y", "sample_weight"), data, strict=False))
    size = len(tf.nest.flatten(data[0])[0])
    evaluation = model.evaluate(**arguments, batch_size=size, verbose=0, return_dict=True)
    model.reset_metrics()
    history = model.fit(**arguments, batch_size=batch, shuffle=False, verbose=0).history
    return {name: values[0] for name, values in history.items()}, evaluation, model.get_weights()


class Training:
    """A model with a goal on some replicas.

    Args:
      build: Builds the model.
      goal: Losses and metrics.
      data: `(x, y)` or `(x, y, sample_weight)`, arrays in structures without lists.
      replicas: Logical devices.
      **options: Of `TrainStep`.

    Attributes:
      loss_count: The sum of `StepsResult.loss_counts` over the last epoch.
    """

    loss_count = 0.0

    def __init__(
        self, build: Callable[[], keras.Model], goal: Goal, data: Sequence[Any], replicas: int = 1, **options
    ) -> None:
        self.replicas = replicas
        self.strategy = strategy_of(replicas)
        x, y = data[0], data[1] if len(data) > 1 else ()
        self.data = x, y if len(data) < 3 else Weighted(y, data[2])
        self.size = len(tf.nest.flatten(x)[0])
        spec = tf.nest.map_structure(lambda part: tf.TensorSpec(part.shape[1:], part.dtype), (x, y))
        with self.strategy.scope():
            self.model = build()
            optimizer = keras.optimizers.SGD(LEARNING_RATE)
            optimizer.build(self.model.trainable_variables)
            objective = SupervisedObjective(self.model, goal)
            objective.bind(*spec)
            self.core = Core(self.model, objective)
        exchange = Exchange("none")
        exchange.build(self.model.trainable_variables)
        defaults = {"schedule": None, "seed": 0, "jit_compile": False}
        self.step = TrainStep(self.core, optimizer, exchange, self.strategy, **defaults | options)

    def train(self, batch: int, accumulate_steps: int = 1) -> dict[str, float]:
        """One epoch in order; `fit`'s logs of it. The last micro-batches are padded with copies at weight 0."""
        rows = self.replicas * accumulate_steps
        micro = -(-batch // rows)
        steps = -(-self.size // batch)
        indices, weights = [], []
        for first in range(0, self.size, batch):
            step = np.arange(first, min(first + batch, self.size))
            padding = rows * micro - len(step)
            indices.append(np.concatenate([step, np.full(padding, first)]).reshape(rows, micro))
            weights.append(np.concatenate([np.ones(len(step)), np.zeros(padding)]).reshape(rows, micro))
        order = np.stack(indices).reshape(steps * self.replicas, accumulate_steps, micro)
        weight = np.stack(weights).reshape(order.shape).astype(np.float32)
        elements = (*tf.nest.map_structure(lambda part: np.asarray(part)[order], self.data), weight)

        def dataset(_: Any) -> tf.data.Dataset:
            found = tf.data.Dataset.from_tensor_slices(elements).repeat()
            return found.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))

        result = self.step.run(
            iter(self.strategy.distribute_datasets_from_function(dataset)),
            tf.constant(0, tf.int64),
            tf.constant(steps),
            LossScale(tf.constant(1024.0 if self.step._scale_loss else 1.0), tf.constant(0)),
            tf.constant(1.0),
        )
        assert result.finite.numpy().all()
        assert result.count.numpy().sum() == self.size  # examples, whatever is averaged over
        self.loss_count = float(result.loss_counts.numpy().sum())
        loss = np.average(result.loss.numpy(), weights=result.count.numpy())
        return {"loss": float(loss)} | self.core.metric_results([part.numpy() for part in result.metrics])

    def evaluate(self, batch: int) -> dict[str, float]:
        """Loss and metrics over all data, in batches of which the last is padded."""
        params, state = (
            [self.strategy.experimental_local_results(variable.value)[0].read_value() for variable in variables]
            for variables in (self.model.trainable_variables, self.model.non_trainable_variables)
        )
        total: list[np.ndarray] | None = None
        for first in range(0, self.size, batch):
            step = np.arange(first, first + batch)
            weight = (step < self.size).astype(np.float32)
            step = np.minimum(step, self.size - 1)
            element = tf.nest.map_structure(
                lambda part, step=step: tf.constant(np.asarray(part)[None, step]), self.data
            )
            sums = self.core.evaluate(params, state, (*element, tf.constant(weight[None])))
            row = [np.asarray(part, np.float64) for part in (sums.loss, sums.count, *sums.metrics)]
            total = row if total is None else [a + b for a, b in zip(total, row, strict=True)]
        assert total is not None
        results = self.core.evaluation_results(*total[:2], total[2:])
        assert results.pop("examples") == self.size
        return results

    def weights(self) -> list[np.ndarray]:
        """The weights of the first replica, in the order of `model.get_weights`."""
        return [self.strategy.experimental_local_results(each.value)[0].numpy() for each in self.model.weights]

"""Runs training steps on hand-made batches, on logical devices."""

from __future__ import annotations

from tfpar.exchange import Exchange
from tfpar.precision import LossScale
from tfpar.training.core import Core
from tfpar.training.model.support import own_metrics
from tfpar.training.objective import Goal, SupervisedObjective
from tfpar.training.objective.outputs import outputs_of
from tfpar.training.step import TrainStep

import keras
import numpy as np
import tensorflow as tf


def strategy_of(replicas: int) -> tf.distribute.Strategy:
    if replicas == 1:
        return tf.distribute.OneDeviceStrategy("CPU:0")
    return tf.distribute.MirroredStrategy(
        [f"CPU:{index}" for index in range(replicas)], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )


def linear_model(features: int = 2) -> keras.Model:
    """y = w x, one weight per feature, all starting at 1."""
    return keras.Sequential(
        [keras.Input((features,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")]
    )


def squared_error(y, outputs):
    return tf.square(outputs - y)


class Steps:
    """A model, an optimizer and a training step on some replicas.

    Each step is a list with one entry per replica: (x [m, f], y [m, 1], weight [m]), NumPy, or with
    a leading micro-batch axis if `micro_batches`.
    """

    def __init__(
        self,
        replicas: int,
        model=linear_model,
        optimizer=None,
        *,
        loss=squared_error,
        metrics=(),
        jit_compile=True,
        seed=0,
        **options,
    ):
        self.strategy = strategy_of(replicas)
        self.replicas = replicas
        with self.strategy.scope():
            self.model = model()
            self.optimizer = optimizer() if optimizer else keras.optimizers.SGD(0.1)
            self.optimizer.build(self.model.trainable_variables)
            objective = SupervisedObjective(self.model, Goal(loss, metrics=list(metrics)))
            x = tf.TensorSpec(self.model.get_build_config()["input_shape"][1:], tf.float32)
            outputs = outputs_of(self.model, x, 1).structure
            objective.bind(x, tf.TensorSpec(outputs.shape[1:], tf.float32))
            self.core = Core(self.model, objective, model_metrics=own_metrics(self.model), replicas=replicas)
        exchange = Exchange("none")
        exchange.build(self.model.trainable_variables)
        self.step = TrainStep(
            self.core,
            self.optimizer,
            exchange,
            self.strategy,
            schedule=None,
            seed=seed,
            jit_compile=jit_compile,
            **options,
        )
        self.loss_scale = LossScale(tf.constant(1.0), tf.constant(0))
        self.done = 0

    def run(self, steps, *, micro_batches=False):
        """Runs the steps in one call; returns what they report."""
        elements = [element for step in steps for element in step]
        columns = [np.stack(column).astype(np.float32) for column in zip(*elements, strict=True)]
        if not micro_batches:
            columns = [column[:, None] for column in columns]

        def dataset(context):
            del context
            return (
                tf.data.Dataset.from_tensor_slices(tuple(columns))
                .repeat()
                .apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
            )

        iterator = iter(self.strategy.distribute_datasets_from_function(dataset))
        result = self.step.run(
            iterator,
            tf.constant(self.done, tf.int64),
            tf.constant(len(steps)),
            self.loss_scale,
            tf.constant(1.0),
        )
        self.done += len(steps)
        self.loss_scale = result.loss_scale
        return result

    def weights(self):
        """One list of arrays per replica."""
        local = self.strategy.experimental_local_results
        return [
            [local(variable.value)[replica].numpy() for variable in self.model.trainable_variables]
            for replica in range(self.replicas)
        ]

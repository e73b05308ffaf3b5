"""Losses of the user's own in a pipeline over several workers: tests/integration/test_pipeline_losses.py.

python -m tests.integration.scripts.own_losses OUTPUT

Each worker trains `Added`, writes its weights to `OUTPUT/WORKER.npz`, and prints the errors of `REFUSED`.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import tfpar
from tests.integration.scripts import divided, divided_models
from tests.training.test_own_objective import SquaredError
from tfpar.config import ConfigError

import keras
import numpy as np
import tensorflow as tf

STEPS = 4


class Added(keras.Model):
    """Adds the losses of its layers to its loss, as Keras does, and a penalty of a weight of the last stage."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + 0.1 * tf.reduce_sum(tf.square(self.get_layer("last").kernel))


class Halved(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return 0.5 * super().compute_loss(x, y, y_pred, sample_weight, training)


class Reading(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + tf.reduce_sum(tf.square(self.get_layer("first").kernel))


class Calling(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + tf.reduce_mean(tf.square(y_pred - self(x, training=False)))


def model(kind: type[keras.Model] = keras.Model) -> keras.Model:
    """Layers with losses in both stages."""
    x = inputs = keras.Input((12,))
    for name in ("first", "second", "third"):
        x = keras.layers.Dense(24, "tanh", name=name, kernel_regularizer="l2", activity_regularizer="l2")(x)
    return kind(inputs, keras.layers.Dense(1, name="last")(x))


def fitted(
    kind: type[keras.Model], runtime: tfpar.Runtime | None, goal: dict[str, Any], **options: Any
) -> tfpar.Trainer:
    chosen = {"optimizer": "sgd", "learning_rate": 0.1, "accumulate_steps": 2}
    config = tfpar.ExperimentConfig.from_flat_dict({**divided.COMMON, **chosen, **options})
    runtime = runtime or tfpar.initialize(config)
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    x, _ = divided_models.first_of(divided_models.data("dense"), 80)  # whole batches
    trainer = tfpar.Trainer(lambda: model(kind), config=config, runtime=runtime, **goal)
    trainer.results = trainer.fit(x, x[:, :1], steps=STEPS, validation=(x[:48], x[:48, :1]))
    return trainer


def found_by(trainer: tfpar.Trainer) -> dict[str, np.ndarray]:
    return {**divided.weights_of(trainer), "eval loss": np.array(trainer.results["eval"]["loss"])}


REFUSED = [(kind, {"loss": "mse"}) for kind in (Halved, Reading, Calling)] + [
    (keras.Model, {"objective": SquaredError})
]


def main(output: str) -> None:
    worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    mesh = {"mesh": "data:1,pipeline:2"}
    trainer = fitted(Added, None, {"loss": "mse"}, **mesh)
    np.savez(os.path.join(output, f"{worker}.npz"), **found_by(trainer))
    for kind, goal in REFUSED:
        try:
            fitted(kind, trainer.runtime, goal, **mesh)
        except ConfigError as error:
            print("refused:", error, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

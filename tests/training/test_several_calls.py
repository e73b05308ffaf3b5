"""Losses that call the model a second time, beside the call that made the outputs."""

from __future__ import annotations

from tests.integration.scripts import divided, divided_models

import keras
import numpy as np
import tensorflow as tf


class Consistent(keras.Model):
    """Its outputs with dropout are to be near those without."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        del sample_weight, training
        without = tf.stop_gradient(self(x, training=False))
        return tf.reduce_mean(tf.square(y_pred - without)) + tf.reduce_mean(tf.square(y_pred - tf.cast(y, tf.float32)))


def consistent() -> keras.Model:
    x = inputs = keras.Input((12,))
    for seed in (1, 2):
        x = keras.layers.Dropout(0.5, seed=seed)(keras.layers.Dense(16, "tanh")(x))
    return Consistent(inputs, keras.layers.Dense(1)(x))


def test_a_second_call_of_stages_has_its_own_training():
    x, y = divided_models.first_of(divided_models.data("dense"), 80)  # whole batches
    alone, found = divided.weights_alone_and_on("pipeline:2", consistent, x, y[:, None], steps=3)
    for name, value in alone.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=name)

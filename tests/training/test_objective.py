"""The supervised objective: one value per example, weighted; what is refused."""

from __future__ import annotations

from tests.training.test_core import SPARSE, batch, classifier, core_of, run
from tfpar.config import ConfigError
from tfpar.training.objective import per_example_loss, uses_integer_labels

import keras
import numpy as np
import pytest
import tensorflow as tf


def test_a_reduced_loss_is_refused():
    core = core_of(classifier(), lambda y, outputs: tf.reduce_mean(outputs))
    with pytest.raises(ConfigError, match="one value per example"):
        run(core, batch(1, 4))


def test_an_unknown_loss_is_refused():
    with pytest.raises(ConfigError, match="no_such_loss"):
        per_example_loss("no_such_loss")


@pytest.mark.parametrize(
    "loss", ["hinge", "squared_hinge", "poisson", "binary_crossentropy", "kl_divergence", "square"]
)
@pytest.mark.parametrize("labels", [(5,), (5, 1)])
def test_labels_and_outputs_of_another_rank_are_aligned_as_in_compile(loss, labels):
    generator = np.random.default_rng(2)
    y, outputs = generator.integers(0, 2, labels).astype(np.float32), generator.uniform(0.1, 0.9, (5, 1))
    given = (lambda y, outputs: tf.square(outputs - y)) if loss == "square" else loss
    outputs = outputs.astype(np.float32)
    plain = keras.Sequential([keras.Input((1,)), keras.layers.Identity()])
    plain.compile(loss=given)
    found = tf.reduce_mean(per_example_loss(given)(tf.constant(y), tf.constant(outputs)))
    np.testing.assert_allclose(found, plain.evaluate(outputs, y, verbose=0), rtol=1e-5)


def test_what_weights_positions_is_refused():
    with pytest.raises(ConfigError, match="ignore_class"):
        per_example_loss(keras.losses.SparseCategoricalCrossentropy(ignore_class=-1))
    masked = keras.Sequential(
        [keras.Input((6,), dtype="int32"), keras.layers.Embedding(9, 4, mask_zero=True), keras.layers.Dense(3)]
    )
    core = core_of(masked, per_example_loss(SPARSE))
    data = (tf.ones([1, 4, 6], tf.int32), tf.ones([1, 4, 6], tf.int32), tf.ones([1, 4]))
    with pytest.raises(ConfigError, match="carry a mask"):
        run(core, data)


def test_a_loss_with_another_number_of_values_is_refused():
    core = core_of(classifier(), lambda y, outputs: tf.zeros([3]))
    with pytest.raises(ConfigError, match="returned 3 values for 8 examples"):
        run(core, batch(1, 8))


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (SPARSE, True),
        ("sparse_categorical_crossentropy", True),
        ("categorical_crossentropy", False),
        (lambda y, outputs: outputs, False),
    ],
)
def test_which_losses_use_integer_labels(loss, expected):
    assert uses_integer_labels(loss) is expected

"""Metrics whose state is a sum: which ones are taken, and their values."""

from __future__ import annotations

from tests.training.test_core import SPARSE, core_of, run
from tfpar.config import ConfigError
from tfpar.training import metrics
from tfpar.training.metrics import build_metrics
from tfpar.training.objective import per_example_loss

import keras
import numpy as np
import pytest
import tensorflow as tf


def test_an_unknown_metric_is_refused():
    with pytest.raises(ConfigError, match="no_such_metric"):
        build_metrics(["no_such_metric"])


def test_a_metric_that_is_no_sum_is_refused():
    class Smallest(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="smallest")
            self.value = self.add_variable((), keras.initializers.Constant(1e9))

        def update_state(self, y, outputs, sample_weight=None):
            self.value.assign(keras.ops.minimum(self.value, keras.ops.min(outputs)))

        def result(self):
            return self.value

    with pytest.raises(ConfigError, match="smallest"):
        build_metrics([Smallest()])


@pytest.mark.parametrize(
    ("loss", "y", "outputs", "expected"),
    [
        (SPARSE, [2, 0], [[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]], 0.5),
        ("sparse_categorical_crossentropy", [1, 0], [[0.1, 0.9], [0.8, 0.2]], 1.0),
        ("categorical_crossentropy", [[0.0, 1.0], [1.0, 0.0]], [[0.1, 0.9], [0.2, 0.8]], 0.5),
        (keras.losses.BinaryCrossentropy(from_logits=True), [[1.0], [0.0]], [[0.3], [-0.3]], 1.0),
        ("binary_crossentropy", [[1.0], [0.0]], [[0.3], [0.6]], 0.0),
    ],
)
def test_accuracy_is_the_one_of_the_loss(loss, y, outputs, expected):
    (metric,) = build_metrics(["accuracy"], loss)
    metric.update_state(np.array(y), np.array(outputs, np.float32))
    assert metric.name == "accuracy"
    assert float(metric.result()) == expected


def test_accuracy_of_no_cross_entropy_is_refused():
    with pytest.raises(ConfigError, match="cannot be told from loss='mean_squared_error'"):
        build_metrics(["accuracy"], "mean_squared_error")


@pytest.mark.parametrize("average", [None, "macro", "micro"])
def test_metrics_that_make_their_state_late_equal_keras(average):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="sigmoid")])
    generator = np.random.default_rng(4)
    x, y = generator.normal(size=(12, 4)).astype(np.float32), generator.integers(0, 2, (12, 3)).astype(np.float32)
    metrics = build_metrics([keras.metrics.F1Score(average=average, threshold=0.5)], None, model.outputs[0].shape)
    core = core_of(model, per_example_loss("binary_crossentropy"), metrics)
    sums = run(core, (x[None], y[None], np.ones((1, 12), np.float32))).metrics
    expected = keras.metrics.F1Score(average=average, threshold=0.5)
    expected.update_state(y, model(x))
    names = ["f1_score"] if average else ["f1_score/0", "f1_score/1", "f1_score/2"]
    found = core.metric_results(sums)
    assert list(found) == names
    np.testing.assert_allclose(list(found.values()), np.ravel(expected.result()), rtol=1e-6)
    with pytest.raises(ConfigError, match=r"f1_score.*makes its state from the outputs"):
        build_metrics([keras.metrics.F1Score()])


def test_two_metrics_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="two are called 'accuracy'"):
        build_metrics(["accuracy", keras.metrics.MeanSquaredError(name="accuracy")], SPARSE)


def test_state_adds_up_over_batches_and_leaves_the_metrics_alone():
    built = build_metrics(["sparse_categorical_accuracy", keras.metrics.FalsePositives(thresholds=[0.2, 0.8])])
    shapes = [tuple(variable.shape) for variable in metrics.variables(built)]
    generator = np.random.default_rng(6)
    y = tf.constant(generator.integers(0, 2, (2, 5, 1)), tf.int32)
    outputs = tf.constant(generator.uniform(size=(2, 5, 1)), tf.float32)
    parts = [metrics.sums(built, y[index], outputs[index], tf.ones([5])) for index in range(2)]
    assert [tuple(part.shape) for part in parts[0]] == shapes
    assert all(float(tf.reduce_sum(tf.abs(variable.value))) == 0 for variable in metrics.variables(built))
    whole = metrics.sums(built, tf.concat([*y], 0), tf.concat([*outputs], 0), tf.ones([10]))
    for total, *each in zip(whole, *parts, strict=True):
        np.testing.assert_array_equal(total, sum(each))

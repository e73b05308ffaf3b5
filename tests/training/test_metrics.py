"""Metrics whose state is a sum: which ones are taken, and their values."""

from __future__ import annotations

from tests.training.test_core import SPARSE, core_of, run
from tests.training.test_objective import bound, classes, two_outputs
from tfpar.config import ConfigError

import keras
import numpy as np
import pytest
import tensorflow as tf


def outputs_as_they_are(*shape: int) -> keras.Model:
    return keras.Sequential([keras.Input(shape), keras.layers.Identity()])


def values(model: keras.Model, y, outputs, weight=None, **goal) -> dict[str, float]:
    """Metrics of outputs that `model` passes on."""
    y, outputs = np.asarray(y), np.asarray(outputs, np.float32)
    objective = bound(model, tf.TensorSpec(y.shape[1:], y.dtype), **goal)
    weight = tf.ones([len(y)]) if weight is None else tf.constant(weight, tf.float32)
    sums = objective([], [], (tf.constant(outputs), tf.constant(y), weight), training=False)
    return objective.totals.results([part.numpy() for part in sums.metrics])


class Smallest(keras.metrics.Metric):
    """No sum: the smallest output."""

    def __init__(self, start: float = 1e9, name: str = "smallest"):
        super().__init__(name=name)
        self.value = self.add_variable((), keras.initializers.Constant(start))

    def update_state(self, y, outputs, sample_weight=None):
        self.value.assign(keras.ops.minimum(self.value, keras.ops.min(outputs)))

    def result(self):
        return self.value


class Largest(Smallest):
    """No sum either, though its state starts at zero."""

    def __init__(self):
        super().__init__(0.0, "largest")

    def update_state(self, y, outputs, sample_weight=None):
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(outputs)))


class Examples(Smallest):
    """A sum that padding would count in."""

    def __init__(self):
        super().__init__(0.0, "number")

    def update_state(self, y, outputs, sample_weight=None):
        self.value.assign(self.value + keras.ops.shape(outputs)[0])


@pytest.mark.parametrize("metric", [Smallest, Largest, Examples, lambda: keras.metrics.R2Score(num_regressors=1)])
def test_metrics_that_are_no_sum_over_examples_are_refused(metric):
    metric = metric()
    with pytest.raises(ConfigError, match=f"{metric.name}.*(does not start at zero|cannot be summed)"):
        bound(outputs_as_they_are(3), tf.TensorSpec([3]), loss="mse", metrics=[metric])


def test_a_metric_function_of_the_batch_is_refused_with_what_to_write():
    with pytest.raises(ConfigError, match=r"cannot be summed.*one value per example, as keras\.ops\.mean"):
        bound(
            outputs_as_they_are(3),
            tf.TensorSpec([3]),
            loss="mse",
            metrics=[lambda y, outputs: keras.ops.mean(keras.ops.abs(y - outputs))],
        )


@pytest.mark.parametrize(
    ("loss", "y", "outputs", "expected"),
    [
        (SPARSE, [2, 0], [[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]], 0.5),
        ("sparse_categorical_crossentropy", [1, 0], [[0.1, 0.9], [0.8, 0.2]], 1.0),
        ("categorical_crossentropy", [[0.0, 1.0], [1.0, 0.0]], [[0.1, 0.9], [0.2, 0.8]], 0.5),
        (keras.losses.BinaryCrossentropy(from_logits=True), [[1.0], [0.0]], [[0.3], [-0.3]], 1.0),
        ("binary_crossentropy", [[1.0], [0.0]], [[0.3], [0.6]], 0.0),
        # By the shapes, as Keras does
        (lambda y, outputs: outputs[:, 0], [1, 0], [[0.1, 0.9], [0.8, 0.2]], 1.0),
        ("mse", [[0.0, 1.0], [1.0, 0.0]], [[0.1, 0.9], [0.2, 0.8]], 0.5),
        ("mse", [[1.0], [0.0]], [[0.6], [0.6]], 0.5),
    ],
)
def test_accuracy_is_the_one_of_the_loss_or_of_the_shapes(loss, y, outputs, expected):
    model = outputs_as_they_are(len(outputs[0]))
    assert values(model, y, outputs, loss=loss, metrics=["accuracy"]) == {"accuracy": expected}


@pytest.mark.parametrize("average", [None, "macro", "micro"])
def test_metrics_that_make_their_state_late_equal_keras(average):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="sigmoid")])
    generator = np.random.default_rng(4)
    x, y = generator.normal(size=(12, 4)).astype(np.float32), generator.integers(0, 2, (12, 3)).astype(np.float32)
    metrics = [keras.metrics.F1Score(average=average, threshold=0.5), keras.metrics.R2Score()]
    core = core_of(model, "binary_crossentropy", metrics)
    sums = run(core, (x[None], y[None], np.ones((1, 12), np.float32))).metrics
    expected = keras.metrics.F1Score(average=average, threshold=0.5), keras.metrics.R2Score()
    for metric in expected:
        metric.update_state(y, model(x))
    found = core.metric_results(sums)
    assert list(found) == ["f1_score", "r2_score"]
    for value, metric in zip(found.values(), expected, strict=True):
        assert np.shape(value) == np.shape(metric.result())
        np.testing.assert_allclose(value, metric.result(), rtol=1e-5)


@pytest.mark.parametrize(
    "metric",
    [
        keras.metrics.MeanIoU(2, sparse_y_pred=False),
        keras.metrics.OneHotMeanIoU(3),
        keras.metrics.AUC(),
        keras.metrics.Precision(),
        keras.metrics.RootMeanSquaredError(),
        keras.metrics.CosineSimilarity(),
    ],
    ids=lambda metric: metric.name,
)
def test_padding_counts_in_no_metric(metric):
    generator = np.random.default_rng(5)
    outputs = generator.uniform(size=(6, 4, 3)).astype(np.float32)
    one_hot = metric.name not in ("mean_io_u",)
    y = generator.integers(0, 2, (6, 4, 3) if one_hot else (6, 4)).astype(np.float32 if one_hot else np.int32)
    kind = type(metric)
    expected = kind.from_config(metric.get_config())
    expected.update_state(y[:4], outputs[:4])
    goal = {"loss": lambda y, outputs: outputs[:, 0, 0], "metrics": [metric]}
    (found,) = values(outputs_as_they_are(4, 3), y, outputs, [1, 1, 1, 1, 0, 0], **goal).values()
    assert found == pytest.approx(float(expected.result()), rel=1e-5)


def test_labels_that_a_metric_cannot_read_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"'f1_score' does not suit labels int32\[\] and outputs \[3\]"):
        bound(outputs_as_they_are(3), classes(), loss=SPARSE, metrics=[keras.metrics.F1Score()])
    with pytest.raises(ConfigError, match="metrics='accuracy': expected a list"):
        bound(outputs_as_they_are(3), classes(), loss=SPARSE, metrics="accuracy")
    metric = keras.metrics.MeanSquaredError(name="loss")
    with pytest.raises(ConfigError, match="'loss' is reported anyway"):
        bound(outputs_as_they_are(3), tf.TensorSpec([3]), loss="mse", metrics=[metric])
    with pytest.raises(ConfigError, match="Invalid `metrics`"):
        bound(two_outputs(), (tf.TensorSpec([3]), tf.TensorSpec([3])), loss="mse", metrics={"c": ["mae"]})


def test_a_metric_whose_result_is_its_variable():
    class Total(keras.metrics.Sum):
        def update_state(self, y, outputs, sample_weight=None):
            super().update_state(outputs, sample_weight)

        def result(self):
            return self.total

    goal = {"loss": "mse", "metrics": [Total(name="total")]}
    assert values(outputs_as_they_are(1), np.ones((3, 1)), np.ones((3, 1)), [1, 1, 0], **goal) == {"total": 2.0}


def test_names_are_those_of_keras():
    goal = {"loss": "mse", "metrics": ["mae", keras.metrics.MeanSquaredError(name="mae")]}
    assert list(values(outputs_as_they_are(2), np.ones((3, 2)), np.ones((3, 2)), **goal)) == ["mae", "mae_1"]


def test_a_metric_that_was_used_before_starts_again():
    used = keras.metrics.MeanAbsoluteError()
    used.update_state([1.0], [9.0])
    assert values(outputs_as_they_are(1), [[1.0]], [[2.0]], loss="mse", metrics=[used]) == {"mean_absolute_error": 1.0}


def test_state_adds_up_over_batches_and_leaves_the_metrics_alone():
    goal = {"loss": "mse", "metrics": ["binary_accuracy", keras.metrics.FalsePositives(thresholds=[0.2, 0.8])]}
    objective = bound(outputs_as_they_are(1), tf.TensorSpec([1], tf.int32), **goal)
    variables = objective.totals.variables
    generator = np.random.default_rng(6)
    y = tf.constant(generator.integers(0, 2, (10, 1)), tf.int32)
    outputs = tf.constant(generator.uniform(size=(10, 1)), tf.float32)

    def sums(part: slice) -> list[tf.Tensor]:
        return objective([], [], (outputs[part], y[part], tf.ones([len(y[part])])), training=False).metrics

    parts = [sums(slice(0, 5)), sums(slice(5, 10))]
    assert [tuple(part.shape) for part in parts[0]] == [tuple(variable.shape) for variable in variables]
    assert all(float(tf.reduce_sum(tf.abs(variable.value))) == 0 for variable in variables)
    for total, *each in zip(sums(slice(0, 10)), *parts, strict=True):
        np.testing.assert_array_equal(total, sum(each))

"""Loss and gradients as a pure function."""

from __future__ import annotations

from tfpar.config import ConfigError
from tfpar.training.core import Core, build_metrics, per_example_loss

import keras
import numpy as np
import pytest
import tensorflow as tf

SPARSE = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def classifier(**layer_options) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(8, activation="tanh", **layer_options),
            keras.layers.Dense(3),
        ]
    )


def batch(accumulate_steps: int, size: int, weight=None):
    generator = np.random.default_rng(1)
    x = tf.constant(generator.normal(size=(accumulate_steps, size, 5)), tf.float32)
    y = tf.constant(generator.integers(0, 3, (accumulate_steps, size)), tf.int32)
    weight = np.ones((accumulate_steps, size)) if weight is None else np.asarray(weight)
    return x, y, tf.constant(weight, tf.float32)


def values(variables):
    return [tf.convert_to_tensor(variable.value) for variable in variables]


def run(core: Core, data, seed=(0, 0), jit=False):
    model = core.model
    function = tf.function(core.accumulate, jit_compile=jit, autograph=False)
    return function(
        values(model.trainable_variables),
        values(model.non_trainable_variables),
        data,
        tf.constant(seed, tf.int32),
        None,
    )


@pytest.mark.parametrize("jit", [False, True])
def test_sums_equal_keras_loss_times_count(jit):
    model = classifier()
    core = Core(model, per_example_loss(SPARSE), build_metrics(["sparse_categorical_accuracy"]))
    x, y, _ = data = batch(1, 12)
    sums = run(core, data, jit=jit)
    with tf.GradientTape() as tape:
        loss = SPARSE(y[0], model(x[0]))
    gradients = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
    assert sums.count.numpy() == 12
    np.testing.assert_allclose(sums.loss, 12 * loss, rtol=1e-5)
    for ours, theirs in zip(sums.gradients, gradients, strict=True):
        np.testing.assert_allclose(ours, 12 * theirs, rtol=1e-4, atol=1e-5)
    accuracy = keras.metrics.SparseCategoricalAccuracy()(y[0], model(x[0]))
    assert core.metric_results([part.numpy() for part in sums.metrics])["sparse_categorical_accuracy"] == pytest.approx(
        float(accuracy)
    )


def test_padding_contributes_nothing():
    core = Core(classifier(), per_example_loss(SPARSE), build_metrics(["sparse_categorical_accuracy"]))
    x, y, weight = batch(1, 8, [[1, 1, 1, 1, 1, 0, 0, 0]])
    padded = run(core, (x, y, weight))
    cut = run(core, (x[:, :5], y[:, :5], weight[:, :5]))
    assert padded.count.numpy() == 5
    for one, other in zip(tf.nest.flatten(padded), tf.nest.flatten(cut), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("jit", [False, True])
def test_micro_batches_add_up_to_the_whole_batch(jit):
    core = Core(classifier(), per_example_loss(SPARSE), build_metrics(["sparse_categorical_accuracy"]))
    whole = batch(1, 12)
    micro = tf.nest.map_structure(lambda part: tf.reshape(part, [4, 3, *part.shape[2:]]), whole)
    for one, other in zip(
        tf.nest.flatten(run(core, whole, jit=jit)), tf.nest.flatten(run(core, micro, jit=jit)), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_regularisation_counts_once_per_example():
    model = classifier(kernel_regularizer=keras.regularizers.L2(0.1))
    x, y, _ = data = batch(1, 6)
    sums = run(Core(model, per_example_loss(SPARSE)), data)
    expected = SPARSE(y[0], model(x[0])) + 0.1 * tf.reduce_sum(model.trainable_variables[0].value ** 2)
    np.testing.assert_allclose(sums.loss / sums.count, expected, rtol=1e-5)


def test_dropout_depends_on_the_seed_alone():
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dropout(0.5), keras.layers.Dense(3)])
    core = Core(model, per_example_loss(SPARSE))
    data = batch(1, 64)
    first, again, other = (run(core, data, seed).loss.numpy() for seed in ((1, 2), (1, 2), (1, 3)))
    assert first == again
    assert first != other


def test_micro_batches_draw_different_dropout():
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dropout(0.5), keras.layers.Dense(3)])
    core = Core(model, per_example_loss(SPARSE))
    x, y, weight = batch(1, 64)
    twice = run(core, tuple(tf.concat([part, part], axis=0) for part in (x, y, weight))).loss.numpy()
    once = run(core, (x, y, weight)).loss.numpy()
    assert abs(twice - 2 * once) > 1e-3


def test_loss_scale_is_exact_for_powers_of_two():
    core = Core(classifier(), per_example_loss(SPARSE))
    data = batch(1, 12)
    params = values(core.model.trainable_variables)
    plain = core.accumulate(params, [], data, tf.constant([0, 0]), None)
    scaled = core.accumulate(params, [], data, tf.constant([0, 0]), tf.constant(1024.0))
    for one, other in zip(plain.gradients, scaled.gradients, strict=True):
        np.testing.assert_array_equal(one * 1024.0, other)
    assert plain.loss == scaled.loss


def test_embedding_gradients_are_dense():
    model = keras.Sequential([keras.Input((4,), dtype="int32"), keras.layers.Embedding(7, 3), keras.layers.Dense(7)])
    core = Core(model, per_example_loss(SPARSE))
    tokens = tf.constant([[[1, 2, 3, 1], [0, 0, 6, 5]]], tf.int32)
    sums = run(core, (tokens, tokens, tf.ones([1, 2])))
    assert sums.gradients[0].shape == (7, 3)
    np.testing.assert_array_equal(sums.gradients[0][4], np.zeros(3))  # row 4 does not occur


def test_a_reduced_loss_is_refused():
    core = Core(classifier(), lambda y, outputs: tf.reduce_mean(outputs))
    with pytest.raises(ConfigError, match="one value per example"):
        run(core, batch(1, 4))


def test_unknown_loss_and_metric_are_refused():
    with pytest.raises(ConfigError, match="no_such_loss"):
        per_example_loss("no_such_loss")
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
    core = Core(masked, per_example_loss(SPARSE))
    data = (tf.ones([1, 4, 6], tf.int32), tf.ones([1, 4, 6], tf.int32), tf.ones([1, 4]))
    with pytest.raises(ConfigError, match="carry a mask"):
        run(core, data)


def test_a_loss_with_another_number_of_values_is_refused():
    core = Core(classifier(), lambda y, outputs: tf.zeros([3]))
    with pytest.raises(ConfigError, match="returned 3 values for 8 examples"):
        run(core, batch(1, 8))


@pytest.mark.parametrize("average", [None, "macro", "micro"])
def test_metrics_that_make_their_state_late_equal_keras(average):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="sigmoid")])
    generator = np.random.default_rng(4)
    x, y = generator.normal(size=(12, 4)).astype(np.float32), generator.integers(0, 2, (12, 3)).astype(np.float32)
    metrics = build_metrics([keras.metrics.F1Score(average=average, threshold=0.5)], None, model.outputs[0].shape)
    core = Core(model, per_example_loss("binary_crossentropy"), metrics)
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

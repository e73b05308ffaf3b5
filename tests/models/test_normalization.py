"""Batch normalisation: padding does not count, and synchronised replicas equal one device."""

from __future__ import annotations

import pathlib
import threading
from typing import Any

from tfpar.models import BatchNormalization, example_weights, uses_synchronized_statistics
from tfpar.models.normalization import current_example_weights

import keras
import numpy as np
import pytest
import tensorflow as tf


def examples(count: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(1.5, 2.0, (count, *shape)).astype("float32")


def gradient_of(layer: keras.layers.Layer, x: np.ndarray, weight: Any = None, mask: Any = None) -> tuple[Any, Any]:
    """Returns the output, and the gradient of a loss with weighted examples (weight 1 by default)."""
    x = tf.constant(x)
    counts = tf.ones(x.shape[0]) if weight is None else tf.constant(weight, tf.float32)
    with tf.GradientTape() as tape:
        tape.watch(x)
        if weight is None:
            y = layer(x, training=True, mask=mask)
        else:
            with example_weights(counts):
                y = layer(x, training=True, mask=mask)
        per_example = tf.reduce_sum(tf.reshape(tf.sin(y) + 0.3 * y**2, (x.shape[0], -1)), -1)
        loss = tf.reduce_sum(counts * per_example)
    return y.numpy(), tape.gradient(loss, x).numpy()


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("shape", [(5,), (4, 3, 5)])
def test_without_weights_the_layer_matches_keras(shape: tuple[int, ...], axis: int) -> None:
    ours = BatchNormalization(axis, momentum=0.9, epsilon=1e-5)
    theirs = keras.layers.BatchNormalization(axis=axis, momentum=0.9, epsilon=1e-5)
    x = examples(8, *shape)
    for (y, g), (expected_y, expected_g) in [(gradient_of(ours, x), gradient_of(theirs, x))] * 2:
        np.testing.assert_allclose(y, expected_y, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(g, expected_g, rtol=1e-3, atol=1e-4)
    for ours_weight, theirs_weight in zip(ours.weights, theirs.weights, strict=True):
        np.testing.assert_allclose(ours_weight, theirs_weight, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ours(x), theirs(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(5,), (4, 3, 5)])
@pytest.mark.parametrize("jit_compile", [False, True])
def test_padding_does_not_affect_statistics_or_gradients(shape: tuple[int, ...], jit_compile: bool) -> None:
    padded, plain = BatchNormalization(), BatchNormalization()
    x = examples(6, *shape)
    x[4:] = 1000.0
    padded.build(x.shape)
    weight = np.array([1, 1, 1, 1, 0, 0], "float32")
    run = tf.function(lambda: gradient_of_graph(padded, x, weight), jit_compile=jit_compile, autograph=False)
    y, g, mean, variance = run()
    expected_y, expected_g = gradient_of(plain, x[:4])
    np.testing.assert_allclose(y[:4], expected_y, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(g[:4], expected_g, rtol=1e-3, atol=1e-4)
    np.testing.assert_array_equal(g[4:], np.zeros_like(g[4:]))
    np.testing.assert_allclose(mean, plain.moving_mean, rtol=1e-5)
    np.testing.assert_allclose(variance, plain.moving_variance, rtol=1e-5)


def gradient_of_graph(layer: keras.layers.Layer, x: Any, weight: Any) -> list[tf.Tensor]:
    """Like `gradient_of`, but pure, through `stateless_call`, like the training step."""
    x = tf.convert_to_tensor(x)
    with tf.GradientTape() as tape:
        tape.watch(x)
        with example_weights(weight):
            y, state = layer.stateless_call(
                [tf.convert_to_tensor(v) for v in layer.trainable_variables],
                [tf.convert_to_tensor(v) for v in layer.non_trainable_variables],
                x,
                training=True,
            )
        per_example = tf.reduce_sum(tf.reshape(tf.sin(y) + 0.3 * y**2, (x.shape[0], -1)), -1)
        loss = tf.reduce_sum(weight * per_example)
    return [y, tape.gradient(loss, x), *state]


def test_weights_act_like_repetitions() -> None:
    weighted, repeated = BatchNormalization(), BatchNormalization()
    x = examples(3, 2, 4)
    y, g = gradient_of(weighted, x, [1.0, 3.0, 2.0])
    expected_y, expected_g = gradient_of(repeated, np.repeat(x, [1, 3, 2], axis=0))
    np.testing.assert_allclose(y, expected_y[[0, 1, 4]], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(g, expected_g[[0, 1, 4]] * np.reshape([1, 3, 2], (3, 1, 1)), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(weighted.moving_variance, repeated.moving_variance, rtol=1e-5)


def test_a_batch_of_padding_alone_changes_nothing() -> None:
    layer = BatchNormalization(momentum=0.7)
    gradient_of(layer, examples(8, 5))
    before = [weight.numpy() for weight in layer.weights]
    y, g = gradient_of(layer, examples(4, 5, seed=1), np.zeros(4))
    assert np.isfinite(y).all()
    np.testing.assert_array_equal(g, np.zeros_like(g))
    for weight, old in zip(layer.weights, before, strict=True):
        np.testing.assert_array_equal(weight, old)
    np.testing.assert_allclose(y, layer(examples(4, 5, seed=1), training=False), rtol=1e-5, atol=1e-5)


def test_a_large_mean_loses_no_precision() -> None:
    x = (10_000.0 + examples(64, 3)).astype("float32")
    y, _ = gradient_of(BatchNormalization(epsilon=1e-6), x)
    exact = x.astype("float64")
    exact = (exact - exact.mean(0)) / np.sqrt(exact.var(0) + 1e-6)
    np.testing.assert_allclose(y, exact, atol=2e-3)


def test_statistics_are_float32_under_mixed_precision() -> None:
    layer = BatchNormalization(dtype="mixed_float16", momentum=0.0)
    # The sum of squares exceeds 65504, the largest float16.
    x = (300.0 + 10.0 * examples(512, 2)).astype("float16")
    with example_weights(tf.ones(512)):
        y = layer(x, training=True)
    assert y.dtype == tf.float16
    np.testing.assert_allclose(layer.moving_mean, x.astype("float64").mean(0), rtol=1e-5)
    np.testing.assert_allclose(layer.moving_variance, x.astype("float64").var(0), rtol=1e-4)


def test_a_mask_and_weights_work_together() -> None:
    x = examples(3, 4, 2)
    mask = np.array([[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]], bool)
    layer = BatchNormalization(momentum=0.0)
    gradient_of(layer, x, [1.0, 1.0, 0.0], mask)
    kept = np.concatenate([x[0, :2], x[1]])
    np.testing.assert_allclose(layer.moving_mean, kept.mean(0), rtol=1e-5)
    np.testing.assert_allclose(layer.moving_variance, kept.var(0), rtol=1e-5)


def test_a_frozen_layer_uses_its_moving_statistics() -> None:
    layer = BatchNormalization()
    gradient_of(layer, examples(8, 3))
    layer.trainable = False
    before = layer.moving_mean.numpy()
    np.testing.assert_allclose(layer(examples(8, 3), training=True), layer(examples(8, 3), training=False))
    np.testing.assert_array_equal(layer.moving_mean, before)


def test_weights_of_another_batch_size_are_refused() -> None:
    layer = BatchNormalization()
    with (
        example_weights(tf.ones(4)),
        pytest.raises(ValueError, match="received 12 examples, but the step has weights for 4"),
    ):
        layer(examples(12, 3), training=True)


@pytest.mark.parametrize("arguments", [{"axis": 0}, {"renorm": True}])
def test_unsupported_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        BatchNormalization(**arguments)


def test_weights_nest_and_belong_to_their_thread() -> None:
    seen: list[Any] = []
    with example_weights(tf.ones(2)):
        with example_weights(tf.zeros(2)):
            assert float(tf.reduce_sum(current_example_weights())) == 0.0
        assert float(tf.reduce_sum(current_example_weights())) == 2.0
        thread = threading.Thread(target=lambda: seen.append(current_example_weights()))
        thread.start()
        thread.join()
    assert seen == [None]
    assert current_example_weights() is None


def test_the_layer_can_be_saved_and_loaded(tmp_path: pathlib.Path) -> None:
    model = keras.Sequential([keras.Input((3,)), BatchNormalization(momentum=0.8, epsilon=1e-4, synchronized=True)])
    model(examples(8, 3), training=True)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras", safe_mode=True)
    (layer,) = loaded.layers
    assert type(layer) is BatchNormalization
    assert (layer.momentum, layer.epsilon, layer.synchronized) == (0.8, 1e-4, True)
    np.testing.assert_array_equal(loaded(examples(8, 3)), model(examples(8, 3)))


def test_synchronized_statistics_are_detected_in_nested_layers() -> None:
    def wrapped(layer: keras.layers.Layer) -> keras.Model:
        inner = keras.Sequential([keras.Input((4, 3)), keras.layers.TimeDistributed(layer)])
        return keras.Sequential([keras.Input((4, 3)), inner])

    assert uses_synchronized_statistics(wrapped(BatchNormalization(synchronized=True)))
    assert uses_synchronized_statistics(wrapped(keras.layers.BatchNormalization(synchronized=True)))
    assert not uses_synchronized_statistics(wrapped(BatchNormalization()))
    assert not uses_synchronized_statistics(wrapped(keras.layers.LayerNormalization()))


def mirrored(replicas: int) -> tf.distribute.Strategy:
    # Not through collectives: MirroredStrategies of different sizes in one process would share their group keys.
    return tf.distribute.MirroredStrategy(
        [f"CPU:{index}" for index in range(replicas)], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )


def normalized_network() -> keras.Model:
    """Two synchronised layers, after a convolution and after a dense layer, with fixed initial weights."""
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            keras.layers.Conv2D(4, 3, use_bias=False),
            BatchNormalization(synchronized=True, momentum=0.9),
            keras.layers.Activation("tanh"),
            keras.layers.Flatten(),
            keras.layers.Dense(5, use_bias=False),
            BatchNormalization(synchronized=True, momentum=0.9),
        ]
    )


def training_step(model: keras.Model, x: tf.Tensor, weight: tf.Tensor) -> tuple[Any, Any, Any]:
    """Outputs, gradients of the weighted loss sum, and new batch statistics, from the weights of this replica."""
    params = [tf.convert_to_tensor(v.value) for v in model.trainable_variables]
    state = [tf.convert_to_tensor(v.value) for v in model.non_trainable_variables]
    with tf.GradientTape() as tape:
        tape.watch(params)
        with example_weights(weight):
            y, new_state = model.stateless_call(params, state, x, training=True)
        loss = tf.reduce_sum(weight * tf.reduce_sum(tf.sin(3.0 * y) + y**3, -1))
    return y, tape.gradient(loss, params), new_state


@pytest.mark.parametrize(
    "weights",
    [
        [[1, 1, 1, 1], [1, 1, 1, 1]],
        [[1, 1, 1, 1], [1, 0, 0, 0]],
        [[1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]],
    ],
    ids=["two", "two, uneven", "three, one without an example"],
)
def test_synchronized_replicas_equal_one_device(weights: list[list[float]]) -> None:
    replicas = len(weights)
    x = examples(4 * replicas, 6, 6, 2)
    flat_weights = np.array(weights, "float32").reshape(-1)
    real = flat_weights > 0
    y, gradients, state = training_step(normalized_network(), tf.constant(x[real]), tf.constant(flat_weights[real]))

    strategy = mirrored(replicas)
    with strategy.scope():
        model = normalized_network()

    def spread(values: np.ndarray) -> Any:
        parts = np.split(values, replicas)
        return strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(parts[context.replica_id_in_sync_group])
        )

    @tf.function(autograph=False)
    def step(x: Any, weight: Any) -> tuple[Any, Any, Any]:
        outputs, gradients, state = strategy.run(training_step, (model, x, weight))
        return (
            strategy.experimental_local_results(outputs),
            [strategy.reduce("SUM", gradient, axis=None) for gradient in gradients],
            [strategy.experimental_local_results(value) for value in state],
        )

    replica_outputs, summed, states = step(spread(x), spread(flat_weights))
    np.testing.assert_allclose(np.concatenate(replica_outputs)[real], y, rtol=1e-4, atol=1e-5)
    for gradient, expected in zip(summed, gradients, strict=True):
        np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
    for of_replicas, expected in zip(states, state, strict=True):
        for value in of_replicas:
            np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)
            np.testing.assert_array_equal(value, of_replicas[0])


def test_unsynchronized_replicas_keep_their_own_statistics() -> None:
    strategy = mirrored(2)
    with strategy.scope():
        layer = BatchNormalization(momentum=0.0)
        layer.build((None, 3))
    x = examples(8, 3)
    parts = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(x[4 * context.replica_id_in_sync_group :][:4])
    )

    def moving_mean(x: tf.Tensor) -> tf.Tensor:
        return gradient_of_graph(layer, x, tf.ones(4))[2]

    means = strategy.experimental_local_results(
        tf.function(lambda x: strategy.run(moving_mean, (x,)), autograph=False)(parts)
    )
    np.testing.assert_allclose(means, [x[:4].mean(0), x[4:].mean(0)], rtol=1e-5)

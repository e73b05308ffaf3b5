"""Losses of one value for a whole batch: the numbers of `fit`, or refused where parts do not add up."""

from __future__ import annotations

import tfpar
from tfpar import inputs
from tfpar.config import ConfigError
from tfpar.training.objective.outputs import examples_of
from tfpar.training.objective.whole_loss import is_mean, reads_other_examples

import keras
import numpy as np
import pytest
import tensorflow as tf

layers, ops = keras.layers, keras.ops
EXAMPLES, BATCH = 17, 8  # the last batch has one example


def mean_square(y, outputs):
    return ops.mean(ops.square(y - outputs))


def total_square(y, outputs):
    return ops.sum(ops.square(y - outputs))


def among_others(y, outputs):
    """In-batch negatives: each example is to be nearest to its own label."""
    count = ops.shape(outputs)[0]
    scores = ops.matmul(ops.reshape(outputs, (count, -1)), ops.transpose(ops.reshape(y, (count, -1))))
    return keras.losses.sparse_categorical_crossentropy(ops.arange(count), scores, from_logits=True)


def normalised(y, outputs):
    return ops.mean(ops.square(y - outputs), axis=(1, 2, 3)) / ops.mean(y)


class Scaled(keras.losses.MeanSquaredError):
    """Does something after the reduction."""

    def __call__(self, *args, **kwargs):
        return 10.0 * super().__call__(*args, **kwargs)


def images() -> keras.Model:
    return keras.Sequential([keras.Input((4, 4, 1)), layers.Conv2D(1, 3, padding="same", activation="sigmoid")])


def divided() -> keras.Model:
    """A model with a layer that a model axis divides."""
    return keras.Sequential(
        [keras.Input((4, 4, 1)), layers.Flatten(), layers.Dense(512), layers.Dense(16), layers.Reshape((4, 4, 1))]
    )


def numbers() -> keras.Model:
    """Outputs `[m]`, whose last dim is that of examples."""
    return keras.Sequential([keras.Input((4, 4, 1)), layers.Flatten(), layers.Dense(1), layers.Reshape(())])


def data(build) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(EXAMPLES, 4, 4, 1)).astype(np.float32)
    return x, x[:, 0, 0, 0] if build is numbers else (x > 0).astype(np.float32)


def trainer(build, loss, replicas=1, **options) -> tfpar.Trainer:
    several = {"strategy": "mirrored", "devices": replicas} if replicas > 1 else {"strategy": "one_device"}
    options = {"global_batch_size": BATCH, "shuffle": False, "jit_compile": "false", **several, **options}
    return tfpar.Trainer(build, keras.optimizers.SGD(0.1), loss, **options)


@pytest.mark.parametrize(
    ("build", "loss", "replicas", "options"),
    [
        (images, mean_square, 1, {}),
        (images, mean_square, 2, {}),
        (images, mean_square, 1, {"jit_compile": "true"}),
        (images, keras.losses.Dice(), 1, {}),
        (images, keras.losses.Tversky(), 1, {}),
        (images, total_square, 1, {}),
        (images, Scaled(), 1, {}),
        (images, Scaled(), 2, {}),
        (images, among_others, 1, {}),
        (images, normalised, 1, {}),
        (numbers, "mse", 1, {}),
        (numbers, "mae", 2, {}),
        (numbers, "huber", 1, {"accumulate_steps": 2, "remainder": "drop"}),
    ],
)
def test_an_epoch_gives_the_numbers_of_fit(build, loss, replicas, options):
    def seeded() -> keras.Model:
        keras.utils.set_random_seed(3)
        return build()

    x, y = data(build)
    if "remainder" in options:
        x, y = x[: EXAMPLES - 1], y[: EXAMPLES - 1]
    reference = seeded()
    reference.compile(keras.optimizers.SGD(0.1), loss, jit_compile=False)
    expected = reference.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history["loss"]
    ours = trainer(seeded, loss, replicas, **options)
    np.testing.assert_allclose(ours.fit(x, y, epochs=2).history["loss"], expected, rtol=1e-4)
    for one, other in zip(ours.model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    assert ours.evaluate(x, y)["loss"] == pytest.approx(reference.evaluate(x, y, BATCH, verbose=0), rel=1e-4)


@pytest.mark.parametrize("loss", [keras.losses.Dice(), total_square, keras.losses.Dice(reduction="sum")])
@pytest.mark.parametrize("options", [{"replicas": 2}, {"accumulate_steps": 2}])
def test_what_parts_do_not_add_up_to_is_refused(loss, options):
    with pytest.raises(ConfigError, match=r"not the mean of what it returns for the 2 parts .*axis=\(1, 2, 3\)"):
        trainer(images, loss, **options).fit(*data(images), epochs=1)


@pytest.mark.parametrize("options", [{"replicas": 2}, {"accumulate_steps": 2}])
def test_values_that_depend_on_other_examples_are_those_of_parts_with_a_warning(options, caplog):
    x, y = (part[:BATCH] for part in data(images))
    model = images()
    half = BATCH // 2
    expected = np.mean([among_others(y[rows], model(x[rows])) for rows in (slice(half), slice(half, None))])
    ours = trainer(images, among_others, **options)
    ours.model.set_weights(model.get_weights())
    history = ours.fit(x, y, epochs=1).history
    assert history["loss"][0] == pytest.approx(expected, rel=1e-5)
    assert caplog.text.count("'among_others' compares each example with the others of its part") == 1


@pytest.mark.parametrize(
    ("loss", "reads"),
    [
        (among_others, True),
        (normalised, True),
        (keras.losses.Circle(), True),
        (lambda y, outputs: ops.mean(ops.square(y - outputs), axis=(1, 2, 3)), False),
        (lambda y, outputs: ops.square(y - outputs + keras.random.normal(ops.shape(y))), False),
        (lambda y, outputs: ops.reshape(y, (7, -1)) - 1.0, False),  # fails on other numbers of examples
        ("mse", False),
    ],
)
def test_what_reads_other_examples_is_told(loss, reads):
    loss = keras.losses.get(loss) if isinstance(loss, str | keras.losses.Loss) else loss
    spec = tf.TensorSpec((7, 32, 32, 1))
    y, outputs = (values for part in (spec, spec) for values in examples_of(part))
    if isinstance(loss, keras.losses.Circle):
        y, outputs = tf.constant([0, 1, 0, 0, 1, 1, 0]), tf.reshape(outputs, [7, -1])
    assert reads_other_examples(loss, getattr(loss, "call", loss), y, outputs) is reads


@pytest.mark.parametrize(
    ("loss", "mean"),
    [
        (keras.losses.Dice(), False),
        (keras.losses.Tversky(), False),
        (total_square, False),
        (mean_square, True),
        (lambda y, outputs: ops.mean(keras.losses.binary_crossentropy(y, outputs)), True),
    ],
)
@pytest.mark.parametrize("shape", [(7, 4), (7, 64, 64, 1)])
def test_what_is_a_mean_is_told_from_large_outputs_too(loss, mean, shape):
    """Parts of many positions have nearly the same Dice loss if they are alike."""
    spec = tf.TensorSpec(shape)
    y, outputs = (values for part in (spec, spec) for values in examples_of(part))
    assert is_mean(loss, y, outputs) is mean


def test_an_own_reduction_of_masked_positions_is_refused_in_parts():
    def build() -> keras.Model:
        return keras.Sequential([keras.Input((4, 1)), layers.Masking(), layers.Dense(1)])

    x = np.ones((EXAMPLES, 4, 1), np.float32)
    with pytest.raises(ConfigError, match="not the mean of what it returns for the 2 parts"):
        trainer(build, Scaled(), 2).fit(x, x, epochs=1)


def test_padding_is_refused_where_it_would_count():
    x, y = data(images)
    stream = inputs.from_dataset(tf.data.Dataset.from_tensor_slices((x, y)))
    with pytest.raises(ConfigError, match=r"'mean_square' returns one value for a batch.*--remainder=drop"):
        trainer(images, mean_square, 2).fit(stream, epochs=1)
    with pytest.raises(ConfigError, match=r"'among_others' compares .*--remainder=drop"):
        trainer(divided, among_others, 2, mesh="model:2").fit(x, y, epochs=1)


def test_sample_weights_are_refused():
    with pytest.raises(ConfigError, match=r"sample weights cannot weigh its examples.*one value per example"):
        trainer(images, mean_square).fit(*data(images), sample_weight=np.ones(EXAMPLES), epochs=1)

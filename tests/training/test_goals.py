"""What `fit` computes on one process is what the step computes on any number of replicas, for any goal."""

from __future__ import annotations

from tests.training.goals import LEARNING_RATE, Training, fit
from tfpar.config import ConfigError
from tfpar.training.objective import Goal

import keras
import numpy as np
import pytest
import tensorflow as tf

EXAMPLES = 22
BATCH = 11  # two replicas with two micro-batches each pad it to 12

# Replicas, micro-batches, XLA. How sums travel hardly depends on the goal, so most goals run on two replicas only.
MIRRORED, XLA = (2, 2, False), (1, 2, True)
layouts = pytest.mark.parametrize("layout", [MIRRORED, XLA], ids=["mirrored", "xla"])


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(EXAMPLES, *shape)).astype(np.float32)


def classes(count: int, *shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, count, (EXAMPLES, *shape)).astype(np.int32)


def tokens(seed: int = 2) -> np.ndarray:
    """Sequences of 1 to 6 tokens, padded with 0."""
    draws = np.random.default_rng(seed)
    lengths = draws.integers(1, 7, EXAMPLES)
    return np.where(np.arange(6) < lengths[:, None], draws.integers(1, 9, (EXAMPLES, 6)), 0).astype(np.int32)


def check(build, data, layout, *, goal=None, batch=BATCH, **compile_options) -> None:
    """Compares an epoch and an evaluation with `fit` on one process."""
    replicas, accumulate_steps, jit_compile = layout
    history, evaluation, weights = fit(build, data, batch, **compile_options)
    goal = goal or Goal(**compile_options)
    training = Training(build, goal, data, replicas, jit_compile=jit_compile)
    assert training.evaluate(8) == pytest.approx(evaluation, rel=2e-5, abs=2e-6)
    assert training.train(batch, accumulate_steps) == pytest.approx(history, rel=2e-5, abs=2e-6)
    for ours, theirs in zip(training.weights(), weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)


def seeded(seed: int = 5) -> keras.initializers.Initializer:
    return keras.initializers.GlorotUniform(seed=seed)


def two_heads() -> keras.Model:
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(5, activation="tanh", kernel_initializer=seeded())(inputs)
    size = keras.layers.Dense(2, kernel_initializer=seeded(6), name="size")(hidden)
    kind = keras.layers.Dense(3, activation="softmax", kernel_initializer=seeded(7), name="kind")(hidden)
    return keras.Model(inputs, {"size": size, "kind": kind})


TWO_HEADS = {
    "loss": {"size": "mse", "kind": "sparse_categorical_crossentropy"},
    "loss_weights": {"size": 0.5, "kind": 2.0},
    "metrics": {"size": ["mae", "mse"], "kind": ["accuracy"]},
}


@layouts
def test_two_heads_by_name(layout):
    data = floats(4), {"size": floats(2, seed=8), "kind": classes(3)}
    check(two_heads, data, layout, **TWO_HEADS)


def test_losses_in_a_list_and_an_output_without_a_loss():
    def build():
        model = two_heads()
        return keras.Model(model.inputs, [model.output["size"], model.output["kind"]])

    data = floats(4), (floats(2, seed=8), classes(3))
    options = {"loss": ["mse", None], "metrics": [["mae"], ["accuracy"]], "loss_weights": [0.5, 1.0]}
    check(build, data, MIRRORED, **options)


def test_a_last_batch_of_another_size_counts_by_its_examples():
    data = floats(4), {"size": floats(2, seed=8), "kind": classes(3)}
    options = TWO_HEADS | {"metrics": None}
    history, _, weights = fit(two_heads, data, 8, **options)
    training = Training(two_heads, Goal(**options), data, 2)
    assert training.train(8, 2)["loss"] == pytest.approx(history["loss"], rel=2e-5)
    for ours, theirs in zip(training.weights(), weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)


def test_nested_outputs():
    def build():
        model = two_heads()
        return keras.Model(model.inputs, {"a": (model.output["size"], model.output["kind"]), "b": model.output["size"]})

    data = floats(4), {"a": (floats(2, seed=8), classes(3)), "b": floats(2, seed=9)}
    options = {
        "loss": {"a": ("mse", "sparse_categorical_crossentropy"), "b": "mae"},
        "metrics": {"a": (["mae"], ["accuracy"]), "b": ["mse"]},
    }
    check(build, data, MIRRORED, **options)


@keras.saving.register_keras_serializable("goals")
class Pair(keras.Model):
    """A subclassed model of two outputs: nothing of them is known before it is called."""

    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(3, kernel_initializer=seeded())
        self.second = keras.layers.Dense(1, kernel_initializer=seeded(6))

    def call(self, x, training=False):
        return self.first(x["left"]), self.second(x["right"])


def pair() -> keras.Model:
    model = Pair()
    model({"left": tf.zeros([1, 4]), "right": tf.zeros([1, 3])})
    return model


def test_a_subclassed_model_of_dict_inputs():
    data = {"left": floats(4), "right": floats(3, seed=4)}, (floats(3, seed=8), floats(1, seed=9))
    options = {"loss": ["mse", "mae"], "metrics": [["mae"], ["mse"]]}
    check(pair, data, MIRRORED, **options)


@keras.saving.register_keras_serializable("goals")
class Closeness(keras.layers.Layer):
    """Adds how far its two inputs are apart, a mean over the batch."""

    def call(self, pair):
        one, other = pair
        self.add_loss(keras.ops.mean(keras.ops.square(one - other)))
        return other


def autoencoder() -> keras.Model:
    inputs = keras.Input((4,))
    code = keras.layers.Dense(2, kernel_initializer=seeded(), kernel_regularizer=keras.regularizers.L2(0.01))(inputs)
    decoded = keras.layers.Dense(4, kernel_initializer=seeded(6))(code)
    return keras.Model(inputs, Closeness()([inputs, decoded]))


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_model_without_labels_that_adds_its_loss(replicas):
    # Equal shares without padding: what a model adds is a mean over its own batch.
    options = {"loss": None}
    history, evaluation, weights = fit(autoencoder, (floats(4),), 2, **options)
    training = Training(autoencoder, Goal(**options), (floats(4),), replicas)
    assert training.evaluate(22) == pytest.approx(evaluation, rel=2e-5)
    assert training.train(2) == pytest.approx(history, rel=2e-5)
    for ours, theirs in zip(training.weights(), weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)


def test_inputs_as_labels():
    def build():
        inputs = keras.Input((4,))
        return keras.Model(inputs, keras.layers.Dense(4, kernel_initializer=seeded())(inputs))

    x = floats(4)
    check(build, (x, x), MIRRORED, loss="mse", metrics=[keras.metrics.R2Score()])


# Weights per position


def tagger(*between: keras.layers.Layer) -> keras.Model:
    """A class for every token; the outputs carry the mask of the embedding."""
    inputs = keras.Input((6,), dtype="int32")
    hidden = keras.layers.Embedding(9, 4, mask_zero=True, embeddings_initializer=seeded())(inputs)
    for layer in between:
        hidden = layer(hidden)
    return keras.Model(inputs, keras.layers.Dense(4, kernel_initializer=seeded(8), name="tag")(hidden))


def recurrent() -> keras.Model:
    options = {"kernel_initializer": seeded(6), "recurrent_initializer": seeded(7)}
    return tagger(keras.layers.LSTM(3, return_sequences=True, **options))


def two_tasks() -> keras.Model:
    """Masked outputs beside one for each example, and a penalty: three different denominators."""
    model = tagger()
    embedded = model.layers[1].output
    pooled = keras.layers.GlobalAveragePooling1D()(embedded)
    kind = keras.layers.Dense(3, kernel_initializer=seeded(9), kernel_regularizer="l2", name="kind")(pooled)
    return keras.Model(model.inputs, {"tag": model.output, "kind": kind})


def sparse(**options) -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


@layouts
def test_a_mask_on_outputs(layout):
    options = {"loss": sparse(), "metrics": ["accuracy"], "weighted_metrics": ["sparse_categorical_crossentropy"]}
    check(recurrent, (tokens(), classes(4, 6)), layout, **options)


def some_ignored(y: np.ndarray) -> np.ndarray:
    return np.where(np.random.default_rng(9).uniform(size=y.shape) < 0.4, -1, y).astype(np.int32)


def unmasked() -> keras.Model:
    inputs = keras.Input((6,), dtype="int32")
    hidden = keras.layers.Embedding(9, 4, embeddings_initializer=seeded())(inputs)
    return keras.Model(inputs, keras.layers.Dense(4, kernel_initializer=seeded(8), name="tag")(hidden))


def test_a_class_that_the_loss_ignores():
    data = tokens(), some_ignored(classes(4, 6))
    check(unmasked, data, MIRRORED, loss=sparse(ignore_class=-1))


def test_a_class_that_the_loss_ignores_on_masked_outputs():
    data = tokens(), some_ignored(classes(4, 6))
    check(tagger, data, MIRRORED, loss=sparse(ignore_class=-1))


def weights(*shape: int) -> np.ndarray:
    return np.random.default_rng(11).uniform(0.0, 3.0, (EXAMPLES, *shape)).astype(np.float32)


def classifier():
    inputs = keras.Input((4,))
    return keras.Model(inputs, keras.layers.Dense(3, kernel_initializer=seeded())(inputs))


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean_with_sample_weight", "sum"])
def test_a_weight_for_each_example(reduction):
    def build():
        inputs = keras.Input((4,))
        return keras.Model(inputs, keras.layers.Dense(3, kernel_initializer=seeded(), kernel_regularizer="l2")(inputs))

    options = {"loss": sparse(reduction=reduction), "metrics": ["accuracy"], "weighted_metrics": ["accuracy"]}
    history, evaluation, expected = fit(build, (floats(4), classes(3), weights()), BATCH, **options)
    training = Training(build, Goal(**options), (floats(4), classes(3), weights()), 2)
    assert training.evaluate(8) == pytest.approx(evaluation, rel=2e-5)
    assert training.train(BATCH, 2) == pytest.approx(history, rel=2e-5)
    for ours, theirs in zip(training.weights(), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)


def test_weights_of_examples_may_have_a_negative_sum():
    """As advantages have: the mean is divided by their sum."""
    data = floats(4), classes(3), 1.0 - weights()
    options = {"loss": sparse(reduction="mean_with_sample_weight")}
    history, _, expected = fit(classifier, data, BATCH, **options)
    training = Training(classifier, Goal(**options), data, 2)
    assert training.train(BATCH, 2) == pytest.approx(history, rel=2e-5)
    for ours, theirs in zip(training.weights(), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean_with_sample_weight", "sum"])
@pytest.mark.parametrize("build", [unmasked, tagger])
def test_a_weight_for_each_position(build, reduction):
    options = {"loss": sparse(reduction=reduction), "metrics": ["accuracy"], "weighted_metrics": ["accuracy"]}
    check(build, (tokens(), classes(4, 6), weights(6)), MIRRORED, **options)


def test_a_weight_for_each_example_holds_for_all_its_positions():
    """Keras multiplies `[m, T]` by `[m]` only by chance; written out for each position it means the same."""
    options = {"loss": sparse(), "weighted_metrics": ["sparse_categorical_crossentropy"]}
    per_example = weights()
    written_out = np.repeat(per_example[:, None], 6, axis=1)
    history, evaluation, _ = fit(tagger, (tokens(), classes(4, 6), written_out), BATCH, **options)
    training = Training(tagger, Goal(**options), (tokens(), classes(4, 6), per_example), 2)
    assert training.evaluate(8) == pytest.approx(evaluation, rel=2e-5)
    assert training.train(BATCH, 2) == pytest.approx(history, rel=2e-5)


@layouts
def test_outputs_of_different_denominators(layout):
    y = {"tag": classes(4, 6), "kind": classes(3, seed=12)}
    sample_weight = {"tag": weights(6), "kind": weights()}
    options = {
        "loss": {"tag": sparse(), "kind": sparse(reduction="mean_with_sample_weight")},
        "loss_weights": {"tag": 0.7, "kind": 1.3},
        "metrics": {"kind": ["accuracy"]},
        "weighted_metrics": {"tag": ["accuracy"]},
    }
    check(two_tasks, (tokens(), y, sample_weight), layout, **options)


def test_loss_scaling_changes_nothing():
    y = {"tag": classes(4, 6), "kind": classes(3, seed=12)}
    options = {"loss": {"tag": sparse(), "kind": sparse()}}
    _, _, expected = fit(two_tasks, (tokens(), y), BATCH, **options)
    training = Training(two_tasks, Goal(**options), (tokens(), y), 2, scale_loss=True)
    training.train(BATCH, 2)
    for ours, theirs in zip(training.weights(), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)


def mean_of_examples(x, y, logits) -> np.ndarray:
    """The mean over examples of the mean over their own tokens."""
    losses = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True).numpy()
    mask = x > 0
    return np.mean((losses * mask).sum(axis=1) / mask.sum(axis=1))


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean_with_sample_weight"])
def test_examples_instead_of_positions(reduction):
    x, y = tokens(), classes(4, 6)
    goal = Goal(sparse(reduction=reduction), loss_weighting="examples")
    training = Training(tagger, goal, (x, y), 2)
    expected = mean_of_examples(x, y, training.model(x))
    assert training.evaluate(8)["loss"] == pytest.approx(expected, rel=1e-5)
    assert training.evaluate(EXAMPLES)["loss"] == pytest.approx(expected, rel=1e-5)
    assert training.train(EXAMPLES, 2)["loss"] == pytest.approx(expected, rel=1e-5)
    by_positions = Training(tagger, Goal(sparse()), (x, y))
    assert abs(by_positions.evaluate(8)["loss"] - expected) > 1e-3


def test_a_step_without_any_position_that_counts():
    """Keras' loss is 0 there, and so is the gradient."""
    y = np.full((EXAMPLES, 6), -1, np.int32)
    training = Training(unmasked, Goal(sparse(ignore_class=-1)), (tokens(), y), 2)
    before = training.weights()
    assert training.evaluate(8) == {"loss": 0.0}
    assert training.train(BATCH) == {"loss": 0.0}
    for one, other in zip(before, training.weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_weights_that_fit_no_value_are_refused():
    training = Training(unmasked, Goal(sparse()), (tokens(), classes(4, 6), weights(5)))
    with pytest.raises(ConfigError, match=r"shape \[m, 5\] do not fit the values of the loss, of shape \[m, 6\]"):
        training.evaluate(8)
    training = Training(unmasked, Goal(sparse()), (tokens(), classes(4, 6), (weights(), weights(), weights())))
    with pytest.raises(ConfigError, match="3 sample weights for 1 labels"):
        training.evaluate(8)


def test_one_denominator_needs_no_reduction_of_its_own():
    data = tokens(), classes(4, 6)
    assert Training(tagger, Goal(sparse()), data).core.objective.totals.own_denominator
    plain = Training(unmasked, Goal(sparse()), data).core.objective.totals
    assert (plain.terms, plain.own_denominator, plain.needs_scales) == (0, False, False)
    heads = floats(4), {"size": floats(2, seed=8), "kind": classes(3)}
    two = Training(two_heads, Goal(TWO_HEADS["loss"]), heads).core.objective.totals
    assert (two.terms, two.own_denominator, two.needs_scales) == (2, False, False)


@pytest.mark.parametrize("build", [recurrent, two_tasks])
def test_a_step_of_one_worker_alone_is_divided_by_its_own_numbers(build):
    """As with parameter servers."""
    y = {"tag": classes(4, 6), "kind": classes(3, seed=12)} if build is two_tasks else classes(4, 6)
    loss = {"tag": sparse(), "kind": sparse()} if build is two_tasks else sparse()
    history, _, expected = fit(build, (tokens(), y), EXAMPLES, loss=loss)
    training = Training(build, Goal(loss), (tokens(), y))
    core = training.core
    params, state = (
        [tf.convert_to_tensor(each.value) for each in variables]
        for variables in (core.model.trainable_variables, core.model.non_trainable_variables)
    )
    half = EXAMPLES // 2
    micro_batches = tf.nest.map_structure(lambda part: tf.reshape(part, [2, half, *part.shape[1:]]), (tokens(), y))
    step = tf.function(core.accumulate_alone, autograph=False)
    sums = step(params, state, (*micro_batches, tf.ones([2, half])), tf.constant([0, 0]))
    denominator = core.denominator(sums)
    assert float(sums.loss / denominator) == pytest.approx(history["loss"], rel=2e-5)
    values = [value for value, each in zip(expected, core.model.weights, strict=True) if each.trainable]
    for param, gradient, value in zip(params, sums.gradients, values, strict=True):
        np.testing.assert_allclose(param - LEARNING_RATE * gradient / denominator, value, rtol=2e-5, atol=2e-6)


def penalised() -> keras.Model:
    """Masked outputs and a penalty."""
    model = tagger()
    return keras.Model(
        model.inputs, keras.layers.Dense(4, kernel_initializer=seeded(3), kernel_regularizer="l2")(model.output)
    )


def two_taggers() -> keras.Model:
    """Two masked outputs, and one for each example whose loss hardly counts."""
    model = two_tasks()
    other = keras.layers.Dense(5, kernel_initializer=seeded(4), name="other")(model.layers[1].output)
    return keras.Model(model.inputs, {**model.output, "other": other})


@pytest.mark.parametrize("build", [penalised, two_taggers])
def test_steps_of_two_workers_alone_are_one_of_both_together(build):
    """Local steps weight workers by the positions of the main losses, in which these two differ most."""
    x, y = tokens(), classes(4, 6)
    order = np.argsort((x > 0).sum(axis=1))
    x, y, loss, factors = x[order], y[order], sparse(), None
    if build is two_taggers:
        y = {"tag": y, "other": classes(5, 6), "kind": classes(3)}
        loss, factors = dict.fromkeys(y, sparse()), {"tag": 1.0, "other": 1.0, "kind": 1e-6}
    goal, half = Goal(loss, loss_weights=factors), EXAMPLES // 2
    together = Training(build, goal, (x, y))
    together.train(EXAMPLES)
    few = keras.tree.map_structure(lambda part: part[:half], (x, y))
    many = keras.tree.map_structure(lambda part: part[half:], (x, y))
    workers = [Training(build, goal, data) for data in (few, many)]
    for worker in workers:
        worker.train(half)
    counts = [worker.loss_count for worker in workers]
    assert sum(counts) == pytest.approx(together.loss_count)
    assert counts[1] > 2 * counts[0]
    for expected, *own in zip(together.weights(), *(worker.weights() for worker in workers), strict=True):
        np.testing.assert_allclose(np.average(own, axis=0, weights=counts), expected, rtol=2e-5, atol=2e-6)

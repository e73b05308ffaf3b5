"""Recomputed activations: the same losses, gradients and state as without, of models built in different ways."""

from __future__ import annotations

import subprocess
import sys

import tfpar
from tests.nursery import ROOT
from tfpar.config import ConfigError, InputConfig
from tfpar.training.model.call import call_model, recording
from tfpar.training.model.recompute import composite_layers, recompute_activations

import keras
import numpy as np
import pytest
import tensorflow as tf

layers, ops = keras.layers, keras.ops
LENGTH, WIDTH, CLASSES = 6, 8, 3
SPARSE = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def tokens(count=5):
    found = np.random.default_rng(0).integers(1, 9, (count, LENGTH)).astype(np.int32)
    found[::2, LENGTH - 2 :] = 0
    return found


def vectors(count=5):
    return np.random.default_rng(1).normal(size=(count, WIDTH)).astype(np.float32)


def labels(count=5):
    return np.random.default_rng(2).integers(0, CLASSES, count).astype(np.int32)


def attention_with_masks_and_dropout():
    x = keras.Input((LENGTH,), dtype="int32")
    hidden = layers.Embedding(9, WIDTH, mask_zero=True)(x)
    for _ in range(2):
        normed = layers.LayerNormalization()(hidden)
        hidden = hidden + layers.MultiHeadAttention(2, 4, dropout=0.3)(normed, normed)
        inner = layers.Dense(2 * WIDTH, activation="gelu", kernel_regularizer="l2")(hidden)
        hidden = hidden + layers.Dense(WIDTH, activity_regularizer="l2")(layers.Dropout(0.2)(inner))
    return keras.Model(x, layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(hidden))), tokens()


def convolutions_with_batch_statistics():
    x = keras.Input((8, 8, 2))
    hidden = layers.Conv2D(4, 3, padding="same")(x)
    for _ in range(4):
        branch = layers.BatchNormalization()(layers.Conv2D(4, 3, padding="same")(hidden))
        hidden = hidden + layers.ReLU()(branch)
    images = np.random.default_rng(3).normal(size=(5, 8, 8, 2)).astype(np.float32)
    return keras.Model(x, layers.Dense(CLASSES)(layers.Flatten()(hidden))), images


class Block(layers.Layer):
    """Dropout twice from one generator, a loss, batch statistics, and a weight that belongs to another layer."""

    def __init__(self, elsewhere):
        super().__init__()
        self.up, self.down = layers.Dense(2 * WIDTH, activation="gelu"), layers.Dense(WIDTH)
        self.dropout, self.normalization = layers.Dropout(0.3), layers.BatchNormalization()
        self.elsewhere = lambda: elsewhere.kernel

    def call(self, x, training=None):
        hidden = self.down(self.dropout(self.up(self.dropout(x))))
        self.add_loss(0.1 * ops.mean(hidden**2))
        return x + self.normalization(ops.matmul(hidden, self.elsewhere()))


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.first, self.last = layers.Dense(WIDTH), layers.Dense(CLASSES)
        self.blocks = [Block(self.first) for _ in range(3)]

    def call(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def subclassed():
    model = Subclassed()
    model(vectors())
    return model, vectors()


def sequential():
    hidden = [layers.Dense(WIDTH, activation="tanh") for _ in range(8)]
    return keras.Sequential([keras.Input((WIDTH,)), *hidden, layers.Dense(CLASSES)]), vectors()


def traced(model, x, *, jit):
    """A step in training mode, which gives loss, gradients and state, and its graph's operations."""

    @tf.function(jit_compile=jit or None, autograph=False)
    def function(params, state, x):
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(params)
            with recording(tape):
                call = call_model(model, params, state, x, training=True)
                loss = tf.reduce_mean(tf.square(call.outputs)) + sum(map(tf.reduce_sum, call.losses))
        return loss, [tf.convert_to_tensor(each) for each in tape.gradient(loss, params)], call.state

    arguments = (
        [each.value for each in model.trainable_variables],
        [each.value for each in model.non_trainable_variables],
    )
    graph = function.get_concrete_function(*arguments, x).graph
    return lambda: function(*arguments, x), [each.type for each in graph.get_operations()]


def step(model, x, *, jit):
    """Loss, gradients and state of a step in training mode, and the graph's operations."""
    run, operations = traced(model, x, jit=jit)
    return tf.nest.map_structure(np.asarray, run()), operations


@pytest.mark.parametrize(
    ("make", "where", "blocks", "jit"),
    [
        (attention_with_masks_and_dropout, "blocks", range(2, 6), False),
        (attention_with_masks_and_dropout, "blocks", range(2, 6), True),
        (attention_with_masks_and_dropout, "attention|dense", [7], False),  # compiling it takes long
        (convolutions_with_batch_statistics, "blocks", range(1, 4), False),
        (convolutions_with_batch_statistics, "blocks", range(1, 4), True),
        (subclassed, "blocks", [3], False),
        (sequential, "blocks", [2], True),
    ],
)
def test_loss_gradients_and_state_stay(make, where, blocks, jit):
    keras.utils.set_random_seed(0)
    model, x = make()
    plain, operations = step(model, x, jit=jit)
    assert len(recompute_activations(model, where)) in blocks
    recomputed, more = step(model, x, jit=jit)
    tf.nest.map_structure(lambda a, b: np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5), plain, recomputed)
    assert all(np.any(gradient) for gradient in recomputed[1] if gradient.ndim > 1)
    products = ("MatMul", "Conv2D", "Einsum")
    assert sum(map(more.count, products)) > sum(map(operations.count, products))  # the second pass
    assert recompute_activations(model, "none") == []
    assert traced(model, x, jit=jit)[1] == operations


def data(count=32):
    return tfpar.inputs.from_arrays(vectors(count), labels(count))


@pytest.mark.parametrize(
    "options",
    [{"strategy": "one_device", "jit_compile": "true"}, {"strategy": "mirrored", "devices": 2, "jit_compile": "false"}],
)
def test_a_run_ends_with_the_same_weights(options):
    def train(recompute):
        def build():
            x = keras.Input((WIDTH,))
            hidden = x
            for _ in range(4):
                hidden = hidden + layers.Dropout(0.2)(layers.Dense(WIDTH, activation="relu")(hidden))
            return keras.Model(x, layers.Dense(CLASSES)(hidden))

        trainer = tfpar.Trainer(
            build, loss=SPARSE, recompute=recompute, accumulate_steps=2, global_batch_size=8, verbose=0, **options
        )
        summary = trainer.fit(data(), steps=6)
        return summary["train_loss"], [np.asarray(each) for each in trainer.model.trainable_variables]

    keras.utils.clear_session(free_memory=False)
    tf.nest.map_structure(
        lambda a, b: np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6), train("none"), train("blocks")
    )


def test_the_model_stays_what_it_was_elsewhere(tmp_path):
    model, x = sequential()
    before = model.predict(x, verbose=0)
    recompute_activations(model, "blocks")
    np.testing.assert_array_equal(model.predict(x, verbose=0), before)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(again.predict(x, verbose=0), before)


def test_blocks_of_a_language_model_are_its_transformer_blocks():
    source = tfpar.inputs.build_splits(InputConfig(dataset="text"), 0)[0]
    model = tfpar.models.build("transformer_lm_tiny", tfpar.task_spec(source))
    assert [layer.name for layer in composite_layers(model)] == recompute_activations(model, "blocks")


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("no_such_layer", r"matches no layer with weights\. The layers of this model: \S*dense,"),
        ("dense(", r"--recompute='dense\(' is neither none, blocks nor a regular expression"),
    ],
)
def test_what_is_not_there_is_refused(where, message):
    model, _ = sequential()
    with pytest.raises(ConfigError, match=message):
        recompute_activations(model, where)


def test_a_model_without_blocks_is_refused():
    model = keras.Sequential([keras.Input((WIDTH,)), layers.Dense(CLASSES)])
    with pytest.raises(ConfigError, match="no graph that could be cut"):
        recompute_activations(model, "blocks")


def test_a_block_that_assigns_its_weights_is_refused():
    net = layers.SpectralNormalization(layers.Dense(WIDTH), name="spectral")
    model = keras.Sequential([keras.Input((WIDTH,)), net, layers.Dense(CLASSES)])
    recompute_activations(model, "spectral")
    with pytest.raises(ConfigError, match=r"'spectral' assigns its trainable weight '\S*kernel'"):
        step(model, vectors(), jit=False)


def test_synchronised_statistics_are_refused():
    model = keras.Sequential([keras.Input((WIDTH,)), layers.Dense(4), layers.BatchNormalization(synchronized=True)])
    with pytest.raises(ConfigError, match="synchronises batch statistics"):
        recompute_activations(model, "dense")


@pytest.mark.proof
def test_the_benchmark_shows_less_memory():
    options = ["--model=transformer_lm_tiny", "--turns=1", "--measured_steps=1", "--batch=4"]
    command = [sys.executable, "experiments/benchmarks/recompute.py", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    row = next(line for line in done.stdout.splitlines() if line.startswith("blocks"))
    assert float(row.split()[2]) < 0.6

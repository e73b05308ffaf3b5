"""Lookups in sharded tables: rows travel instead of the table."""

import functools
import pathlib
import re
import sys

import tfpar
from tests import nursery
from tests.integration.scripts import divided
from tfpar.models.transformer import TokenEmbedding
from tfpar.parallel.split import whole
from tfpar.parallel.weight_shards import is_sharded

import keras
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[3]
ROWS, WIDTH, LENGTH, BATCH = 1001, 6, 5, 12


def classifier(table: keras.layers.Layer, dtype: str = "int32") -> keras.Model:
    inputs = keras.Input((LENGTH,), dtype=dtype)
    x = keras.layers.GlobalAveragePooling1D()(table(inputs))
    return keras.Model(inputs, keras.layers.Dense(3)(x))


def masked() -> keras.Model:
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(ROWS, WIDTH, mask_zero=True)(inputs)
    return keras.Model(inputs, keras.layers.Dense(3)(keras.layers.LSTM(4)(x)))


def frozen() -> keras.Model:
    table = keras.layers.Embedding(ROWS, WIDTH)
    table.trainable = False
    return classifier(table)


def tied() -> keras.Model:
    """Logits for each position from the table, of which the first three count."""
    inputs, table = keras.Input((LENGTH,), dtype="int32"), TokenEmbedding(ROWS, WIDTH)
    logits = table(keras.layers.Dense(WIDTH, "tanh")(table(inputs)), reverse=True)
    return keras.Model(inputs, keras.layers.GlobalAveragePooling1D()(logits)[:, :3])


def reversible() -> keras.Model:
    inputs, table = keras.Input((LENGTH,), dtype="int32"), keras.layers.ReversibleEmbedding(ROWS, WIDTH)
    logits = table(keras.layers.Dense(WIDTH, "tanh")(table(inputs)), reverse=True)
    return keras.Model(inputs, keras.layers.GlobalAveragePooling1D()(logits)[:, :3])


MODELS = {
    "plain": lambda: classifier(keras.layers.Embedding(ROWS, WIDTH)),
    "wide": lambda: classifier(keras.layers.Embedding(ROWS, WIDTH), "int64"),
    "masked": masked,
    "frozen": frozen,
    "tied": tied,
    "reversible": reversible,
}


def data() -> tuple[np.ndarray, np.ndarray]:
    """Tokens of which some repeat, some are 0, and some count from the end of the table."""
    tokens = np.random.default_rng(0).integers(-20, 60, (3 * BATCH + 5, LENGTH)).astype(np.int32)
    tokens[:, -1] = ROWS - 1 - tokens[:, 0].clip(0)
    tokens[:, 2:][tokens[:, 2:] % 7 == 0] = 0
    return tokens, (tokens[:, 0] % 3).astype(np.int32)


def train(devices: int, build, **options) -> tfpar.Trainer:
    trainer, (x, y) = made(devices, build, **options), data()
    trainer.results = trainer.fit(x, y, steps=6, validation=(x[:7], y[:7]))
    return trainer


def made(devices: int, build, **options) -> tfpar.Trainer:
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    strategy = "mirrored" if devices > 1 else "one_device"
    config = tfpar.ExperimentConfig.from_flat_dict(
        {
            "strategy": strategy,
            "devices": devices,
            "global_batch_size": BATCH,
            "optimizer": "sgd",
            "learning_rate": 0.5,
            "jit_compile": "false",
            "verbose": 0,
            **options,
        }
    )
    return tfpar.Trainer(
        build,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        config=config,
        runtime=divided.runtime_of(strategy, devices=devices),
    )


@functools.cache
def alone(name: str, accumulate_steps: int) -> tuple[dict[str, np.ndarray], dict]:
    trainer = train(1, MODELS[name], accumulate_steps=accumulate_steps)
    return {each.path: each.numpy() for each in trainer.model.variables}, trainer.results


@pytest.mark.parametrize(
    ("name", "devices", "accumulate_steps"),
    [
        ("plain", 2, 1),
        ("wide", 2, 1),
        ("plain", 3, 2),
        ("masked", 2, 1),
        ("frozen", 2, 1),
        ("tied", 3, 1),
        ("reversible", 2, 2),
    ],
)
def test_rows_that_travel_train_as_the_table_does(name, devices, accumulate_steps):
    trainer = train(devices, MODELS[name], accumulate_steps=accumulate_steps, shard="weights")
    assert any(map(is_sharded, trainer.model.variables))
    expected, results = alone(name, accumulate_steps)
    for variable in trainer.model.variables:
        np.testing.assert_allclose(
            whole(variable), expected[variable.path], rtol=1e-5, atol=1e-6, err_msg=variable.path
        )
    assert trainer.results["eval"] == pytest.approx(results["eval"], rel=1e-5)


@pytest.mark.parametrize("rows", [1001, 30, 31])
def test_rows_travel_only_if_they_are_fewer(rows):
    """Two devices look up 30 rows each; of a table of 61 rows, a shard of 31 would have as many."""
    tokens, labels = data()
    trainer = made(2, lambda: classifier(keras.layers.Embedding(2 * rows, 20)), shard="weights")
    trainer.fit(tokens % (2 * rows), labels, steps=1)
    sent = trainer.program.placing.gathered(trainer.model, trainer.program.config).sent
    whole_table, lookups = 4 * rows * 2 * 20, 2 * BATCH * LENGTH // 2 * 4 * 20 + BATCH * LENGTH // 2 * 4
    assert sent == (lookups if rows > BATCH * LENGTH // 2 else whole_table)


OUTSIDE = """
import sys
from tests.training.model.test_sharded_lookup import MODELS, data, made
import numpy as np, tensorflow as tf

tokens, labels = data()
tokens = tokens.astype(np.int64)
tokens[3, 2] = int(sys.argv[1])
try:
    made(2, MODELS["wide"], shard="weights").fit(tokens, labels, steps=6)
except tf.errors.InvalidArgumentError as error:
    print(error)
"""


@pytest.mark.parametrize("outside", [ROWS, -ROWS - 1, 2**32])
def test_a_place_outside_of_the_table_is_named(outside):
    """In a process of its own: if the other replica waits in a collective, TensorFlow 2.21 cancels that, and all later
    ones of the process."""
    done = nursery.run([sys.executable, "-c", OUTSIDE, str(outside)], cwd=ROOT, capture_output=True, text=True)
    value = outside + ROWS * (outside < 0)
    assert re.search(rf"(?s)shard_of_{ROWS}_rows.*= {value} is not in", done.stdout), done.stdout + done.stderr


@pytest.mark.parametrize("ignored", [None, 1])
def test_a_pass_that_counts_denominators_sends_rows_too(ignored):
    """Of losses that are divided by different numbers."""

    def two_outputs() -> keras.Model:
        inputs = keras.Input((LENGTH,), dtype="int32")
        x = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(ROWS, 20)(inputs))
        return keras.Model(inputs, {"kind": keras.layers.Dense(3)(x), "size": keras.layers.Dense(1)(x)})

    loss = {"kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=ignored), "size": "mse"}
    options = {"strategy": "mirrored", "devices": 2, "jit_compile": False, "shard": "weights", "accumulate_steps": 2}
    trainer = tfpar.Trainer(two_outputs, "sgd", loss, global_batch_size=BATCH, verbose=0, **options)
    x, y = data()
    trainer.fit(x, {"kind": y, "size": y[:, None].astype(np.float32)}, steps=1)
    sent = trainer.program.placing.gathered(trainer.model, trainer.program.config).sent
    rows, places = BATCH // 2 * LENGTH * 4 * 20, BATCH // 2 * LENGTH * 4
    forward, backward = rows + places, rows
    assert sent == forward + backward + (forward if ignored else 0)

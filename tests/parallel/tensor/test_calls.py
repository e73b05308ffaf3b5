"""Calls of divided layers that need more than a product: the numbers, and the errors, of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tfpar
from tests.integration.scripts.divided import runtime_of, weights_of
from tfpar.parallel.split import split_of

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

TOKENS, EXAMPLES, LENGTH, HEADS = 35, 48, 6, 4


def trained(build: Callable[[], keras.Model], x: Any, *place: Any) -> tfpar.Trainer:
    """After three steps on logical devices of this process."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    options = {"optimizer": "sgd", "learning_rate": 0.1, "schedule": "constant", "jit_compile": "false", "verbose": 0}
    options |= {"global_batch_size": 16, "exchange": "none", "runtime": runtime_of(*(place or ("one_device",)))}
    trainer = tfpar.Trainer(build, loss="mse", **options)
    y = np.random.default_rng(1).normal(size=(EXAMPLES, 4)).astype(np.float32)
    trainer.fit(x, y, steps=3)
    return trainer


def assert_as_alone(build: Callable[[], keras.Model], x: Any, weight: str) -> None:
    """With a weight whose path ends so, which is divided."""
    trainer, expected = trained(build, x, "mirrored", "model:2", 2), trained(build, x)
    assert any(split_of(each) and each.path.endswith(weight) for each in trainer.model.trainable_variables)
    for (name, value), other in zip(weights_of(trainer).items(), weights_of(expected).values(), strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-4, atol=1e-5, err_msg=name)


def looks_up(table: type[layers.Embedding], dtype: str = "int32", **options: Any) -> keras.Model:
    tokens = keras.Input((LENGTH,), dtype=dtype)
    x = layers.GlobalAveragePooling1D()(table(TOKENS, 16, name="table", **options)(tokens))
    return keras.Model(tokens, layers.Dense(4)(x))


def some_tokens(dtype: str = "int32") -> np.ndarray:
    return np.random.default_rng(0).integers(0, TOKENS, (EXAMPLES, LENGTH)).astype(dtype)


@pytest.mark.parametrize("dtype", ["int32", pytest.param("int64", marks=pytest.mark.proof)])
def test_negative_tokens_count_from_the_end(dtype):
    """Of a table with padding."""
    tokens = some_tokens(dtype)
    tokens[:, 0], tokens[:, 1], tokens[:, 2] = -1, -TOKENS, -3
    assert_as_alone(lambda: looks_up(layers.Embedding, dtype), tokens, "table/embeddings")


@pytest.mark.parametrize("table", [layers.ReversibleEmbedding, pytest.param(layers.Embedding, marks=pytest.mark.proof)])
def test_masks_of_tokens(table):
    """Also of a layer that computes it within its call."""
    tokens = some_tokens()
    tokens[:, 2:4] = 0
    assert_as_alone(lambda: looks_up(table, mask_zero=True), tokens, "table/embeddings")


@pytest.mark.parametrize("token", [TOKENS, -TOKENS - 1, 2**32])
def test_what_is_no_token_is_refused(token):
    """The last part has padding for the first of them."""
    tokens = some_tokens("int64")
    tokens[3, 2] = token
    value = token + TOKENS * (token < 0)
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf"(?s)part_of_{TOKENS}_tokens.*= {value} is not in"):
        trained(lambda: looks_up(layers.Embedding, "int64"), tokens, "mirrored", "model:2", 2)


@pytest.mark.parametrize(
    "options",
    [
        {"padding": "causal", "dilation_rate": 2},
        pytest.param({"padding": "same", "strides": 2}, marks=pytest.mark.proof),
    ],
)
def test_paddings_of_convolutions(options):
    def build() -> keras.Model:
        inputs = keras.Input((10, 64))
        x = layers.Conv1D(512, 3, name="wide", **options)(inputs)
        return keras.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling1D()(x)))

    x = np.random.default_rng(0).normal(size=(EXAMPLES, 10, 64)).astype(np.float32)
    assert_as_alone(build, x, "wide/kernel")


def masked(attention: Callable[[], layers.Layer], heads: int, *more: int) -> keras.Model:
    queries, mask = keras.Input((*more, LENGTH, 32)), keras.Input((heads, LENGTH, LENGTH), dtype="bool")
    x = attention()(queries, queries, attention_mask=mask)
    return keras.Model([queries, mask], layers.Dense(4)(keras.ops.mean(x, axis=[*range(1, len(x.shape) - 1)])))


@pytest.mark.parametrize(
    ("attention", "heads", "more"),
    [
        (lambda: layers.MultiHeadAttention(HEADS, 8, name="attention"), HEADS, ()),
        pytest.param(lambda: layers.MultiHeadAttention(2, 8, name="attention"), 2, (), marks=pytest.mark.proof),
        pytest.param(lambda: layers.MultiHeadAttention(HEADS, 8, name="attention"), 1, (), marks=pytest.mark.proof),
        pytest.param(
            lambda: layers.GroupQueryAttention(8, HEADS, 2, name="attention"), HEADS, (), marks=pytest.mark.proof
        ),
        # The second dim is that of the examples' rows: all heads have the same mask.
        (lambda: layers.MultiHeadAttention(HEADS, 8, attention_axes=2, name="attention"), HEADS, (HEADS,)),
    ],
    ids=["heads", "two_heads", "one_mask", "grouped", "rows"],
)
def test_masks_of_heads(attention, heads, more):
    generator = np.random.default_rng(0)
    mask = (generator.random((EXAMPLES, heads, LENGTH, LENGTH)) < 0.6) | np.eye(LENGTH, dtype=bool)
    queries = generator.normal(size=(EXAMPLES, *more, LENGTH, 32)).astype(np.float32)
    assert_as_alone(lambda: masked(attention, heads, *more), [queries, mask], "query/kernel")


@pytest.mark.parametrize("reads", ["itself", "tokens"])
def test_masks_that_attention_takes_off_its_arguments(reads):
    """Keras' attention removes them: what reads the same tensors afterwards, and the loss, have no mask."""

    def build() -> keras.Model:
        tokens = keras.Input((LENGTH,), dtype="int32")
        given = x = layers.Embedding(TOKENS, 16, mask_zero=True, name="table")(tokens)
        for number in range(2):
            read = x if reads == "itself" else given
            x = layers.Add()([x, layers.MultiHeadAttention(HEADS, 8, name=f"attention{number}")(x, read)])
            x = layers.LayerNormalization()(x)
        return keras.Model(tokens, layers.Dense(4)(layers.GlobalAveragePooling1D()(x)))

    tokens = some_tokens()
    tokens[:, 4:] = 0
    assert_as_alone(build, tokens, "query/kernel")

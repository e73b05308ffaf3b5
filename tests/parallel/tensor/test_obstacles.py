"""Layers that the model uses in ways that divided layers cannot be used in: whole, or refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tests.integration.scripts import divided, divided_models
from tfpar.config import ConfigError
from tfpar.models.transformer import TokenEmbedding
from tfpar.optim import keras_calls
from tfpar.parallel.split import split_of
from tfpar.parallel.tensor.layout import find_indivisible, find_layout
from tfpar.parallel.tensor.weight_layouts import find_weight_layout

import keras
import numpy as np
import pytest
from keras import layers, ops

LOOP = "calls in a loop or a branch, in which devices cannot communicate"
USES: dict[str, Callable[[Any, Any], Any]] = {
    "fori": lambda dense, x: ops.fori_loop(0, 2, lambda _, state: dense(state), x),
    "map": lambda dense, x: ops.map(dense, x[:, None])[:, 0],
    "cond": lambda dense, x: ops.cond(ops.sum(x) > 1e9, lambda: x, lambda: dense(x)),
    "vmap": lambda dense, x: ops.vectorized_map(lambda row: dense(row[None])[0], x),
    "norm": lambda dense, x: dense(x) / ops.norm(dense.kernel),
    "twice": lambda dense, x: ops.matmul(dense(x), ops.transpose(dense.kernel)),
}


class Using(layers.Layer):
    """Uses a Dense layer in one of `USES`."""

    def __init__(self, use: str, **options: Any) -> None:
        super().__init__(**options)
        self.use, self.inner = use, layers.Dense(64, "tanh", name="inner")

    def build(self, shape: Any) -> None:
        self.inner.build(shape)

    def call(self, x: Any) -> Any:
        return USES[self.use](self.inner, x)


class OwnHead(layers.Layer):
    """Logits from a table, by hand."""

    def __init__(self, table: layers.Embedding, **options: Any) -> None:
        super().__init__(**options)
        self.table = table

    def call(self, x: Any) -> Any:
        return ops.matmul(x, ops.transpose(self.table.embeddings))


def using(use: str) -> keras.Model:
    pair = [layers.Dense(128, "tanh"), layers.Dense(64)]
    return keras.Sequential([keras.Input((12,)), *pair, Using(use, name="using"), layers.Dense(3)])


def own_head() -> keras.Model:
    tokens, table = keras.Input((divided_models.POSITIONS,), dtype="int32"), layers.Embedding(32, 64, name="table")
    x = layers.Dense(64, name="divided")(table(tokens))
    return keras.Model(tokens, OwnHead(table, name="head")(x))


class Subclassed(keras.Model):
    """A model whose inputs are not known before its first call."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.first, self.using, self.last = layers.Dense(64), Using(use, name="using"), layers.Dense(3)

    def build(self, shape: Any) -> None:
        self.first.build((None, 12))
        self.using.build((None, 64))
        self.last.build((None, 64))
        super().build(shape)

    def call(self, x: Any) -> Any:
        return self.last(self.using(self.first(x)))


class Penalizing(keras.Model):
    """A model whose loss reads a weight."""

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None) -> Any:
        del x, sample_weight
        loss = keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True)
        return ops.mean(loss) + 0.1 * ops.norm(self.get_layer("large").kernel)


def penalizing() -> keras.Model:
    inputs = keras.Input((12,))
    x = layers.LayerNormalization()(layers.Dense(512, name="large")(inputs))
    return Penalizing(inputs, layers.Dense(3)(x))


def subclassed(use: str) -> keras.Model:
    model = Subclassed(use)
    model.build((None, 12))
    return model


def assert_equals_one_device(model: str, steps: int = 4) -> None:
    expected = divided.weights_of(divided.here(model=model, steps=steps))
    trainer = divided.here("mirrored", "model:2", 2, model=model, steps=steps)
    assert any(map(split_of, trainer.model.trainable_variables))
    for name, value in divided.weights_of(trainer).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("use", USES)
def test_layers_with_such_uses_stay_whole(use, monkeypatch):
    """With the numbers of one device, beside a pair that is divided."""
    monkeypatch.setitem(divided_models.MODELS, "dense", lambda: using(use))
    assert_equals_one_device("dense")
    [found] = find_indivisible(using(use), 2)
    reason = "a weight that '.*using' reads" if use in ("norm", "twice") else LOOP
    assert re.search("using/inner", found.path)
    assert re.fullmatch(reason, found.reason)


def test_a_table_that_another_layer_reads_stays_whole(monkeypatch):
    monkeypatch.setitem(divided_models.MODELS, "attention", own_head)
    assert_equals_one_device("attention")


def test_tied_heads_that_call_the_table_stay_divided():
    tokens, table = keras.Input((8,), dtype="int32"), TokenEmbedding(32, 64, name="table")
    model = keras.Model(tokens, table(layers.Dense(64)(table(tokens)), reverse=True))
    assert "table" in {layer.name for layer, _ in find_layout(model, 2).values()}
    model = divided_models.MODELS["gpt2"]()
    assert "token_embedding" in {layer.name for layer, _ in find_layout(model, 2).values()}


def test_layers_that_are_divided_together_stay_whole_together():
    """If one of attention's projections is read, or a function in the graph reads one of a pair."""
    x = inputs = keras.Input((8, 64))
    attention = layers.MultiHeadAttention(4, 16, name="attention")
    x = attention(x, x)
    first, second = layers.Dense(8, name="first"), layers.Dense(64, name="second")
    x = second(first(x))
    x = layers.Lambda(lambda x: x * ops.max(attention.query_dense.kernel) * ops.norm(first.kernel), (8, 64))(x)
    model = keras.Model(inputs, layers.Dense(64, name="last")(x))
    assert {layer.name for layer, _ in find_layout(model, 2).values()} == {"last"}


@pytest.mark.parametrize(("use", "reason"), [("fori", LOOP), ("norm", "a weight that '.*using' reads")])
def test_rules_for_such_layers_are_refused(use, reason):
    model = using(use)
    for find, rules in ((find_layout, {"inner": "gather"}), (find_weight_layout, {"inner/kernel": 1})):
        with pytest.raises(ConfigError, match=rf"Dense '.*using/inner' has {reason}"):
            find(model, 2, rules)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: subclassed("fori"), rf"Dense '.*inner' has {LOOP}, but .* layout=\{{'.*inner': 'whole'\}}"),
        (lambda: subclassed("vmap"), rf"Dense '.*inner' has {LOOP}, but .* layout=\{{'.*inner': 'whole'\}}"),
        (lambda: subclassed("norm"), r"reads the weight '.*inner/kernel' outside .* layout=\{'.*inner': 'whole'\}"),
        (penalizing, r"the model or its loss reads the weight 'large/kernel' outside .* layout=\{'large': 'whole'\}"),
    ],
)
def test_uses_that_no_trace_shows_are_refused(build, message, monkeypatch):
    """Instead of devices that wait for each other forever, or numbers that are wrong."""
    monkeypatch.setitem(divided_models.MODELS, "dense", build)
    with pytest.raises(ConfigError, match=message):
        divided.here("mirrored", "model:2", 2, steps=1, global_batch_size=15, eval_batch_size=50)


@pytest.mark.parametrize("block", ["large", "table"])
def test_blocks_that_are_computed_again_read_their_own_parts(block, monkeypatch):
    """Also in the backward pass, after the divided call."""

    def build() -> keras.Model:
        tokens = keras.Input((divided_models.POSITIONS,), dtype="int32")
        x = layers.Embedding(32, 64, name="table")(tokens)
        return keras.Model(tokens, layers.Dense(32, name="logits")(layers.Dense(64, "tanh", name="large")(x)))

    monkeypatch.setitem(divided_models.MODELS, "attention", build)
    options = {"model": "attention", "steps": 2, "recompute": block}
    expected = divided.weights_of(divided.here(**options))
    for name, value in divided.weights_of(divided.here("mirrored", "model:2", 2, **options)).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_what_replaces_calls_does_so_after_the_trace():
    model = divided_models.dense()
    first, called = model.get_layer("first"), []
    keras_calls.replace_call(first, lambda layer, plain, x: (called.append(layer), plain(x))[1])
    find_layout(model, 2)
    assert not called
    assert "call" not in vars(model.get_layer("second"))
    model(np.zeros([1, 12], np.float32))
    assert called == [first]

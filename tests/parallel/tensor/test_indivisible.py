"""Heads and units that the model axis does not divide: refused where a rule asks for them, else named."""

from __future__ import annotations

import logging

from tests.integration.scripts import divided_models
from tests.training.model.test_keras_hub import llama
from tfpar.config import ConfigError
from tfpar.parallel.model_axis import ModelAxis
from tfpar.parallel.tensor.layout import find_indivisible, find_layout
from tfpar.parallel.tensor.weight_layouts import find_weight_layout
from tfpar.training.tensor_parallel.model import divide_layers

import keras
import pytest
import tensorflow as tf

layers = keras.layers


@pytest.mark.parametrize(
    ("model", "size", "rules", "message"),
    [
        (
            "three_heads",
            2,
            {"block": "heads"},
            r"'block0' has 3 heads, which 2 devices .* axis of 3 devices",
        ),
        ("attention", 3, {"multi_head": "heads"}, "'multi_head_attention' has 4 heads, .* axis of 2 or 4 devices"),
        (
            "attention",
            8,
            {"query_attention": "heads"},
            r"4 heads \(key, value\), .* axis of 2 or 4 devices",
        ),
        ("attention", 3, {"multi_head.*query": "column"}, "this way over 3 devices: 4 heads. A model axis of 2 or 4"),
        ("attention", 2, {"logits": "heads"}, "'logits' matches no attention layer"),
        ("attention", 2, {"multi_head": "heads", "head_attention/query$": "whole"}, "has no effect: an earlier rule"),
        ("attention", 2, {"head_attention/query$": "whole", "multi_head": "heads"}, "which is part of it. Put this"),
        ("attention", 2, {"logits": "whole", "log": "gather"}, "has no effect: an earlier rule .* such as '.*logits'"),
        (
            "dense",
            5,
            {"first": "column"},
            r"over 5 devices: 64 units \(first\). A model axis of 2, 4, 8, 16, 32",
        ),
    ],
)
def test_a_rule_that_does_not_fit_is_refused(model, size, rules, message):
    with pytest.raises(ConfigError, match=message):
        find_layout(divided_models.MODELS[model](), size, rules)


def test_a_map_of_weights_that_does_not_fit_is_refused():
    """It names the layer, its heads and what would fit."""
    with pytest.raises(ConfigError, match=r"'transformer_layer_0/self_attention' has 4 heads .* axis of 2 dev"):
        find_weight_layout(llama()[0], 3, {"query/kernel": 1, "key/kernel": 1, "value/kernel": 1, "output/kernel": 0})


def test_rules_by_heads_divide_as_automatic_ones_do():
    rules = {"attention$": "heads"}
    found, automatic = (find_layout(divided_models.attention(), 2, given) for given in (rules, None))
    assert sorted(layout.way for _, layout in found.values()) == sorted(layout.way for _, layout in automatic.values())


@pytest.mark.parametrize("later", [{"attention": "heads"}, {".": "whole"}])
def test_the_first_of_the_rules_that_match_counts(later):
    """A later rule divides what is left: it neither fails on nor changes what an earlier one has divided."""
    model = divided_models.attention()
    attention = next(layer for layer in model.layers if isinstance(layer, keras.layers.MultiHeadAttention))
    found, automatic = (find_layout(model, 2, rules) for rules in ({f"^{attention.path}$": "heads", **later}, None))
    ways, expected = (
        {layer.path: layout.way for layer, layout in each.values() if f"{attention.path}/" in (layer.path or "")}
        for each in (found, automatic)
    )
    assert ways == expected
    assert set(ways.values()) == {"column", "row"}


def test_automatic_rules_name_what_stays_whole(caplog):
    """Attention of three heads over two devices, and the share of the weights that no other way divides."""
    model = divided_models.three_heads()
    caplog.set_level(logging.INFO, "tfpar")
    divide_layers(model, ModelAxis([["/cpu:0"], ["/cpu:1"]], 0, 2), announced=True)
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    block, kept = model.get_layer("block0"), 0
    layouts = find_layout(divided_models.three_heads(), 2)
    divided_names = {layer.name for layer, _ in layouts.values()}
    for inner in (block.qkv, block.attention_out, block.mlp_in, block.mlp_out):
        kept += inner.bias.shape[0] * (inner.name not in divided_names)
        kept += inner.kernel.shape[0] * inner.kernel.shape[1] * (inner.name not in divided_names)
    assert warning.startswith(f"model axis: block0: 3 heads, not a multiple of 2, so {kept:,} of the trainable weights")
    assert warning.endswith("A model axis of 3 devices divides them.")


def test_layers_that_are_divided_in_another_way_are_not_named(caplog):
    """No pair because of a regularizer of the activations; each is gathered."""
    x = keras.Input((64,))
    hidden = layers.Dense(128, "relu", activity_regularizer="l2", name="first")(x)
    model = keras.Model(x, layers.Dense(64, name="second")(hidden))
    assert find_indivisible(model, 2)
    divide_layers(model, ModelAxis([["/cpu:0"], ["/cpu:1"]], 0, 2), announced=True)
    assert not [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_nothing_is_named_where_all_divides():
    assert not find_indivisible(divided_models.attention(), 2)
    assert not find_indivisible(divided_models.three_heads(), 3)


def test_weights_that_cannot_be_cut_at_all():
    tokens = keras.Input((8, 16))
    x = keras.layers.MultiHeadAttention(4, 4, kernel_constraint="max_norm")(tokens, tokens)
    with pytest.raises(
        ConfigError, match=r"has weights that cannot be cut in this way: a constraint.*No size of the model axis"
    ):
        find_layout(keras.Model(tokens, x), 2, {"attention": "heads"})


def normalized(x):
    return tf.nn.l2_normalize(x, -1)


def with_one_weight():
    activation = layers.PReLU(shared_axes=[1])
    activation.build((None, 64))
    return activation


@pytest.mark.parametrize(
    ("first", "between", "is_pair"),
    [
        (lambda: layers.Dense(64, "relu"), [], True),
        (lambda: layers.Dense(64, lambda x: keras.activations.gelu(x, approximate=True)), [], True),
        (lambda: layers.Dense(64, layers.LeakyReLU(0.1)), [], True),
        (lambda: layers.Dense(64), [lambda: layers.Activation(lambda x: x * tf.sigmoid(x))], True),
        (lambda: layers.Dense(64), [lambda: layers.Dropout(0.5)], True),
        (lambda: layers.Dense(64, "softmax"), [], False),
        (lambda: layers.Dense(64, layers.Softmax()), [], False),
        (lambda: layers.Dense(64, normalized), [], False),
        (lambda: layers.Dense(64, with_one_weight()), [], False),
        (lambda: layers.Dense(64, activity_regularizer="l2"), [], False),
        (lambda: layers.Dense(64), [lambda: layers.Activation(normalized)], False),
        (lambda: layers.Dense(64), [lambda: layers.Activation("relu", activity_regularizer="l2")], False),
        (lambda: layers.Dense(64), [lambda: layers.Dropout(0.5, noise_shape=(None, 1))], False),
        (lambda: layers.Dense(64), [lambda: layers.Dropout(0.5, activity_regularizer="l2")], False),
    ],
)
def test_what_needs_all_units_is_not_between_a_pair(first, between, is_pair):
    """A function, a regularizer, or a mask or weight that several units share."""
    model = keras.Sequential(
        [keras.Input((12,)), first(), *(make() for make in between), layers.Dense(8), layers.Dense(512, name="large")]
    )
    assert (id(model.layers[0]) in find_layout(model, 2)) == is_pair
    if not is_pair and not between:
        with pytest.raises(ConfigError, match=r"layout.* cannot be divided in this way over 2 devices"):
            find_layout(model, 2, {model.layers[0].path: "column"})


class Masking(layers.Layer):
    """Calls a dropout that others may call, too."""

    def __init__(self, dropout):
        super().__init__()
        self.dropout = dropout

    def call(self, x):
        return self.dropout(x)


@pytest.mark.parametrize("inside", [False, True])
def test_a_dropout_that_is_called_elsewhere_is_not_between_a_pair(inside):
    """There it draws for whole activations: numbers of its own on each device would make their copies differ."""
    x = inputs = keras.Input((12,))
    dropout, last = layers.Dropout(0.1), layers.Dense(64, name="last")
    x = layers.Dense(64, name="second")(dropout(layers.Dense(64, "relu", name="first")(x)))
    x = (Masking(dropout) if inside else dropout)(x)
    found = {layer.name: layout.way for layer, layout in find_layout(keras.Model(inputs, last(x)), 2).values()}
    assert found == {"second": "gather", "last": "gather"}


def test_attention_whose_dropout_is_called_elsewhere_stays_whole():
    x = inputs = keras.Input((8, 16))
    attention, last = layers.MultiHeadAttention(4, 4, dropout=0.1, name="attention"), layers.Dense(512, name="last")
    x = attention(x, x)
    model = keras.Model(inputs, last(attention._dropout_layer(x)))
    assert {layer.name for layer, _ in find_layout(model, 2).values()} == {"last"}
    with pytest.raises(ConfigError, match=r"has dropout 'dropout.*', which is called in several places"):
        find_layout(model, 2, {"attention": "heads"})


class ScaledTable(layers.Embedding):
    """A table with a weight that every token reads."""

    def build(self, shape=None):
        super().build(shape)
        self.scale = self.add_weight(shape=(self.output_dim,), initializer="ones", name="scale")

    def call(self, tokens):
        return self.scale * super().call(tokens)


def test_a_table_with_other_weights_stays_whole():
    """Each device would have the gradient of its own tokens, and all would take the mean."""
    tokens = keras.Input((8,), dtype="int32")
    table, last = ScaledTable(32, 16, name="table"), layers.Dense(512, name="last")
    model = keras.Model(tokens, last(table(tokens)))
    assert {layer.name for layer, _ in find_layout(model, 2).values()} == {"last"}
    (found,) = find_indivisible(model, 2)
    assert (found.path, found.reason) == ("table", "weights beside its table (scale)")
    with pytest.raises(ConfigError, match=r"'table' has weights beside its table \(scale\)"):
        find_layout(model, 2, {"table": "vocabulary"})


class OwnCell(layers.Layer):
    """A recurrent cell of Dense layers."""

    def __init__(self):
        super().__init__()
        self.state_size, self.dense = 64, layers.Dense(64)

    def build(self, shape):
        self.dense.build((None, shape[-1] + 64))

    def call(self, x, states):
        output = self.dense(keras.ops.concatenate([x, states[0]], axis=-1))
        return output, [output]


def test_layers_that_run_in_a_loop_stay_whole():
    """Devices that communicate in a loop would wait for each other forever."""
    x = inputs = keras.Input((8, 16))
    x = layers.RNN(OwnCell())(x)
    model = keras.Model(inputs, layers.Dense(64, name="last")(x))
    for rules in (None, {"own_cell/dense": "whole"}):
        assert [layer.name for layer, _ in find_layout(model, 2, rules).values()] == ["last"]
    with pytest.raises(
        ConfigError, match=r"Dense 'rnn.*/dense' has calls in the loop of a recurrent layer, .* Use 'whole'"
    ):
        find_layout(model, 2, {"own_cell/dense": "column"})

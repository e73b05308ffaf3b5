"""Attention of keras-hub whose heads are divided: Keras' numbers, or whole where it is of another kind."""

from __future__ import annotations

from typing import Any

from tests.parallel.tensor.test_divided_logits import SIZE, on_devices
from tfpar.config import ConfigError
from tfpar.parallel.model_axis import ModelAxis
from tfpar.parallel.tensor.layout import find_layout
from tfpar.parallel.tensor.positions import has_gradient_in_parts
from tfpar.training.tensor_parallel.model import divide_layers

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf

SIZES = {"vocabulary_size": 16, "num_layers": 1, "hidden_dim": 24, "intermediate_dim": 12}


def gemma3(**options: Any) -> keras.Model:
    return keras_hub.models.Gemma3Backbone(
        **{**SIZES, "num_query_heads": 6, "num_key_value_heads": 3, "head_dim": 4, **options},
        image_size=None,
        vision_encoder=None,
    )


def gpt_oss() -> keras.Model:
    heads = {"num_query_heads": 6, "num_key_value_heads": 3}
    return keras_hub.models.GptOssBackbone(**SIZES, **heads, num_experts=2, top_k=1)


def xlnet() -> keras.Model:
    return keras_hub.models.XLNetBackbone(**SIZES, num_heads=6)


def attention_of_gemma(heads_of_keys: int) -> keras.layers.Layer:
    options = {"num_key_value_heads": heads_of_keys, "query_head_dim_normalize": False, "use_query_key_norm": True}
    return gemma3(**options).get_layer("decoder_block_0").attention


def attention_of_llama(heads_of_keys: int) -> keras.layers.Layer:
    """It repeats each head of keys and values for the queries that share it."""
    model = keras_hub.models.LlamaBackbone(**SIZES, num_query_heads=6, num_key_value_heads=heads_of_keys)
    return model.get_layer("transformer_layer_0")._self_attention_layer


@pytest.mark.parametrize(
    ("attention", "heads_of_keys"), [(attention_of_gemma, 3), (attention_of_gemma, 1), (attention_of_llama, 1)]
)
def test_numbers_of_heads_in_attributes(attention, heads_of_keys):
    """Gemma 3 reads them in `call`, also for its scale. Norms of heads get the gradients of all heads, and so do the
    projections of the only head of keys and values; the input, `x`, gets those of all devices."""
    layer = attention(heads_of_keys)
    generator = np.random.default_rng(0)
    values = [generator.normal(scale=0.5, size=each.shape).astype(np.float32) for each in layer.trainable_variables]
    x, upstream = (generator.normal(size=(2, 5, 24)).astype(np.float32) for _ in range(2))
    inputs = keras.Input((5, 24))
    mask = np.tril(np.ones((1, 5, 5), bool))
    splits = divide_layers(keras.Model(inputs, layer(inputs, mask)), ModelAxis([["/cpu:0"]] * SIZE, 0, SIZE))

    def outputs_and_gradients(given: list[np.ndarray]) -> Any:
        tensors, own = tf.constant(x), [tf.constant(each) for each in given]
        scope = keras.StatelessScope()
        scope.state_mapping = dict(zip(map(id, layer.trainable_variables), own, strict=True))  # parts, of other shapes
        with tf.GradientTape() as tape, scope:
            tape.watch([tensors, *own])
            outputs = layer(tensors, mask)
        return outputs, tape.gradient(outputs, [tensors, *own], upstream)

    def program(rank: int, axis: ModelAxis) -> Any:
        del axis
        named = zip(layer.trainable_variables, values, strict=True)
        return outputs_and_gradients(
            [splits[id(each)].part(value, rank) if id(each) in splits else value for each, value in named]
        )

    expected, (of_x, *of_weights) = outputs_and_gradients(values)
    found = on_devices(program)
    for outputs, (own_of_x, *_) in found:
        np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(own_of_x, of_x, rtol=1e-4, atol=1e-5)
    for number, variable in enumerate(layer.trainable_variables):
        parts = [gradients[1 + number] for _, gradients in found]
        assert has_gradient_in_parts(variable) == (id(variable) not in splits)
        whole = splits[id(variable)].joined(parts) if id(variable) in splits else sum(parts)
        np.testing.assert_allclose(whole, of_weights[number], rtol=1e-4, atol=1e-5, err_msg=variable.path)
    divided = {each.path.rpartition("/")[0].rpartition("/")[2] for each in layer.variables if id(each) in splits}
    assert divided == {"query", "attention_output"} | ({"key", "value"} if heads_of_keys > 1 else set())
    assert (layer.num_query_heads, layer.num_key_value_heads) == (6, heads_of_keys)
    assert getattr(layer, "hidden_dim", 24) == 24
    assert layer.num_key_value_groups == 6 // heads_of_keys


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (gpt_oss, r"has weights beside its projections \(sinks\), which 3 devices .* No size of the model axis"),
        (xlnet, r"has inputs that may belong to single heads \(content_stream, content_attention_bias, "),
    ],
)
def test_attention_of_another_kind_stays_whole(build, message):
    model = build()
    assert not [layer for layer, layout in find_layout(model, SIZE).values() if layout.way == "heads"]
    with pytest.raises(ConfigError, match=message):
        find_layout(model, SIZE, {"": "heads"})

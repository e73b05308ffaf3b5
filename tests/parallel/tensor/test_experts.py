"""Blocks of keras-hub's experts whose hidden units are divided: outputs, losses and gradients of one device."""

from __future__ import annotations

from typing import Any

from tests.parallel.tensor.test_divided_logits import SIZE, on_devices
from tfpar.parallel.model_axis import ModelAxis
from tfpar.parallel.tensor.experts import PartOfExperts, experts_in, units_of
from tfpar.parallel.tensor.positions import has_gradient_in_parts
from tfpar.training.tensor_parallel.model import divide_layers

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf

WIDTH, EXPERTS = 8, 4
SIZES = {"vocabulary_size": 16, "num_layers": 1, "hidden_dim": WIDTH, "num_experts": EXPERTS, "top_k": 2}
HEADS = {"num_query_heads": 2, "num_key_value_heads": 1}
UNITS, QWEN = {"intermediate_dim": 12}, {"moe_intermediate_dim": 12}
SHARED = "shared_expert_intermediate_"
BACKBONES: dict[str, dict[str, Any]] = {
    "Mixtral": UNITS,
    "GptOss": UNITS,
    "QwenMoe": {**UNITS, **QWEN, f"{SHARED}dim": 6},
    "Qwen3Moe": {**UNITS, **QWEN, "head_dim": 4},
    "Qwen3_5Moe": {**QWEN, f"{SHARED}size": 6, "head_dim": 8, "layer_types": ["full_attention"]},
}


def block_of(backbone: str) -> keras.layers.Layer:
    model = getattr(keras_hub.models, f"{backbone}Backbone")(**SIZES, **HEADS, **BACKBONES[backbone])
    [block] = [layer for layer in model._flatten_layers() if experts_in(layer)]
    return block


@pytest.mark.parametrize("backbone", BACKBONES)
def test_blocks_give_the_numbers_of_one_device(backbone):
    """Also to the router, whose gradient comes of all hidden units, and of a loss that it adds."""
    block = block_of(backbone)
    [experts] = experts_in(block)
    generator = np.random.default_rng(0)
    weights = block.trainable_variables
    values = [generator.normal(size=each.shape).astype(np.float32) for each in weights]
    x, upstream = (generator.normal(size=(2, 5, WIDTH)).astype(np.float32) for _ in range(2))
    inputs = keras.Input((5, WIDTH))
    splits = divide_layers(keras.Model(inputs, block(inputs)), ModelAxis([["/cpu:0"]] * SIZE, 0, SIZE))
    assert all(id(each) in splits for each in experts.weights if len(each.shape) == 3)
    assert not any(
        each.path.endswith(("router_dense/kernel", "gate_dense/kernel"))
        for each in weights
        if id(each) in splits and each.shape[-1] == EXPERTS
    )

    def outputs_and_gradients(given: list[np.ndarray]) -> Any:
        tensors, own = tf.constant(x), [tf.constant(each) for each in given]
        scope = keras.StatelessScope(collect_losses=True)
        scope.state_mapping = dict(zip(map(id, weights), own, strict=True))
        with tf.GradientTape() as tape, scope:
            tape.watch([tensors, *own])
            outputs, _ = block(tensors, training=True) if backbone != "GptOss" else block(tensors)
            targets = tf.reduce_sum(outputs * upstream) + sum(scope.losses)
        return outputs, tape.gradient(targets, [tensors, *own])

    expected, (of_x, *of_weights) = outputs_and_gradients(values)
    found = on_devices(
        lambda rank, axis: outputs_and_gradients(
            [
                splits[id(each)].part(value, rank) if id(each) in splits else value
                for each, value in zip(weights, values, strict=True)
            ]
        )
    )
    for outputs, (own_of_x, *_) in found:
        np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(own_of_x, of_x, rtol=1e-4, atol=1e-3)
    for number, variable in enumerate(weights):
        parts = [gradients[1 + number] for _, gradients in found]
        whole = splits[id(variable)].joined(parts) if id(variable) in splits else parts[0]
        if has_gradient_in_parts(variable):
            whole = sum(parts)
        np.testing.assert_allclose(whole, of_weights[number], rtol=1e-4, atol=1e-3, err_msg=variable.path)


def test_other_readers_get_the_sum_over_devices():
    own, upstream = (np.random.default_rng(seed).normal(size=(SIZE, EXPERTS, 5, WIDTH)) for seed in (0, 1))

    def program(rank: int, axis: ModelAxis) -> Any:
        with axis.on_own_device() as place, tf.GradientTape() as tape:
            part = tf.constant(own[rank])
            tape.watch(part)
            outputs = keras.ops.square(PartOfExperts(place, part))
        return outputs, tape.gradient(outputs, part, upstream[0])

    for outputs, gradient in on_devices(program):
        np.testing.assert_allclose(outputs, own.sum(axis=0) ** 2)
        np.testing.assert_allclose(gradient, 2 * own.sum(axis=0) * upstream[0])


def test_what_is_no_layer_of_experts():
    assert units_of(keras.layers.Dense(4)) == 0
    assert units_of(block_of("Mixtral")) == 0

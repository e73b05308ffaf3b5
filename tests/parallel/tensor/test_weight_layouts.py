"""Layouts of weights, Keras' and keras-hub's, in terms of the ways layers are divided."""

from __future__ import annotations

import logging
import re

from tests.integration.scripts import divided_models
from tests.training.model.test_keras_hub import gpt2, llama
from tfpar.config import ConfigError
from tfpar.parallel.tensor.layout import find_layout
from tfpar.parallel.tensor.ways import weight_of
from tfpar.parallel.tensor.weight_layouts import find_weight_layout, names_weights

import keras
import keras_hub
import pytest


def mesh(model: int = 2, names: tuple[str, str] = ("batch", "model")) -> keras.distribution.DeviceMesh:
    return keras.distribution.DeviceMesh((1, model), names, devices=[f"cpu:{index}" for index in range(model)])


def ways(layouts) -> dict[str, str]:
    return {layer.path or layer.name: layout.way for layer, layout in layouts.values()}


def splits(layouts) -> dict[str, int]:
    return {
        weight_of(layer, name).path: split.axis
        for layer, layout in layouts.values()
        for name, split in layout.splits.items()
    }


def test_the_map_of_a_grouped_query_model_divides_it():
    """It asks for queries along the width, and gets heads: the same weights are divided, in the same memory. The second
    table of the head follows the first."""
    model = llama()[0]
    layout = type(model.backbone).get_layout_map(mesh())
    assert names_weights(layout)
    found = find_weight_layout(model, 2, layout)
    assert ways(found) == ways(find_layout(model, 2))
    assert splits(found)["transformer_layer_0/self_attention/query/kernel"] == 1
    for variable in model.trainable_variables:
        asked = layout[variable.path]
        assert not asked or ("model" in asked.axes) == (variable.path in splits(found))


SIZES = {"vocabulary_size": 32, "num_layers": 1, "hidden_dim": 16, "intermediate_dim": 32}
GEMMA = {"num_query_heads": 4, "num_key_value_heads": 2, "head_dim": 4}


@pytest.mark.parametrize(
    ("backbone", "sizes", "pair"),
    [
        (keras_hub.models.GemmaBackbone, GEMMA, ("ffw_gating", "ffw_linear")),
        (keras_hub.models.FalconBackbone, {"num_attention_heads": 4}, ("dense_h_to_4h", "dense_4h_to_h")),
        (keras_hub.models.BloomBackbone, {"num_heads": 4}, ("mlp_intermediate_dense", "mlp_output_dense")),
    ],
)
def test_feed_forward_layers_of_other_names_are_divided(backbone, sizes, pair):
    model = backbone(**SIZES, **sizes)
    found = {path.rpartition("/")[2]: way for path, way in ways(find_layout(model, 2)).items()}
    assert [found[name] for name in pair] == ["column", "row"]
    if hasattr(backbone, "get_layout_map"):
        asked = splits(find_weight_layout(model, 2, backbone.get_layout_map(mesh())))
        assert {"decoder_block_0/ffw_gating_2/kernel", "decoder_block_0/ffw_linear/kernel"} <= asked.keys()


def test_a_map_that_names_the_only_head_of_keys(caplog):
    """It stays whole: all heads of queries read it."""
    caplog.set_level(logging.INFO, "tfpar")
    backbone = keras_hub.models.GemmaBackbone
    model = backbone(**SIZES, **{**GEMMA, "num_key_value_heads": 1})
    found = find_weight_layout(model, 2, backbone.get_layout_map(mesh()))
    assert ways(found) == ways(find_layout(model, 2))
    assert splits(found)["decoder_block_0/attention/query/kernel"] == 0
    assert "decoder_block_0/attention/key/kernel" not in splits(found)
    assert re.search("whole, because all heads share them: .*decoder_block_0/attention/key/kernel", caplog.text)


def experts(kind: str, **options: int) -> keras.Model:
    sizes = {"num_query_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "top_k": 2, **SIZES, **options}
    return getattr(keras_hub.models, kind)(**sizes)


def test_weights_of_experts_are_divided_together():
    """Also if a layout names another dim; a bias follows."""
    model = experts("GptOssBackbone")
    found = find_weight_layout(model, 2, {"experts/(gate_up|down)_proj$": 2})
    assert {path.rpartition("/")[2]: axis for path, axis in splits(found).items()} == {
        "gate_up_proj": 2,
        "gate_up_proj_bias": 1,
        "down_proj": 1,
    }
    with pytest.raises(ConfigError, match=r"gate_up_proj can only be divided together with .*down_proj"):
        find_weight_layout(model, 2, {"experts/gate_up_proj$": 2})


class NormBetween(keras.layers.Layer):
    """Names of keras-hub's feed-forward layers, but the norm needs all hidden units."""

    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(64, name="mlp_intermediate_dense")
        self.norm, self.last = keras.layers.LayerNormalization(), keras.layers.Dense(64, name="mlp_output_dense")

    def build(self, shape):
        self.first.build(shape)
        self.norm.build((None, 64))
        self.last.build((None, 64))

    def call(self, x):
        return self.last(self.norm(self.first(x)))


@pytest.mark.parametrize("inside", [True, False])
def test_names_alone_make_no_pair(inside):
    """Neither in a layer that is not keras-hub's nor in a model's graph."""
    inputs, layer = keras.Input((64,)), NormBetween()
    x = layer(inputs) if inside else layer.last(layer.norm(layer.first(inputs)))
    found = ways(find_layout(keras.Model(inputs, x), 2))
    assert {path.rpartition("/")[2]: way for path, way in found.items()} == {
        "mlp_intermediate_dense": "gather",
        "mlp_output_dense": "gather",
    }


def test_what_is_no_layout_is_refused():
    with pytest.raises(ConfigError, match="layout='up': give a dict"):
        names_weights("up")


def test_axes_and_dims_of_weights():
    """What is not named is whole; biases follow their kernels; a layer whose partner is not named is gathered."""
    model = gpt2()[0]
    feed_forward = {"feedforward_intermediate.*kernel": (None, "model"), "feedforward_output.*kernel": 0}
    found = find_weight_layout(model, 2, {**feed_forward, "_embedding": None})
    assert splits(found) == {
        "transformer_layer_0/feedforward_intermediate_dense/kernel": 1,
        "transformer_layer_0/feedforward_intermediate_dense/bias": 0,
        "transformer_layer_0/feedforward_output_dense/kernel": 0,
    }
    layout = keras.distribution.LayoutMap(None)
    layout[".*(first|second)/kernel"] = (None, "model")
    layout[".*third/kernel"] = ("batch", "model")
    found = find_weight_layout(divided_models.dense(), 2, layout)
    assert ways(found)["sequential/third"] == "gather"
    assert ways(found)["sequential/first"] == "column"


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"first/kernel": 0}, "first/kernel can only be divided together with sequential/second/kernel"),
        ({"norm/gamma": ("model",)}, "norm/gamma cannot be divided over 2 devices along dim 0: LayerNormalization"),
        ({"last/kernel": 0}, "last/kernel cannot be divided over 2 devices along dim 0: Dense"),
        ({"first/kernel": 2}, r"first/kernel \(12, 64\) has no dim 2"),
        ({"first/kernel": ("model",)}, "has 2 dims, not 1"),
        ({"first/kernel": (None, "expert")}, "'expert' is not an axis over which layers can be divided"),
        ({"frist": 1}, "'frist' matches no weight. The model has: sequential/first/kernel"),
        ({"first/kernel": 1, "last": "gather"}, "Use one kind for all of them"),
        ({"first/bias": None}, "has no layer that can be divided"),
    ],
)
def test_what_cannot_be_carried_out_is_refused(rules, message):
    def find() -> None:
        assert names_weights(rules)
        find_weight_layout(divided_models.dense(), 2, rules)

    with pytest.raises(ConfigError, match=message):
        find()


def test_a_map_for_another_mesh_is_refused():
    layout = keras.distribution.LayoutMap(mesh(4))
    layout["sequential/first/kernel"] = (None, "model")
    with pytest.raises(ConfigError, match="DeviceMesh has 4 devices on the axis 'model', and --mesh has 2"):
        find_weight_layout(divided_models.dense(), 2, layout)

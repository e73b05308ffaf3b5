"""Models that meshes divide, and examples for them."""

from __future__ import annotations

import functools
from typing import Any

from tests.integration.scripts import sharded
from tests.integration.scripts.sharded import EXAMPLES
from tfpar import models
from tfpar.models import TaskSpec
from tfpar.models.transformer import TokenEmbedding

import keras
import numpy as np

VOCABULARY, LARGE, POSITIONS = 32, 1500, 8
EXPERTS = ("mixtral", "gpt_oss", "qwen_moe", "qwen3_moe", "qwen3_5_moe")


def dense() -> keras.Model:
    """Two pairs, one with dropout that draws nothing, and a Dense layer without a partner."""
    return keras.Sequential(
        [
            keras.Input((12,)),
            keras.layers.Dense(64, "tanh", name="first"),
            keras.layers.Dropout(0.0),
            keras.layers.Dense(24, name="second"),
            keras.layers.LayerNormalization(name="norm"),
            keras.layers.Dense(128, name="third"),
            keras.layers.Activation("relu"),
            keras.layers.Dense(48, name="fourth"),
            keras.layers.LayerNormalization(name="last_norm"),
            keras.layers.Dense(3, name="last"),
        ]
    )


def batch_statistics(*, synchronized: bool = False) -> keras.Model:
    """State that is not divided."""
    return keras.Sequential(
        [
            keras.Input((12,)),
            keras.layers.Dense(64, "relu", name="first"),
            keras.layers.Dense(48, use_bias=False, name="second"),
            models.BatchNormalization(synchronized=synchronized, name="batch_norm"),
            keras.layers.Dense(3, name="last"),
        ]
    )


def attention() -> keras.Model:
    """Keras' two kinds of attention over tokens, and a head that is gathered."""
    tokens = keras.Input((POSITIONS,), dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, 24)(tokens)
    x = x + keras.layers.MultiHeadAttention(4, 6)(x, x, use_causal_mask=True)
    x = x + keras.layers.GroupQueryAttention(6, 8, 4)(keras.layers.LayerNormalization()(x), x)
    x = x + keras.layers.Dense(24)(keras.layers.Dense(96, "gelu")(keras.layers.LayerNormalization()(x)))
    return keras.Model(tokens, keras.layers.Dense(VOCABULARY, name="logits")(x))


def language_model(vocabulary: int = VOCABULARY, width: int = 32) -> keras.Model:
    spec = TaskSpec("language_model", (POSITIONS,), "int32", vocabulary)
    return models.build("transformer_lm_tiny", spec, width=width, depth=2, heads=4, dropout=0.0)


def tied() -> keras.Model:
    """A table on the first stage and the last, most of whose rows no example reads."""
    tokens, table = keras.Input((POSITIONS,), dtype="int32"), TokenEmbedding(LARGE, 16)
    x = keras.layers.Dense(16)(keras.layers.Dense(64, "tanh")(table(tokens)))
    return keras.Model(tokens, table(keras.layers.LayerNormalization()(x), reverse=True))


def three_heads() -> keras.Model:
    """Attention whose heads no axis of two divides, though it divides their width."""
    spec = TaskSpec("language_model", (POSITIONS,), "int32", VOCABULARY)
    return models.build("transformer_lm_tiny", spec, width=48, depth=1, heads=3, dropout=0.0)


def vit() -> keras.Model:
    spec = TaskSpec("classification", (8, 8, 1), "float32", 3)
    return models.build("vit", spec, patch_size=4, width=32, depth=2, heads=4, dropout=0.0)


def gpt2() -> keras.Model:
    import keras_hub

    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=VOCABULARY + 3,
        num_layers=2,
        num_heads=4,
        hidden_dim=16,
        intermediate_dim=64,  # a kernel of 1,024 elements, which --shard divides
        max_sequence_length=POSITIONS,
        dropout=0.0,
    )
    return keras_hub.models.GPT2CausalLM(backbone)


def grouped_query() -> keras.Model:
    """Fewer heads of keys and values than of queries, and a head with a table of its own."""
    import keras_hub

    backbone = keras_hub.models.LlamaBackbone(
        vocabulary_size=VOCABULARY,
        num_layers=2,
        num_query_heads=8,
        num_key_value_heads=4,
        hidden_dim=16,
        intermediate_dim=64,  # a kernel of 1,024 elements, which --shard divides
        dropout=0.0,
    )
    return keras_hub.models.LlamaCausalLM(backbone)


def counted_heads(of_keys: int = 2) -> keras.Model:
    """Attention that reads its numbers of heads from attributes, also for its scale, and norms that all heads share."""
    import keras_hub

    backbone = keras_hub.models.Gemma3Backbone(
        vocabulary_size=VOCABULARY,
        image_size=None,
        num_layers=2,
        num_query_heads=4,
        num_key_value_heads=of_keys,
        hidden_dim=16,
        intermediate_dim=32,
        head_dim=8,
        query_head_dim_normalize=False,
        use_query_key_norm=True,
        vision_encoder=None,
    )
    return keras_hub.models.Gemma3CausalLM(preprocessor=None, backbone=backbone)


def experts(kind: str) -> keras.Model:
    """A mixture of one of `EXPERTS`; the routers of Mixtral and Qwen add losses."""
    import keras_hub

    hub, units = keras_hub.models, {"intermediate_dim": 24}
    qwen = {"moe_intermediate_dim": 20}
    options: dict[str, tuple[Any, dict[str, Any]]] = {
        "mixtral": (hub.MixtralBackbone, units),
        "gpt_oss": (hub.GptOssBackbone, units),
        "qwen_moe": (hub.QwenMoeBackbone, {**units, **qwen, "shared_expert_intermediate_dim": 16}),
        "qwen3_moe": (hub.Qwen3MoeBackbone, {**units, **qwen, "head_dim": 8}),
        "qwen3_5_moe": (
            hub.Qwen3_5MoeBackbone,
            {**qwen, "shared_expert_intermediate_size": 16, "head_dim": 8, "layer_types": ["full_attention"]},
        ),
    }
    sizes = {"vocabulary_size": VOCABULARY, "num_layers": 1, "hidden_dim": 16, "num_experts": 4, "top_k": 2}
    backbone = options[kind][0](**sizes, num_query_heads=4, num_key_value_heads=2, **options[kind][1])
    return keras.Model(backbone.input, backbone.token_embedding(backbone.output, reverse=True))


def map_of_backbone(mesh: str) -> keras.distribution.LayoutMap:
    """What the backbone of `grouped_query` says of a mesh."""
    import keras_hub

    size = int(mesh.rpartition(":")[2])
    devices = keras.distribution.DeviceMesh((1, size), ("batch", "model"), [f"cpu:{index}" for index in range(size)])
    return keras_hub.models.LlamaBackbone.get_layout_map(devices)


def recurrent() -> keras.Model:
    """A mask that goes from the first layer to the last, past the place where a pipeline is cut."""
    tokens = keras.Input((POSITIONS,), dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, 16, mask_zero=True)(tokens)
    # cuDNN takes masks only if they end with what is masked.
    x = keras.layers.LSTM(16, return_sequences=True, use_cudnn=False)(x)
    x = keras.layers.Bidirectional(keras.layers.GRU(12, use_cudnn=False))(x)
    return keras.Model(tokens, keras.layers.Dense(3)(x))


def resnet(normalization: str = "batch") -> keras.Model:
    """State in every stage, and shortcuts."""
    spec = TaskSpec("classification", (8, 8, 1), "float32", 3)
    return models.build("resnet18", spec, blocks=[1, 1], normalization=normalization)


def branches(*, has_pair: bool = False) -> keras.Model:
    """Inputs and outputs by name, a tensor that skips layers, a layer that is used twice, and a loss of a layer. A
    model axis divides nothing but the pair."""
    first, second = keras.Input((12,), name="first"), keras.Input((12,), name="second")
    shared = keras.layers.Dense(16, "tanh")
    early = shared(first)
    x = keras.layers.Dense(16, "relu")(early)
    x = keras.layers.Concatenate()([x, shared(second), second])
    if has_pair:
        x = keras.layers.Dense(16, name="narrow")(keras.layers.Dense(32, "relu", name="wide")(x))
    x = keras.layers.Dense(16, activity_regularizer=keras.regularizers.L2(0.01))(x)
    outputs = {"kind": keras.layers.Dense(3, name="kind")(x), "size": keras.layers.Dense(1, name="size")(early)}
    return keras.Model({"first": first, "second": second}, outputs)


def own_mask() -> keras.Model:
    """A mask that depends on weights, on one of two outputs."""
    tokens = keras.Input((POSITIONS,), dtype="int32")
    x = keras.layers.Dense(8, "relu")(keras.layers.Embedding(VOCABULARY, 16)(tokens))
    x = keras.layers.LSTM(16, return_sequences=True)(keras.layers.Masking()(x))
    outputs = {"kind": keras.layers.Dense(VOCABULARY, name="kind")(x), "size": keras.layers.Dense(1, name="size")(x)}
    return keras.Model(tokens, outputs)


def constrained() -> keras.Model:
    """Weights that only a whole update keeps within their bounds, in the first and in the last layers."""

    def bounded(units: int, name: str) -> keras.layers.Layer:
        return keras.layers.Dense(units, "tanh", name=name, kernel_constraint=keras.constraints.MaxNorm(0.8))

    plain = [keras.layers.Dense(24, name="second"), keras.layers.Dense(128, "relu", name="third")]
    return keras.Sequential(
        [keras.Input((12,)), bounded(64, "first"), *plain, bounded(48, "fourth"), keras.layers.Dense(3)]
    )


def shared_layer() -> keras.Model:
    """A layer on two stages, which is the first of neither."""
    x = inputs = keras.Input((12,))
    shared = keras.layers.Dense(64, "tanh", name="shared")
    x = shared(keras.layers.Dense(64, "tanh")(x))
    x = keras.layers.Dense(64, "tanh")(keras.layers.Dense(64, "tanh")(x))
    return keras.Model(inputs, keras.layers.Dense(3)(shared(x)))


class Spare(keras.layers.Dense):
    """Has a weight that its output does not depend on."""

    def build(self, shape):
        super().build(shape)
        self.spare = self.add_weight(shape=(64, 64), initializer="ones", name="spare")


def unread() -> keras.Model:
    """The first stage has weights that the loss does not reach: a spare one, and those of an output that it does not
    read."""
    x = early = Spare(64, "tanh")(inputs := keras.Input((12,)))
    size = keras.layers.Dense(1, name="size")(early)
    x = keras.layers.Concatenate()([x, keras.ops.stop_gradient(size)])
    for _ in range(2):
        x = keras.layers.Dense(64, "tanh")(x)
    return keras.Model(inputs, {"kind": keras.layers.Dense(3, name="kind")(x), "size": size})


def penalized() -> keras.Model:
    """Penalties of weights: of a layer on two stages, and one that is no sum over elements."""
    regularizers = keras.regularizers
    x = inputs = keras.Input((12,))
    shared = keras.layers.Dense(64, "tanh", name="shared", kernel_regularizer=regularizers.L2(1e-2))
    x = shared(keras.layers.Dense(64, "tanh", kernel_regularizer=regularizers.OrthogonalRegularizer(1e-3))(x))
    x = keras.layers.Dense(64, "tanh")(x)
    x = keras.layers.Dense(64, "tanh", kernel_regularizer=regularizers.L1L2(1e-3, 1e-3))(x)
    return keras.Model(inputs, keras.layers.Dense(3, bias_regularizer=regularizers.L1(1e-3))(shared(x)))


def dropouts() -> keras.Model:
    """A dropout of each stage, and one that both call."""
    x = inputs = keras.Input((12,))
    shared = keras.layers.Dropout(0.5, seed=1)
    for seed in (2, 3):
        x = keras.layers.Dropout(0.2, seed=seed)(keras.layers.Dense(64, "tanh")(x))
        x = shared(keras.layers.Dense(64, "tanh")(x))
    return keras.Model(inputs, keras.layers.Dense(3)(x))


def shared_in_pairs() -> keras.Model:
    """Two layers on two of three stages each: the middle stage has both."""
    x = inputs = keras.Input((12,))
    early, late = (keras.layers.Dense(48, "tanh", name=name) for name in ("early", "late"))
    x = early(keras.layers.Dense(48, "tanh", name="first")(x))
    x = late(early(keras.layers.Dense(48, "tanh", name="second")(x)))
    x = late(keras.layers.Dense(48, "tanh", name="third")(x))
    return keras.Model(inputs, keras.layers.Dense(3)(x))


def shared_statistics() -> keras.Model:
    """Batch statistics on two stages."""
    x = inputs = keras.Input((12,))
    shared = keras.layers.BatchNormalization(name="shared")
    x = shared(keras.layers.Dense(32, "tanh")(x))
    x = keras.layers.Dense(32, "tanh")(keras.layers.Dense(32, "tanh")(x))
    return keras.Model(inputs, keras.layers.Dense(3)(shared(x)))


def spoiled() -> keras.Model:
    """Layers of which the first alone has no finite gradient of one of the examples, while the loss is finite."""
    inputs = keras.Input((12,))
    x = sharded.Spoiled(dtype="float32")([keras.layers.Dense(64, "tanh")(inputs), inputs])
    x = keras.layers.Dense(64, "tanh")(keras.layers.Dense(64, "tanh")(x))
    return keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Dense(48, "tanh")(x)))


def overflowing() -> keras.Model:
    """A loss whose sum overflows for some batches, while its gradients do not."""
    layers = [keras.layers.Dense(64, "tanh", name=name) for name in ("first", "second", "third")]
    return keras.Sequential([keras.Input((12,)), *layers, keras.layers.Dense(1)])


MODELS = {
    "dense": dense,
    "shared_statistics": shared_statistics,
    "constrained": constrained,
    "shared_layer": shared_layer,
    "shared_in_pairs": shared_in_pairs,
    "unread": unread,
    "penalized": penalized,
    "dropouts": dropouts,
    "batch_statistics": batch_statistics,
    "synchronised": functools.partial(batch_statistics, synchronized=True),
    "attention": attention,
    "language_model": language_model,
    "uneven_vocabulary": functools.partial(language_model, VOCABULARY + 3),  # no axis divides it
    "large_vocabulary": functools.partial(language_model, LARGE, 16),  # no example reads most rows of its table
    "tied": tied,
    "three_heads": three_heads,
    "gpt2": gpt2,
    "grouped_query": grouped_query,
    "counted_heads": counted_heads,
    **{kind: functools.partial(experts, kind) for kind in EXPERTS},
    "multi_query": functools.partial(counted_heads, 1),
    "vit": vit,
    "recurrent": recurrent,
    "resnet": resnet,
    "synchronised_resnet": functools.partial(resnet, "sync_batch"),
    "branches": branches,
    "ignoring": functools.partial(branches, has_pair=True),
    "own_mask": own_mask,
    "spoiled": spoiled,
    "overflowing": overflowing,
}
IMAGES = ("vit", "resnet", "synchronised_resnet")


def data(model: str) -> tuple[Any, Any]:
    generator = np.random.default_rng(0)
    if model in ("attention", "language_model", "uneven_vocabulary", "large_vocabulary", "tied", "three_heads"):
        tokens = generator.integers(0, VOCABULARY, (EXAMPLES, POSITIONS + 1)).astype(np.int32)
        return tokens[:, :-1], tokens[:, 1:]
    if model in ("gpt2", "grouped_query", "counted_heads", "multi_query", *EXPERTS):
        tokens = generator.integers(0, VOCABULARY, (EXAMPLES, POSITIONS + 1)).astype(np.int32)
        return {"token_ids": tokens[:, :-1], "padding_mask": np.ones_like(tokens[:, 1:])}, tokens[:, 1:]
    if model == "recurrent":
        tokens = generator.integers(0, 4, (EXAMPLES, POSITIONS)).astype(np.int32)
        return tokens, tokens[:, 0] % 3
    shape = (8, 8, 1) if model in IMAGES else (12,)
    x = generator.normal(size=(EXAMPLES, *shape)).astype(np.float32)
    kinds = x.reshape(EXAMPLES, -1)[:, :3].argmax(axis=1).astype(np.int32)
    if model == "own_mask":
        tokens = generator.integers(0, VOCABULARY, (EXAMPLES, POSITIONS)).astype(np.int32)
        return tokens, {"kind": tokens, "size": tokens[..., None].astype(np.float32)}
    if model == "spoiled":
        x[40] = 1e7
    if model == "overflowing":
        return x, np.where(np.arange(EXAMPLES)[:, None] // 6 == 10, np.float32(3e38), x[:, :1])
    if model == "unread":
        return x, {"kind": kinds, "size": x[:, :1]}
    if model in ("branches", "ignoring"):
        return {"first": x, "second": x[::-1].copy()}, {"kind": kinds, "size": x[:, :1]}
    return x, kinds


def first_of(values: Any, count: int) -> Any:
    """The first examples of arrays in any structure."""
    return keras.tree.map_structure(lambda part: part[:count], values)

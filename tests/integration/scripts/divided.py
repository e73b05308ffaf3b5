"""Runs on meshes, in one process or on real workers: tests/training/test_tensor_parallel.py and
tests/integration/test_tensor_parallel.py.

python -m tests.integration.scripts.divided OUTPUT CASES

CASES is JSON: a list of options of an experiment, with the name of a model of `MODELS`, each of which is trained in
turn. `OUTPUT/CASE-WORKER.npz` gets the whole weights, `params_sha256`, whether XLA compiled the optimizer step, the
bytes sent per step, the bytes of all messages that were traced, the bytes of the sums of gradients that a pipeline
keeps in shards, the loss of the evaluation and the examples that it left out, with `predicts` the predictions for the
first examples, and this worker's own copies of weights that other workers of its pipeline have too.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from typing import Any

import tfpar
from tests.integration.scripts import sharded
from tests.integration.scripts.sharded import EXAMPLES, STEPS
from tfpar import models
from tfpar.collectives.tensorflow import Channel
from tfpar.config import StrategyConfig
from tfpar.models import TaskSpec
from tfpar.models.transformer import TokenEmbedding
from tfpar.parallel import split, strategies
from tfpar.parallel.held import held_by
from tfpar.parallel.split import whole
from tfpar.parallel.topology import choose_topology
from tfpar.training.sharding.pipeline_step import PipelineScatteringStep

import keras
import numpy as np
import tensorflow as tf

VOCABULARY, LARGE, POSITIONS, PREDICTED = 32, 1500, 8, 21
COMMON = {**sharded.COMMON, "optimizer": "adamw", "jit_compile": "false"}


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


def counted_heads() -> keras.Model:
    """Attention that reads its numbers of heads from attributes, also for its scale, and norms that all heads share."""
    import keras_hub

    backbone = keras_hub.models.Gemma3Backbone(
        vocabulary_size=VOCABULARY,
        image_size=None,
        num_layers=2,
        num_query_heads=4,
        num_key_value_heads=2,
        hidden_dim=16,
        intermediate_dim=32,
        head_dim=8,
        query_head_dim_normalize=False,
        use_query_key_norm=True,
        vision_encoder=None,
    )
    return keras_hub.models.Gemma3CausalLM(preprocessor=None, backbone=backbone)


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


def penalized() -> keras.Model:
    """Penalties of weights: of a layer on two stages, and one that is no sum over elements."""
    regularizers = keras.regularizers
    x = inputs = keras.Input((12,))
    shared = keras.layers.Dense(64, "tanh", name="shared", kernel_regularizer=regularizers.L2(1e-2))
    x = shared(keras.layers.Dense(64, "tanh", kernel_regularizer=regularizers.OrthogonalRegularizer(1e-3))(x))
    x = keras.layers.Dense(64, "tanh")(x)
    x = keras.layers.Dense(64, "tanh", kernel_regularizer=regularizers.L1L2(1e-3, 1e-3))(x)
    return keras.Model(inputs, keras.layers.Dense(3, bias_regularizer=regularizers.L1(1e-3))(shared(x)))


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
    "penalized": penalized,
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
    if model in ("gpt2", "grouped_query", "counted_heads"):
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
    if model in ("branches", "ignoring"):
        return {"first": x, "second": x[::-1].copy()}, {"kind": kinds, "size": x[:, :1]}
    return x, kinds


def first_of(values: Any, count: int) -> Any:
    """The first examples of arrays in any structure."""
    return keras.tree.map_structure(lambda part: part[:count], values)


def here(strategy: str = "one_device", mesh: str = "", devices: int = 0, **options: Any) -> tfpar.Trainer:
    """Trains in this process."""
    runtime = runtime_of(strategy, mesh, devices)
    return train({"strategy": strategy, "mesh": mesh, "devices": devices, **options}, runtime)


def made_here(strategy: str, mesh: str, devices: int = 0, model: str = "dense", **options: Any) -> tfpar.Trainer:
    """What `here` trains, before its first step."""
    runtime = runtime_of(strategy, mesh, devices)
    return made(model, {"strategy": strategy, "mesh": mesh, "devices": devices, **options}, runtime)


def runtime_of(strategy: str, mesh: str = "", devices: int = 0) -> tfpar.Runtime:
    return strategies.build(choose_topology(StrategyConfig(strategy=strategy, mesh=mesh, devices=devices)))


def train(options: dict[str, Any], runtime: tfpar.Runtime | None = None) -> tfpar.Trainer:
    """Trains a model on the same examples from the same seed; its last results are `trainer.results`."""
    model, steps = options.pop("model", "dense"), options.pop("steps", STEPS)
    trainer = made(model, options, runtime)
    x, y = data(model)
    trainer.results = trainer.fit(x, y, steps=steps, validation=(first_of(x, 50), first_of(y, 50)))
    return trainer


def made(model: str, options: dict[str, Any], runtime: tfpar.Runtime | None) -> tfpar.Trainer:
    """A trainer of a model of `MODELS`, from the same seed."""
    # The bias of keys has no gradient but rounding, which Adam would make steps of.
    chosen = {} if model == "dense" else {"optimizer": "sgd", "learning_rate": 0.3}
    config = tfpar.ExperimentConfig.from_flat_dict({**COMMON, **chosen, **options})
    if runtime is None:
        runtime = tfpar.initialize(config)
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    loss: Any = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    metrics: Any = ["accuracy"]
    if model == "uneven_vocabulary":  # and some positions do not count
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=3)
        metrics = ["accuracy", keras.metrics.SparseCategoricalCrossentropy("nats", from_logits=True)]
    if model == "branches":
        loss, metrics = {"kind": loss, "size": "mse"}, {"kind": "accuracy"}
    if model == "ignoring":  # the losses are divided by different numbers
        loss = {"kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=1), "size": "mse"}
        metrics = {}
    if model == "overflowing":
        loss, metrics = "mae", []
    if model == "own_mask":
        loss, metrics = {"kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "size": "mse"}, {}
    mesh = config.strategy.mesh
    layout = map_of_backbone(mesh) if model == "grouped_query" and "model" in mesh else None
    return tfpar.Trainer(MODELS[model], loss=loss, metrics=metrics, config=config, runtime=runtime, layout=layout)


def weights_of(trainer: tfpar.Trainer) -> dict[str, np.ndarray]:
    return {variable.path: whole(variable) for variable in trainer.model.variables}


def own_copies(trainer: tfpar.Trainer) -> dict[str, np.ndarray]:
    """Copies of weights that several workers of a pipeline hold, which `weights_of` takes from one of them."""
    held = [(variable, held_by(variable)) for variable in trainer.model.trainable_variables]
    return {
        f"own {each.path}, part {by.layer_peers.rank if by.layer_peers and by.split else 0}": each.numpy()
        for each, by in held
        if by and by.here and len(by.ranks) > 1
    }


def main(output: str, cases: str) -> None:
    worker = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {}).get("index", 0)
    runtime = None
    messages: list[int] = []
    send = Channel.send

    def counted(channel: Channel, value: tf.Tensor, instance: int) -> tf.Tensor:
        messages.append((value.shape.num_elements() or 0) * value.dtype.size)  # rows of tables have no static number
        return send(channel, value, instance)

    sums: list[int] = []
    ends = PipelineScatteringStep._ends_micro_batch

    def kept(step: PipelineScatteringStep, summed: list[tf.Tensor]) -> None:
        sums[:] = [4 * (value.shape.num_elements() or 0) for value in summed]
        ends(step, summed)

    PipelineScatteringStep._ends_micro_batch = kept  # type: ignore[method-assign]
    Channel.send = counted  # type: ignore[method-assign]
    split._BLOCK_BYTES = 1 << 10  # of whole weights that are read: several blocks each
    for number, options in enumerate(json.loads(cases)):
        messages.clear()
        predicts = options.pop("predicts", False)
        model = options.get("model", "dense")
        trainer = train(options, runtime)
        runtime = trainer.runtime
        results = trainer.results
        facts = {"params_sha256": results["params_sha256"], "sent": results["exchange"]["wire_bytes_per_step"]}
        facts |= {"messages": sum(messages), "sums": sum(sums), "compiles_update": trainer.program.compiles_update}
        facts |= {"skipped": results["skipped_validation_examples"], "eval loss": results["eval"]["loss"]}
        if predicts:
            facts["predictions"] = trainer.predict(first_of(data(model)[0], PREDICTED))
        arrays = {**facts, **own_copies(trainer), **weights_of(trainer)}
        np.savez(os.path.join(output, f"{number}-{worker}.npz"), **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])

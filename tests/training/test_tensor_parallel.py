"""Replicas of several devices: the numbers of one device, a part of the weights on each."""

from __future__ import annotations

import functools
import pathlib

import tfpar
from tests.integration.scripts import divided, divided_models
from tfpar import models
from tfpar.checkpoint.run_state import params_sha256
from tfpar.config import ConfigError
from tfpar.models import TaskSpec
from tfpar.optim import keras_calls
from tfpar.optim.keras_deferred import is_deferred
from tfpar.parallel.split import shape_of, split_of
from tfpar.parallel.tensor.layout import find_layout
from tfpar.parallel.tensor.positions import divide_positions, has_gradient_in_parts
from tfpar.parallel.tensor.ways import OWN_NUMBERS
from tfpar.training.placing.base import build_on_host
from tfpar.training.planning.counting import count_model

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf


@functools.cache
def alone(model: str, **options) -> tuple[dict[str, np.ndarray], dict[str, float], list[np.ndarray]]:
    """Weights, results and predictions of one device."""
    trainer = divided.here(model=model, **options)
    return divided.weights_of(trainer), trainer.results["eval"], predictions_of(trainer, model)


def predictions_of(trainer: tfpar.Trainer, model: str) -> list[np.ndarray]:
    return keras.tree.flatten(
        trainer.predict(divided_models.first_of(divided_models.data(model)[0], divided.PREDICTED))
    )


def assert_as_alone(trainer: tfpar.Trainer, model: str, *, apart: str = "", **options) -> None:
    """Apart from weights whose paths end so."""
    weights, results, predictions = alone(model, **options)
    for name, value in divided.weights_of(trainer).items():
        if not apart or not name.endswith(apart):
            np.testing.assert_allclose(value, weights[name], rtol=1e-4, atol=1e-5, err_msg=name)
    assert trainer.results["eval"] == pytest.approx(results, rel=1e-4)
    for found, expected in zip(predictions_of(trainer, model), predictions, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def assert_predicts_alone(trainer: tfpar.Trainer, model: str) -> None:
    """The chief's pictures with predictions come of one call of the model outside of its devices' programs."""
    params = trainer.program.first_copies(trainer.program.eval_weights())
    others = trainer.program.first_copies(trainer.model.non_trainable_variables)
    x = divided_models.data(model)[0][:5]
    found = trainer.program.predict_alone(params, others, (x[np.newaxis], (), ()))
    np.testing.assert_allclose(found.numpy(), trainer.predict(x), rtol=1e-4, atol=1e-5)


def assert_saved_whole(trainer: tfpar.Trainer, workdir: pathlib.Path) -> None:
    """`model.keras` and the digest are of the whole model."""
    loaded = keras.saving.load_model(workdir / "model.keras")
    for variable, value in zip(loaded.variables, divided.weights_of(trainer).values(), strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    assert params_sha256(loaded.trainable_variables) == trainer.results["params_sha256"]


@pytest.mark.parametrize(
    ("model", "devices", "least"),
    [
        ("dense", 2, 0.4),
        ("batch_statistics", 4, 0.6),
        ("attention", 2, 0.4),
        ("language_model", 2, 0.4),
        ("vit", 4, 0.6),
    ],
)
def test_thirty_steps_equal_one_device(model, devices, least):
    """Weights, evaluation and predictions; and each device has its part of the weights and of the optimizer's state."""
    trainer = divided.here("mirrored", f"model:{devices}", model=model)
    assert_as_alone(trainer, model)
    assert_predicts_alone(trainer, model)
    variables = [*trainer.model.trainable_variables, *trainer.optimizer.variables]
    own = sum(int(np.prod(variable.shape)) for variable in variables)
    assert own < (1 - least) * sum(int(np.prod(shape_of(variable))) for variable in variables)
    for variable in variables:
        split, copies = split_of(variable), variable.value.values
        assert len(copies) == devices
        for copy in copies:
            assert tuple(copy.shape) == tuple(variable.shape)
            assert split or np.array_equal(copy.numpy(), copies[0].numpy()), variable.path


def bytes_of_language_model(trainer: tfpar.Trainer, metrics: int, gathers: int = 0) -> float:
    """The formula of docs/tensor_parallelism.md, for one micro-batch of float32.

    Args:
      trainer: Of a model of this width and depth.
      metrics: Metrics of logits.
      gathers: Of activations beside logits.
    """
    devices, depth, width = trainer.topology.mesh.model, 2, 32
    positions = divided.COMMON["global_batch_size"] // trainer.topology.replicas * divided_models.POSITIONS
    weights = [each for each in trainer.model.trainable_variables if not split_of(each)]
    whole = sum(int(np.prod(each.shape)) for each in weights)
    sidecar = 1 + 1 + len(trainer.program.core.metric_variables)  # count and loss, beside the gradients
    sums = (4 * depth + 2 + gathers / 2) * positions * width + whole + sidecar
    of_logits = (1 + metrics) * 2 * positions
    return 2 * (devices - 1) / devices * (4 * sums + 2 * 8) + (devices - 1) * 4 * of_logits


@pytest.mark.parametrize(
    "mesh",
    ["model:2", *(pytest.param(mesh, marks=pytest.mark.proof) for mesh in ("model:4", "data:2,model:2"))],
)
def test_logits_of_a_vocabulary_are_not_gathered(mesh):
    """Where its loss and metrics need no more: the numbers of one device, with a table that is padded and positions
    that do not count, and not one byte more than the formula."""
    model, devices = "uneven_vocabulary", int(mesh[-1])
    trainer = divided.here("mirrored", mesh, 4 if "data" in mesh else devices, model=model)
    assert_as_alone(trainer, model)
    table = trainer.model.get_layer("token_embedding").embeddings
    assert tuple(table.shape) == (-(-35 // devices), 32)
    sent = trainer.results["exchange"]["model_axis_bytes_per_step"]
    assert sent == pytest.approx(bytes_of_language_model(trainer, metrics=2), abs=1)


@pytest.mark.parametrize(
    "mesh",
    ["model:2", *(pytest.param(mesh, marks=pytest.mark.proof) for mesh in ("model:4", "data:2,model:2"))],
)
def test_sequence_parallelism(mesh):
    """The numbers of one device, by norms that see a part of the positions, for two gathers more: from the last block,
    and of the gradient of the first."""
    model, devices, seen = "language_model", int(mesh[-1]), []
    trainer = divided.here("mirrored", mesh, 4 if "data" in mesh else devices, model=model, sequence_parallel=True)
    sent = trainer.results["exchange"]["model_axis_bytes_per_step"]
    assert sent == pytest.approx(bytes_of_language_model(trainer, metrics=1, gathers=2), abs=1)
    norm = trainer.model.get_layer("block0").mlp_norm
    keras_calls.replace_call(norm, lambda layer, plain, x: (seen.append(x.shape[1:]), plain(x))[1])
    assert_as_alone(trainer, model)
    assert {*map(tuple, seen)} == {(divided_models.POSITIONS // devices, 32)}


@pytest.mark.parametrize("options", [{}, {"stages": "final_norm", "recompute": "blocks"}])
def test_sequence_parallelism_in_stages(options):
    """With the cut between two blocks, and with both in the first stage."""
    mesh = "pipeline:2,model:2"
    options = {"accumulate_steps": 2, "steps": 6, **options}
    trainer = divided.here("mirrored", mesh, 4, model="language_model", sequence_parallel=True, **options)
    assert_as_alone(trainer, "language_model", accumulate_steps=2, steps=6)


def test_what_leaves_the_devices_has_all_positions():
    spec = TaskSpec("language_model", (8,), "int32", 32)
    model = models.build("transformer_lm_tiny", spec, width=32, depth=3, heads=4)
    layouts, blocks = find_layout(model, 2), [model.get_layer(f"block{number}") for number in range(3)]
    assert divide_positions(model, layouts, 2, {id(blocks[1].output)}) == 3
    assert [layouts[id(block)][1].edges for block in blocks] == [(True, False), (False, True), (True, True)]


@pytest.mark.parametrize("options", [{}, {"lora": "2:."}], ids=["kernels", "adapters"])
def test_penalties_of_weights(options):
    """Those of all parts, once, in gradients and losses; of adapters, too, whose gradients devices add up."""
    options = {"model": "penalized", "steps": 6, "learning_rate": 0.1, **options}
    trainer = divided.here("mirrored", "model:2", 2, **options)
    expected = divided.here(**options)
    for name, value in divided.weights_of(expected).items():
        np.testing.assert_allclose(divided.weights_of(trainer)[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    for name in ("train_loss", "eval"):
        assert trainer.results[name] == pytest.approx(expected.results[name], rel=1e-4)


@pytest.mark.parametrize("options", [{"accumulate_steps": 2}, {"shard": "weights", "mesh": "data:2,model:2"}])
def test_losses_that_are_divided_by_different_numbers(options):
    """Which are counted before the backward pass; devices that communicate meanwhile must not do so in a loop."""
    given = {"mesh": "model:2", "model": "own_mask", "steps": 6, **options}
    trainer = divided.here("mirrored", given.pop("mesh"), 4 if "shard" in options else 2, **given)
    expected = divided.here(model="own_mask", steps=6)
    for name, value in divided.weights_of(expected).items():
        np.testing.assert_allclose(divided.weights_of(trainer)[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    assert trainer.results["eval"] == pytest.approx(expected.results["eval"], rel=1e-4)


def attention_with_scores(axes: tuple[int, ...] | None = None) -> keras.Model:
    x = inputs = keras.Input((divided_models.POSITIONS,), dtype="int32")
    x = keras.layers.Embedding(divided_models.VOCABULARY, 32)(x)
    x = keras.layers.Reshape((2, divided_models.POSITIONS // 2, 32))(x) if axes else x
    attention = keras.layers.MultiHeadAttention(4, 8, attention_axes=axes, name="attention")
    x, scores = attention(x, x, return_attention_scores=True)
    x = keras.layers.Reshape((divided_models.POSITIONS, 32))(x)
    scores = keras.layers.Reshape((divided_models.POSITIONS, -1))(keras.ops.square(scores))
    return keras.Model(inputs, keras.layers.Dense(divided_models.VOCABULARY)(keras.layers.Concatenate()([x, scores])))


def test_attention_returns_the_scores_of_all_heads(monkeypatch):
    monkeypatch.setitem(divided_models.MODELS, "attention", attention_with_scores)
    options = {"model": "attention", "steps": 6, "eval_batch_size": 12}
    expected = divided.weights_of(divided.here(**options))
    for name, value in divided.weights_of(divided.here("mirrored", "model:2", 2, **options)).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-4, atol=1e-5, err_msg=name)
    monkeypatch.setitem(divided_models.MODELS, "attention", functools.partial(attention_with_scores, (2,)))
    with pytest.raises(ConfigError, match=r"'?attention'? returns its scores, of shape .*'attention': 'whole'"):
        divided.here("mirrored", "model:2", 2, **options)


def test_dropout_of_positions_draws_for_each_device():
    spec = TaskSpec("language_model", (8,), "int32", 32)
    model = models.build("transformer_lm_tiny", spec, width=32, depth=2, heads=4, dropout=0.1)
    layouts = find_layout(model, 2)
    assert divide_positions(model, layouts, 2) == 2
    blocks = [model.get_layer(f"block{number}") for number in range(2)]
    assert [layouts[id(block)][1].edges for block in blocks] == [(True, False), (False, True)]
    for block in blocks:
        assert layouts[id(block.attention_dropout)][1].way == layouts[id(block.mlp_dropout)][1].way == OWN_NUMBERS
        assert all(has_gradient_in_parts(each) for each in (block.mlp_norm.gamma, block.mlp_out.bias))
        assert not any(has_gradient_in_parts(each) for each in (block.qkv.bias, block.mlp_out.kernel))


@pytest.mark.parametrize(
    ("model", "message"), [("gpt2", "has no divided block that allows it"), ("vit", "5 positions")]
)
def test_positions_that_cannot_be_divided_are_refused(model, message):
    built = divided_models.MODELS[model]()
    with pytest.raises(ConfigError, match=message):
        divide_positions(built, find_layout(built, 2), 2)


@pytest.mark.proof
@pytest.mark.parametrize("mesh", ["model:2", "model:4", "data:2,model:2"])
@pytest.mark.parametrize("model", ["gpt2", "grouped_query", "counted_heads", "multi_query"])
def test_thirty_steps_of_keras_hub(model, mesh):
    """With an uneven vocabulary, and with the layout of the backbone."""
    trainer = divided.here("mirrored", mesh, 4 if "data" in mesh else int(mesh[-1]), model=model)
    assert_as_alone(trainer, model)
    assert split_of(trainer.model.get_layer("token_embedding").embeddings)


MIXTURES = {"global_batch_size": 15, "eval_batch_size": 15}  # losses that routers add include the padding of batches


def test_experts_are_divided_by_hidden_units():
    """With the numbers of one device, and the bytes that the planner counts: experts are added up before devices are,
    so that a block sums as much as one without experts, and the gradients of the experts' weights for each token."""
    options = {**MIXTURES, "model": "mixtral", "steps": 4}
    trainer = divided.here("mirrored", "model:2", 2, **options)
    assert_as_alone(trainer, **options)
    divided_names = {each.path.rpartition("/")[2] for each in trainer.model.trainable_variables if split_of(each)}
    assert {f"expert_feedforward_{name}_dense" for name in ("gate", "intermediate", "output")} <= divided_names
    layers = count_model(divided_models.MODELS["mixtral"](), [2], length=divided_models.POSITIONS).layers[2]
    [block] = [layer for layer in layers if len(layer.sums) > 1 and "embedding" not in layer.name]
    positions, width, experts = divided_models.POSITIONS, 16, 4
    assert block.sums == (4 * positions * width,) * 2 + (
        4 * positions * width,
        4 * positions * experts,
        4 * positions * width,
    )
    weights = [each for each in trainer.model.trainable_variables if not split_of(each)]
    whole = sum(int(np.prod(each.shape)) for each in weights) + 2 + len(trainer.program.core.metric_variables)
    examples = MIXTURES["global_batch_size"]
    of_logits = 2 * 2 * positions * examples * 4
    assert trainer.results["exchange"]["model_axis_bytes_per_step"] == pytest.approx(
        examples * sum(map(sum, (layer.sums for layer in layers))) + 4 * whole + 2 * 8 + of_logits, abs=1
    )


@pytest.mark.proof
@pytest.mark.parametrize("mesh", ["model:2", "model:4"])
@pytest.mark.parametrize("model", divided_models.EXPERTS)
def test_thirty_steps_of_mixtures(model, mesh):
    """Of one replica: routers add losses that are no sums over examples."""
    options = {**MIXTURES, "model": model}
    assert_as_alone(divided.here("mirrored", mesh, int(mesh[-1]), **options, recompute="blocks"), **options)


def test_routers_of_experts_stay_whole():
    """keras-hub names one as the first layer of a feed-forward pair, but no layer takes a part of its outputs, and to
    gather these would cost more than it saves, however wide the model is."""
    sizes = {"vocabulary_size": 16, "num_layers": 1, "hidden_dim": 128, "intermediate_dim": 16}
    heads = {"num_query_heads": 4, "num_key_value_heads": 2}
    for build in (keras_hub.models.MixtralBackbone, keras_hub.models.GptOssBackbone):
        model = build(**sizes, **heads, num_experts=64, top_k=2)
        assert not [
            name for layer, _ in find_layout(model, 2).values() if "router" in (name := layer.name) or "gate" in name
        ]


def test_convolutions_are_divided_by_channels():
    """The large ones by themselves, others where a rule says so."""
    options = {"model": "resnet", "learning_rate": 0.03, "steps": 10}
    trainer = divided.here("mirrored", "model:2", **options)
    assert_as_alone(trainer, **options)
    found = {each.path for each in trainer.model.trainable_variables if split_of(each)}
    assert found == {f"stage1_block0_{name}_conv/kernel" for name in "ab"}
    asked = find_layout(divided_models.resnet(), 2, {"(stem|shortcut)_conv": "gather"})
    ways = {layer.name: layout.way for layer, layout in asked.values()}
    assert ways["stem_conv"] == ways["stage1_block0_shortcut_conv"] == "gather"


def test_heads_are_not_cut():
    """A block whose heads the axis does not divide has its outputs gathered instead."""
    trainer = divided.here("mirrored", "model:2", model="three_heads", steps=4)
    assert_as_alone(trainer, model="three_heads", steps=4)
    ways = {layer.name: layout.way for layer, layout in find_layout(divided_models.three_heads(), 2).values()}
    assert ways["qkv"] == "gather"
    with pytest.raises(ConfigError, match="has no divided block that allows it"):
        divide_positions(model := divided_models.three_heads(), find_layout(model, 2), 2)


@pytest.mark.parametrize(
    ("mesh", "recompute"), [("model:2", "none"), ("data:2,model:2", "none"), ("data:2,model:2", "blocks")]
)
def test_micro_batches(tmp_path, mesh, recompute):
    """Replicas of one process, too, and where the backward pass calls blocks again; what is saved is whole."""
    options = {"model": "dense", "accumulate_steps": 2}
    devices = 2 if mesh == "model:2" else 4
    workdir = {"workdir": str(tmp_path / "run")}
    trainer = divided.here("mirrored", mesh, devices, **options, **workdir, recompute=recompute)
    assert trainer.topology.replicas == devices // 2
    assert_as_alone(trainer, **options)
    assert_saved_whole(trainer, tmp_path / "run")


@pytest.mark.proof
def test_replicas_of_one_process_evaluate_and_predict():
    """Also where the backward pass calls blocks again, and what their devices tell each other with them."""
    options = {"model": "language_model", "steps": 6}
    assert_as_alone(divided.here("mirrored", "data:2,model:2", 4, **options, recompute="blocks"), **options)


@pytest.mark.proof
@pytest.mark.parametrize("model", ["dense", "qwen_moe"])
def test_what_one_mesh_saves_another_resumes(tmp_path, model):
    """The checkpoint, the digest and `model.keras` are of the whole model."""
    options = {**MIXTURES, "model": model}
    workdir = {**options, "workdir": str(tmp_path / "run")}
    divided.here("mirrored", "model:2", stop_after=10, **workdir)
    divided.here("one_device", stop_after=10, **workdir)
    trainer = divided.here("mirrored", "model:4", **workdir)
    assert_as_alone(trainer, **options)
    assert_saved_whole(trainer, tmp_path / "run")


def test_a_model_is_built_without_values():
    """Each variable gets its own when it is moved; it need not fit in the memory of the host."""
    for build in (divided_models.language_model, divided_models.resnet, divided_models.gpt2):
        made, _ = build_on_host(build, tf.distribute.get_strategy(), announced=False)
        assert all(map(is_deferred, made.variables))


def test_the_users_own_model_gets_the_weights_back():
    keras.utils.set_random_seed(1)
    model = divided_models.dense()
    runtime = divided.runtime_of("mirrored", "model:2")
    config = tfpar.ExperimentConfig.from_flat_dict({**divided.COMMON, "strategy": "mirrored", "mesh": "model:2"})
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    trainer = tfpar.Trainer(model, loss=loss, metrics=["accuracy"], config=config, runtime=runtime)
    x, y = divided_models.data("dense")
    trainer.fit(x, y, steps=divided.STEPS)
    np.testing.assert_allclose(model.predict(x[:21], verbose=0), alone("dense")[2][0], rtol=1e-3, atol=1e-4)


def test_dropout_of_what_is_divided_draws_for_each_device():
    """The same numbers on each would make units of different devices share their masks."""
    model = divided_models.dense()
    ways = {layer.name: layout.way for layer, layout in find_layout(model, 2).values()}
    assert ways == {
        "first": "column",
        "dropout": OWN_NUMBERS,
        "second": "row",
        "third": "column",
        "fourth": "row",
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence_parallel": True}, "--sequence_parallel: model .* has no divided block that allows it"),
        (
            {"jit_compile": "true"},
            "--jit_compile=true does not work with --mesh=model:2: the devices of a replica commun",
        ),
        ({"layout": {"first": "diagonal"}}, r"layout\['first'\]='diagonal' is not one of column, row"),
        ({"layout": {"thrid": "gather"}}, "layout: 'thrid' matches no layer with weights"),
        ({"layout": {"last$": "column"}}, "Dense 'sequential/last' .* cannot be divided in this way over 2 devices"),
        ({"layout": {"first": "column", "second": "whole"}}, "'sequential/second', which reads it, not by rows"),
        ({"layout": {"first|second|third|fourth": "whole"}}, "has no layer that can be divided"),
    ],
)
def test_what_cannot_be_divided_is_refused(options, message):
    config = tfpar.ExperimentConfig.from_flat_dict(
        {**divided.COMMON, "strategy": "mirrored", "mesh": "model:2"}
        | {k: v for k, v in options.items() if k != "layout"}
    )
    runtime = divided.runtime_of("mirrored", "model:2")
    trained = {"loss": "sparse_categorical_crossentropy", "config": config, "runtime": runtime}
    with pytest.raises(ConfigError, match=message):
        tfpar.Trainer(divided_models.dense, layout=options.get("layout"), **trained).fit(
            *divided_models.data("dense"), steps=1
        )


def test_a_layout_needs_a_mesh():
    with pytest.raises(ConfigError, match="layout determines how layers are divided"):
        tfpar.Trainer(divided_models.dense, loss="mse", layout={"last": "gather"}, strategy="one_device", verbose=0)

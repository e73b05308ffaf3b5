"""Sharded state beside model and pipeline axes: the numbers of one device, a share of the state.

What one mesh has saved, any other resumes.

Between workers: tests/integration/test_tensor_parallel.py.
"""

from __future__ import annotations

import functools
import math
import shutil
from typing import Any

import tfpar
from tests.integration.scripts import divided, divided_models
from tests.training.test_tensor_parallel import alone, assert_as_alone
from tfpar.parallel import weight_shards
from tfpar.parallel.division import Shards
from tfpar.parallel.pipeline.devices import place_of
from tfpar.parallel.split import shape_of, split_of
from tfpar.training.sharding.pipeline_step import PipelineScatteringStep

import keras
import numpy as np
import pytest

SHARD = {"shard": "optimizer"}
GRADIENTS = {"shard": "gradients"}
WEIGHTS = {"shard": "weights"}
TWICE = {"accumulate_steps": 2}


def on(mesh: str, devices: int, **options: Any) -> Any:
    return divided.here("mirrored", mesh, devices, **options)


@pytest.mark.parametrize(
    ("model", "mesh", "devices", "options"),
    [
        ("dense", "data:2,model:2", 4, {**TWICE, "ema": 0.9}),
        ("uneven_vocabulary", "data:2,model:2", 4, {"optimizer": "ftrl", "steps": 6}),
        ("dense", "data:2,pipeline:2", 4, {**TWICE, "ema": 0.9, "optimizer": "lamb", "jit_compile": "auto"}),
        *(
            pytest.param(*case, marks=pytest.mark.proof)
            for case in [
                ("dense", "data:2,model:2", 4, {"jit_compile": "auto"}),
                ("attention", "data:2,model:2", 4, {"ema": 0.9}),
                ("language_model", "data:2,model:2", 4, {**TWICE, "recompute": "blocks"}),
                ("language_model", "data:2,model:2", 4, {"sequence_parallel": True}),
                ("vit", "data:2,model:2", 4, TWICE),
                ("gpt2", "data:2,model:2", 4, TWICE),
                ("grouped_query", "data:2,model:2", 4, TWICE),
                ("language_model", "data:2,pipeline:2", 4, TWICE),
                ("gpt2", "data:2,pipeline:2", 4, TWICE),
            ]
        ),
    ],
)
def test_equal_one_device(model, mesh, devices, options):
    trainer = on(mesh, devices, model=model, **SHARD, **options)
    same = ("accumulate_steps", "ema", "optimizer", "steps")
    assert_as_alone(trainer, model, **{name: value for name, value in options.items() if name in same})


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("dense", {**WEIGHTS, **TWICE, "ema": 0.9}),
        ("dense", {**GRADIENTS, **TWICE, "ema": 0.9}),
        ("uneven_vocabulary", {**WEIGHTS, "optimizer": "ftrl", "steps": 6}),
        *(
            pytest.param(*case, marks=pytest.mark.proof)
            for case in [
                ("attention", {**WEIGHTS, "ema": 0.9}),
                ("language_model", {**WEIGHTS, **TWICE, "recompute": "blocks"}),
                ("language_model", {**GRADIENTS, **TWICE, "recompute": "blocks"}),
                ("language_model", {**WEIGHTS, "sequence_parallel": True}),
                ("language_model", {**GRADIENTS, **TWICE, "sequence_parallel": True}),
                ("vit", {**WEIGHTS, **TWICE}),
                ("vit", {**GRADIENTS, **TWICE}),
                ("gpt2", {**WEIGHTS, **TWICE}),
                ("grouped_query", {**WEIGHTS, **TWICE}),
                ("grouped_query", {**GRADIENTS, **TWICE}),
            ]
        ),
    ],
)
def test_gradients_and_weights_equal_one_device(model, options):
    trainer = on("data:2,model:2", 4, model=model, **options)
    same = ("accumulate_steps", "ema", "optimizer", "steps")
    assert_as_alone(trainer, model, **{name: value for name, value in options.items() if name in same})


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("dense", {"accumulate_steps": 4, "ema": 0.9}),
        ("spoiled", TWICE),
        *(
            pytest.param(*case, marks=pytest.mark.proof)
            for case in [
                ("dense", {}),
                ("dense", {**TWICE, "optimizer": "lamb", "jit_compile": "true"}),
                ("constrained", {**TWICE, "optimizer": "adamw", "learning_rate": 0.01, "steps": 8}),
                ("language_model", {"accumulate_steps": 4, "stages_per_device": 2}),
                ("language_model", {**TWICE, "pipeline_schedule": "gpipe", "recompute": "blocks"}),
                ("gpt2", TWICE),
                ("branches", TWICE),
            ]
        ),
    ],
    ids=str,
)
def test_gradients_of_stages_equal_one_device(model, options):
    """Also of a table that two stages have, of weights that every replica updates as a whole, and where all stages
    skip a step because the gradients of one are not finite."""
    trainer = on("data:2,pipeline:2", 4, model=model, **GRADIENTS, **options)
    same = ("accumulate_steps", "ema", "optimizer", "steps", "learning_rate")
    options = {name: value for name, value in options.items() if name in same}
    if model == "branches":  # its own loss depends on the examples of a micro-batch: of two replicas, 2 x 2 of them
        weights, *_ = alone(model, **{**options, "accumulate_steps": 4})
        for name, value in divided.weights_of(trainer).items():
            np.testing.assert_allclose(value, weights[name], rtol=1e-4, atol=1e-5, err_msg=name)
    else:
        assert_as_alone(trainer, model, **options)
    assert bool(trainer.results["skipped_steps"]) == (model == "spoiled")


def test_the_sums_of_stages_are_on_the_first_replica_alone(monkeypatch):
    """Of each stage, on its device; a worker has them once, whichever of its replicas updates the weights."""
    summed: list[dict[str, int]] = []
    ends = PipelineScatteringStep._ends_micro_batch

    def counted(step: Any, tensors: Any) -> None:
        sizes: dict[str, int] = {}
        for each in tensors:
            sizes[each.device[-1]] = sizes.get(each.device[-1], 0) + math.prod(each.shape)
        summed.append({device: size for device, size in sizes.items() if size})
        ends(step, tensors)

    monkeypatch.setattr(PipelineScatteringStep, "_ends_micro_batch", counted)
    trainer = on("data:2,pipeline:2", 4, steps=1, **GRADIENTS, **TWICE)
    weights = trainer.model.trainable_variables
    of_stage = [sum(math.prod(each.shape) for each in weights if place_of(each) == stage) for stage in range(2)]
    first, *_ = found = [each for each in summed if each]
    assert len(found) == 2 == len(summed) - len(found)  # two micro-batches of two replicas
    for size, expected in zip(first.values(), of_stage, strict=True):
        assert 0 <= size - expected <= 2 * 2  # two vectors, each with an even number of elements


def test_each_device_has_shards_of_its_parts():
    trainer = on("data:2,model:2", 4, steps=1, model="three_heads", **WEIGHTS)
    weights = trainer.model.trainable_variables
    shards = [split for each in weights if isinstance(split := split_of(each), Shards)]
    assert {bool(split.within) for split in shards} == {True, False}  # attention is whole on both devices
    for variable in [*weights, *trainer.program.optimizer.variables]:
        if isinstance(split := split_of(variable), Shards):
            devices = 4 if split.within else 2
            assert devices * math.prod(variable.shape) == math.prod(shape_of(variable))


def gathers(monkeypatch, mesh: str, devices: int, model: Any, **options: Any) -> list[list[int]]:
    """The elements of the weights of each gather in the programs of a run, for all of its devices."""
    sizes = []
    gather = weight_shards._gather

    def counted(place, shards, splits):
        sizes.append([math.prod(split.shape) for split in splits])
        return gather(place, shards, splits)

    monkeypatch.setattr(weight_shards, "_gather", counted)
    monkeypatch.setitem(divided_models.MODELS, "attention", model)
    on(mesh, devices, model="attention", steps=1, **WEIGHTS, **options)
    return sizes


@pytest.mark.parametrize(("mesh", "devices"), [("", 2), ("data:2,model:2", 4)])
def test_a_table_is_gathered_once_to_look_tokens_up(mesh, devices, monkeypatch):
    """Not again in the backward pass, which needs nothing of it. Others are gathered in both passes, also where a model
    axis has replaced the calls of their layers."""
    sizes = gathers(monkeypatch, mesh, devices, table_and_head)
    of_table, of_dense = (sizes.count([size]) for size in (divided_models.VOCABULARY * 64, 64 * 96))
    assert 0 < of_table < of_dense


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_weights_of_a_block_are_gathered_together_beside_a_model_axis(sequence_parallel, monkeypatch):
    model = divided_models.MODELS["language_model"]
    sizes = gathers(monkeypatch, "data:2,model:2", 4, model, sequence_parallel=sequence_parallel)
    of_block = [each for each in sizes if len(each) > 1]
    assert len(of_block) == len([each for each in sizes if 3 * 32 * 32 in each]) > 0  # query, key, value and the rest
    assert {tuple(sorted(each)) for each in of_block} == {(32 * 32, 3 * 32 * 32, 4 * 32 * 32, 4 * 32 * 32)}


def table_and_head() -> keras.Model:
    tokens = keras.Input((divided_models.POSITIONS,), dtype="int32")
    x = keras.layers.Dense(96, "relu")(keras.layers.Embedding(divided_models.VOCABULARY, 64)(tokens))
    x = keras.layers.Dense(64)(x)
    return keras.Model(tokens, keras.layers.Dense(divided_models.VOCABULARY)(x))


class CountingTable(keras.layers.Embedding):
    """A table that also counts its calls, and adds a loss."""

    def build(self, input_shape=None):
        super().build(input_shape)
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

    def call(self, inputs):
        self.calls.assign_add(1.0)
        vectors = super().call(inputs)
        self.add_loss(1e-2 * keras.ops.mean(vectors**2))
        return vectors


def counting() -> keras.Model:
    tokens = keras.Input((divided_models.POSITIONS,), dtype="int32")
    x = CountingTable(divided_models.VOCABULARY, 64)(tokens)
    return keras.Model(tokens, keras.layers.Dense(divided_models.VOCABULARY)(x))


def test_losses_and_state_of_a_table_count(monkeypatch):
    monkeypatch.setitem(divided_models.MODELS, "attention", counting)
    options = {"model": "attention", "steps": 6}
    found, expected = divided.here("mirrored", "", 2, **WEIGHTS, **options), divided.here("mirrored", "", 2, **options)
    for name, value in divided.weights_of(found).items():
        np.testing.assert_allclose(value, divided.weights_of(expected)[name], rtol=1e-4, atol=1e-5, err_msg=name)
        if name.endswith("calls"):
            assert value > 0


@pytest.mark.parametrize("units", [1, 3])
def test_weights_with_a_short_dimension(units, monkeypatch):
    """Along which replicas cannot divide what a model axis divides along the other one."""

    def narrow() -> keras.Model:
        widths = (1024, units, 1024, 3)
        return keras.Sequential([keras.Input((12,)), *(keras.layers.Dense(width, "tanh") for width in widths)])

    monkeypatch.setitem(divided_models.MODELS, "narrow", narrow)
    options = {"model": "narrow", "steps": 6}
    found = divided.weights_of(on("data:2,model:2", 4, **WEIGHTS, **options))
    for name, value in divided.weights_of(divided.here(**options)).items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("mesh", ["data:2,model:2", "data:2,pipeline:2"])
def test_all_places_take_the_same_step_of_a_schedule_of_the_optimizers_own(mesh):
    def trained(strategy: str, mesh: str = "", devices: int = 0, **options: Any) -> dict[str, np.ndarray]:
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(1)
        config = {**divided.COMMON, "strategy": strategy, "mesh": mesh, "devices": devices, "steps": 4, **options}
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.3, 1, 0.3))
        trainer = tfpar.Trainer(
            *(divided_models.dense, optimizer, loss),
            config=tfpar.ExperimentConfig.from_flat_dict(config),
            runtime=divided.runtime_of(strategy, mesh, devices),
        )
        trainer.fit(*divided_models.data("dense"), steps=4)
        return divided.weights_of(trainer)

    expected = trained("one_device")
    for name, value in trained("mirrored", mesh, 4, **SHARD).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_each_device_has_the_state_of_its_share():
    """Of its parts of divided weights, and the first device of whole ones too, each replica a half."""
    trainer = on("data:2,model:2", 4, steps=1, **SHARD)
    weights = trainer.model.trainable_variables
    parts = sum(math.prod(each.shape) for each in weights if split_of(each))
    whole = sum(math.prod(each.shape) for each in weights if not split_of(each))
    assert 0 < parts < sum(math.prod(shape_of(each)) for each in weights if split_of(each))
    for place, expected in zip(trainer.program.share.places, (parts + whole, parts), strict=True):
        for replica in place.replicas:
            own = sum(math.prod(each.shape) for each in replica.optimizer.variables if each.shape)
            assert abs(own - expected) <= 2 * 2  # two moments, two vectors that may have an odd number of elements


@pytest.mark.parametrize(
    "first",
    [
        ("data:2,model:2", 4, SHARD),
        ("data:2,model:2", 4, WEIGHTS),
        *(
            pytest.param(case, marks=pytest.mark.proof)
            for case in [
                ("data:2,model:2", 4, GRADIENTS),
                ("data:2,pipeline:2", 4, GRADIENTS),
                ("", 3, SHARD),
                ("", 3, WEIGHTS),
                ("model:2", 2, {}),
            ]
        ),
        pytest.param(("data:2,model:2", 4, SHARD), marks=pytest.mark.proof, id="all others"),
    ],
    ids=str,
)
def test_resumed_on_other_devices(first, tmp_path, request):
    """What one has saved, others continue: as many replicas, other meshes, one device."""
    options = {"steps": 12, "ema": 0.9, "workdir": str(tmp_path / "run")}
    mesh, devices, shard = first
    on(mesh, devices, stop_after=4, **shard, **options)
    others = [("data:2,pipeline:2", 4, GRADIENTS), ("", 3, WEIGHTS), ("one", 1, {})]
    if request.node.get_closest_marker("proof"):
        others += [*(("data:2,model:2", 4, shard) for shard in (SHARD, WEIGHTS, {})), ("", 2, SHARD)]
    for number, (mesh, devices, shard) in enumerate(others):
        copy = tmp_path / f"{number}"
        shutil.copytree(tmp_path / "run", copy)
        own = {**options, **shard, "workdir": str(copy)}
        trainer = divided.here(**own) if mesh == "one" else on(mesh, devices, **own)
        assert_as_alone(trainer, "dense", steps=12, ema=0.9)
        exported = keras.saving.load_model(copy / "model.keras", compile=False).get_weights()
        for one, other in zip(exported, averages_of_alone(), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@functools.cache
def averages_of_alone() -> list[np.ndarray]:
    return [each.numpy() for each in divided.here(steps=12, ema=0.9).program.eval_weights()]


@pytest.mark.parametrize(
    ("mesh", "shard"),
    [*(("data:2,model:2", shard) for shard in (SHARD, GRADIENTS, WEIGHTS)), ("data:2,pipeline:2", GRADIENTS)],
    ids=str,
)
def test_resumed_to_the_same_bits(mesh, shard, tmp_path):
    once = divided.weights_of(on(mesh, 4, steps=9, **shard, **TWICE))
    saved = {**shard, **TWICE, "steps": 9, "workdir": str(tmp_path / "run")}
    on(mesh, 4, stop_after=4, **saved)
    for name, value in divided.weights_of(on(mesh, 4, **saved)).items():
        np.testing.assert_array_equal(value, once[name], err_msg=name)


def test_weights_with_constraints_are_resumed_on_one_device(tmp_path):
    """Each replica updates them as a whole; the second stage has one, too."""
    options = {"model": "constrained", "optimizer": "adamw", "learning_rate": 0.01, "steps": 8}
    saved = {**options, "workdir": str(tmp_path / "run")}
    trainer = on("data:2,pipeline:2", 4, stop_after=4, **SHARD, **saved)
    assert [len(place.whole) for place in trainer.program.share.places] == [1, 1]
    found, expected = (divided.weights_of(divided.here(**each)) for each in (saved, options))
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("mesh", "shard"),
    [
        ("data:2,model:2", SHARD),
        ("data:2,pipeline:2", SHARD),
        ("data:2,model:2", GRADIENTS),
        ("data:2,pipeline:2", GRADIENTS),
        ("data:2,model:2", WEIGHTS),
    ],
    ids=str,
)
def test_gradients_whose_squares_float32_does_not_hold_are_clipped(mesh, shard):
    runtime = divided.runtime_of("mirrored", mesh, 4)
    keras.utils.clear_session(free_memory=False)
    options = {"optimizer": "sgd", "learning_rate": 0.1, "weight_decay": 0.0, "weight_decay_exclude": "", **shard}
    config = tfpar.ExperimentConfig.from_flat_dict(
        {**divided.COMMON, "strategy": "mirrored", "devices": 4, "mesh": mesh, "schedule": "constant", **options}
    )

    def loss(y, outputs):
        return 1e21 * keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)

    trainer = tfpar.Trainer(divided_models.dense, loss=loss, config=config, runtime=runtime)
    before = divided.weights_of(trainer)
    trainer.fit(*divided_models.data("dense"), steps=1)
    change = (
        sum(float(np.sum((value - before[name]) ** 2)) for name, value in divided.weights_of(trainer).items()) ** 0.5
    )
    assert change == pytest.approx(0.1 * divided.COMMON["clip_norm"], rel=1e-3)

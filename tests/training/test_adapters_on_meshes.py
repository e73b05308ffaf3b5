"""Adapters (LoRA) of layers that a mesh divides: the numbers of one device, a part on each."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from tests.integration.scripts import divided, divided_models
from tests.training.test_tensor_parallel import assert_as_alone
from tfpar.optim.keras_internals import all_layers
from tfpar.parallel.model_axis import Place
from tfpar.parallel.split import model_split_of, shape_of
from tfpar.parallel.tensor.positions import has_gradient_in_parts
from tfpar.parallel.weight_shards import is_sharded
from tfpar.training.model.adapting import is_adapter

import keras
import numpy as np
import pytest

EVERY = {"lora": "2:."}
CASES: list[Any] = [
    ("dense", "model:2", 2, {"lora": "2:third|fourth", "trainable": "norm"}),
    ("language_model", "model:2", 2, EVERY),  # the table of tied embeddings, too
    ("language_model", "data:2,pipeline:2", 4, {**EVERY, "accumulate_steps": 2, "jit_compile": "auto"}),
    ("wide", "data:2,model:2", 4, {"lora": "1:.", "shard": "weights", "steps": 6}),  # factors of one row or column
    *(
        pytest.param(*case, marks=pytest.mark.proof)
        for case in [
            ("dense", "", 3, {"lora": "2:third|fourth", "shard": "weights", "accumulate_steps": 2}),
            ("attention", "model:2", 2, EVERY),
            ("attention", "data:2,model:2", 4, {**EVERY, "shard": "gradients", "accumulate_steps": 2}),
            ("vit", "model:4", 4, EVERY),
            ("language_model", "data:2,model:2", 4, {**EVERY, "sequence_parallel": True, "recompute": "blocks"}),
            ("language_model", "pipeline:2,model:2", 4, EVERY),
            ("gpt2", "model:2", 2, EVERY),
            ("gpt2", "data:2,model:2", 4, {**EVERY, "shard": "weights"}),
            ("language_model", "", 2, {**EVERY, "shard": "weights"}),
            ("grouped_query", "data:2,model:2", 4, {**EVERY, "shard": "optimizer"}),
            ("recurrent", "pipeline:2", 2, {**EVERY, "accumulate_steps": 2}),
        ]
    ),
]


def wide() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((12,)),
            keras.layers.Dense(1024, "tanh", name="first"),
            keras.layers.Dense(1, name="second"),
            keras.layers.Dense(1024, "tanh", name="third"),
            keras.layers.Dense(3, name="last"),
        ]
    )


@pytest.fixture(autouse=True)
def kinds(monkeypatch):
    monkeypatch.setitem(divided_models.MODELS, "wide", wide)


@pytest.mark.parametrize(("model", "mesh", "devices", "options"), CASES)
def test_equal_one_device(model, mesh, devices, options):
    trainer = divided.here("mirrored", mesh, devices, model=model, **options)
    same = ("lora", "trainable", "accumulate_steps", "steps")
    assert_as_alone(trainer, model, **{name: value for name, value in options.items() if name in same})
    if "model" in mesh:
        assert_divided_like_their_kernels(trainer.model)


def assert_divided_like_their_kernels(model: keras.Model) -> None:
    found = 0
    for layer in all_layers(model):
        weights = layer.weights if len(all_layers(layer)) == 1 else []
        adapters = [weight for weight in weights if is_adapter(weight)]
        kernels = [each for each in weights if not is_adapter(each) and model_split_of(each) and len(each.shape) > 1]
        if adapters and kernels:
            found += 1
            first, second = adapters
            kernel = max(kernels, key=lambda each: math.prod(each.shape))  # not the bias of several dimensions
            split = model_split_of(kernel)
            of_second = split.axis == len(kernel.shape) - 1
            whole, part = (first, second) if of_second else (second, first)
            assert model_split_of(whole) is None
            assert has_gradient_in_parts(whole)
            axis = 1 if of_second else split.axis
            assert shape_of(part)[axis] == shape_of(kernel)[split.axis]
            assert model_split_of(part) == dataclasses.replace(split, axis=axis)
    assert found > 1


@pytest.mark.parametrize(("mesh", "devices"), [("", 1), pytest.param("pipeline:2", 2, marks=pytest.mark.proof)])
def test_saved_with_the_kernels_and_resumed_on_other_devices(mesh, devices, tmp_path):
    options = {"lora": "2:third|fourth", "schedule": "constant", "workdir": str(tmp_path / "run")}
    trainer = divided.here("mirrored", "model:2", 2, steps=4, **options)
    x = divided_models.data("dense")[0][:8]
    loaded = keras.saving.load_model(tmp_path / "run" / "model.keras", compile=False)
    np.testing.assert_allclose(loaded.predict(x, verbose=0), trainer.predict(x), rtol=1e-4, atol=1e-5)
    further = divided.here("mirrored" if mesh else "one_device", mesh, devices, steps=8, **options)
    assert_as_alone(further, "dense", lora="2:third|fourth", schedule="constant", steps=8)


def test_frozen_kernels_are_sharded_too():
    trainer = divided.made_here("mirrored", "", 2, lora="2:third|fourth", shard="weights")
    kernels = [each for each in trainer.model.non_trainable_variables if is_sharded(each)]
    assert {each.path.rpartition("/")[2] for each in kernels} == {"kernel"}
    assert sum(math.prod(each.shape) for each in kernels) == (64 * 24 + 24 * 128 + 128 * 48) / 2
    gathered = trainer.program.placing.gathered(trainer.model, trainer.program.config)
    assert gathered.frozen == 64 * 24 + 24 * 128 + 128 * 48


def test_nothing_of_frozen_kernels_is_scattered(monkeypatch):
    """Also where their block has adapters that are sharded as well. And the weights are those of one device."""
    scattered = []
    total = Place.share_of_sum

    def counted(place, rows):
        scattered.append(math.prod(rows.shape))
        return total(place, rows)

    monkeypatch.setattr(Place, "share_of_sum", counted)
    trainer = divided.here("mirrored", "", 2, steps=6, model="wide", lora="2:.", shard="weights")
    assert scattered
    assert max(scattered) == 1024 * 2  # a factor; its kernel has 1024 * 12
    assert_as_alone(trainer, "wide", lora="2:.", steps=6)

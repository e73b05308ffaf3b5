"""What works beside a mesh or shards, with the numbers of one device: the table in docs/tensor_parallelism.md."""

from __future__ import annotations

import pathlib
from typing import Any

import tfpar
from tests.integration.scripts import divided, divided_models
from tests.training.test_tensor_parallel import alone
from tfpar.config import ConfigError, ExperimentConfig
from tfpar.parallel.weight_shards import can_be_sharded
from tfpar.training.validate import validate_config

import keras
import numpy as np
import pytest

STEPS = 6
MODEL, PIPELINE, TWO = {"mesh": "model:2"}, {"mesh": "pipeline:2"}, {"mesh": "data:2"}
PIPELINES = {"mesh": "data:2,pipeline:2", "devices": 4}
MODELS, BOTH = ({"mesh": mesh, "devices": 4} for mesh in ("data:2,model:2", "pipeline:2,model:2"))
OPTIMIZER, GRADIENTS, WEIGHTS = ({"shard": kind} for kind in ("optimizer", "gradients", "weights"))
MODEL_SHARDS, PIPELINE_SHARDS = (
    {"mesh": f"data:2,{axis}:2", "devices": 4, "shard": "optimizer"} for axis in ("model", "pipeline")
)
MODEL_GRADIENTS, MODEL_WEIGHTS = ({**MODEL_SHARDS, "shard": kind} for kind in ("gradients", "weights"))
PIPELINE_GRADIENTS = {**PIPELINE_SHARDS, "shard": "gradients"}
EMA, HALF = {"ema": 0.9}, {"precision": "mixed_float16", "model": "half"}
LORA, FROZEN = {"lora": "2:third|fourth"}, {"trainable": "second|third"}
MUON, LAMB, LARS, ADAFACTOR = ({"optimizer": name} for name in ("muon", "lamb", "lars", "adafactor"))
# There, oneDNN multiplies float16 itself, and a product has other bits if its weights are an operation's result.
MULTIPLIES_FLOAT16 = "avx512_fp16" in pathlib.Path("/proc/cpuinfo").read_text()


def half() -> keras.Model:
    keras.config.set_dtype_policy("mixed_float16")  # `divided.train` clears what a runtime has set
    return divided_models.dense()


@pytest.fixture(autouse=True)
def kinds(monkeypatch):
    monkeypatch.setitem(divided_models.MODELS, "half", half)
    yield
    keras.config.set_dtype_policy("float32")


def checked(places: dict[str, Any], **options: Any) -> ExperimentConfig:
    """What `tfpar.validate` accepts."""
    found = {**divided.COMMON, "strategy": "mirrored", "devices": 2, **places, **options}
    config = ExperimentConfig.from_flat_dict({name: value for name, value in found.items() if name != "model"})
    validate_config(config)
    return config


WORKS = [
    *((places, EMA) for places in (MODEL, TWO, OPTIMIZER, GRADIENTS, WEIGHTS)),
    *((places, HALF) for places in (MODEL, PIPELINE, OPTIMIZER, WEIGHTS, MODEL_SHARDS, PIPELINE_SHARDS)),
    *((places, HALF) for places in (MODEL_GRADIENTS, MODEL_WEIGHTS, PIPELINE_GRADIENTS)),
    *((places, FROZEN) for places in (MODEL, PIPELINE, OPTIMIZER, GRADIENTS, WEIGHTS, MODEL_SHARDS, PIPELINE_SHARDS)),
    *((places, FROZEN) for places in (MODEL_GRADIENTS, MODEL_WEIGHTS, PIPELINE_GRADIENTS)),
    *((places, LORA) for places in (TWO, OPTIMIZER, GRADIENTS, MODEL, PIPELINE, PIPELINES)),
    *((places, LORA) for places in (MODEL_SHARDS, PIPELINE_SHARDS, MODEL_GRADIENTS, PIPELINE_GRADIENTS)),
    *((places, LORA) for places in (WEIGHTS, MODEL_WEIGHTS)),
    *((places, each) for places in (OPTIMIZER, GRADIENTS, PIPELINE) for each in (MUON, LAMB, ADAFACTOR)),
    *((PIPELINE_GRADIENTS, each) for each in (MUON, ADAFACTOR, EMA)),
    *((places, each) for places in (MODEL, MODELS, BOTH) for each in (MUON, LAMB, LARS, ADAFACTOR)),
    *((places, each) for places in (MODEL_SHARDS, MODEL_GRADIENTS) for each in (MUON, LAMB, LARS, ADAFACTOR)),
    *((WEIGHTS, each) for each in (MUON, LAMB, LARS, ADAFACTOR)),
    *((places, {**EMA, **LAMB}) for places in (MODELS, MODEL_SHARDS, WEIGHTS)),
    (MODEL_SHARDS, {**FROZEN, **MUON}),
    *((places, {"model": "synchronised"}) for places in (TWO, OPTIMIZER, GRADIENTS, MODEL, MODEL_SHARDS)),
    *((places, {"model": "synchronised"}) for places in (PIPELINES, PIPELINE_SHARDS, PIPELINE_GRADIENTS)),
    *((places, {"jit_compile": "true"}) for places in (TWO, PIPELINE, OPTIMIZER, PIPELINE_GRADIENTS)),
]
WHOLE = "needs whole tensors"
REFUSED = [
    *((MODEL_WEIGHTS, each, WHOLE) for each in (MUON, LAMB, LARS, ADAFACTOR)),
    *((places, {"local_steps": 2}, "does not work with --shard=") for places in (OPTIMIZER, GRADIENTS, WEIGHTS)),
    *((places, {"model": "synchronised"}, "synchronises batch") for places in (WEIGHTS, MODEL_WEIGHTS)),
    (MODEL, {"jit_compile": "true"}, "--jit_compile=true does not work with --mesh=model:2"),
    *((places, {"jit_compile": "true"}, "--jit_compile=true: --shard=") for places in (GRADIENTS, WEIGHTS)),
    (PIPELINES, WEIGHTS, "--shard=weights does not work with --mesh="),
]


def name(part: Any) -> str:
    return ",".join(f"{key}={value}" for key, value in part.items()) if isinstance(part, dict) else ""


@pytest.mark.proof
@pytest.mark.parametrize(("places", "options"), WORKS, ids=name)
def test_the_numbers_of_one_device(places, options):
    checked(places, **options)
    options = {"steps": STEPS, **options}
    trainer = divided.here("mirrored", **{"devices": 2, "mesh": "", **places, **options})
    weights, results, _ = alone(**{"model": "dense", **options})
    found = divided.weights_of(trainer)
    assert found.keys() == weights.keys()
    if "precision" in options:  # float16 rounds to 1e-3, and each replica its own sums: those of data:2 are the same
        limit = 2e-3
        if "shard" in places and "mesh" not in places:
            limit = limit if MULTIPLIES_FLOAT16 else 1e-4
            weights = divided.weights_of(divided.here("mirrored", devices=2, **TWO, **options))
        difference = sum(float(np.sum((found[path] - weights[path]) ** 2)) for path in found) ** 0.5
        assert difference < limit * sum(float(np.sum(value**2)) for value in weights.values()) ** 0.5
        return
    for path, value in found.items():
        np.testing.assert_allclose(value, weights[path], rtol=1e-4, atol=1e-5, err_msg=path)
    assert trainer.results["eval"] == pytest.approx(results, rel=1e-4)


@pytest.mark.parametrize(("places", "options", "message"), REFUSED, ids=name)
def test_refused_by_name(places, options, message):
    def run() -> None:
        checked(places, **options)
        divided.here("mirrored", **{"devices": 2, "mesh": "", **places, "steps": STEPS, **options})

    with pytest.raises(ConfigError, match=message):
        run()


class OwnModel(keras.Model):
    """A model whose outputs are known only from calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = keras.layers.Dense(512, kernel_initializer="ones", activation="tanh")
        self.last = keras.layers.Dense(1, kernel_initializer="ones")

    def call(self, x):
        return self.last(self.wide(x))


def small() -> keras.Model:
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])


def own() -> keras.Model:
    model = OwnModel()
    model(np.zeros((1, 2), np.float32))
    return model


@pytest.mark.parametrize(("build", "divided_weights"), [(small, 0), (own, 1)])
def test_sharded_weights_of_models_with_few_large_ones(build, divided_weights):
    assert sum(map(can_be_sharded, build().trainable_variables)) == divided_weights
    x = np.linspace(-1.0, 1.0, 32, dtype=np.float32).reshape(16, 2)

    def predictions(**options) -> np.ndarray:
        optimizer = keras.optimizers.SGD(1e-3)
        trainer = tfpar.Trainer(build, optimizer, "mse", clip_norm=1.0, global_batch_size=8, **options)
        trainer.fit(x, x.sum(axis=1, keepdims=True), steps=4)
        return trainer.predict(x)

    alone, shared = predictions(strategy="one_device"), predictions(strategy="mirrored", devices=2, shard="weights")
    np.testing.assert_allclose(shared, alone, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_owners_refuse_models_that_assign_weights(shard):
    """They would update values from before the assignment."""
    normed = keras.layers.SpectralNormalization(keras.layers.Dense(4), name="normed")
    model = keras.Sequential([keras.Input((2,)), normed, keras.layers.Dense(1)])
    trainer = tfpar.Trainer(model, "sgd", "mse", global_batch_size=8, strategy="mirrored", devices=2, shard=shard)
    with pytest.raises(ConfigError, match=rf"--shard={shard}: the model assigns \S*kernel in its forward pass"):
        trainer.fit(np.ones((16, 2), np.float32), np.ones((16, 1), np.float32), steps=1)

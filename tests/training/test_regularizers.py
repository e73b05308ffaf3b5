"""Penalties of weights and of activations, with the numbers of one device where a mesh divides either."""

from __future__ import annotations

from typing import Any

import tfpar
from tests.integration.scripts import divided, divided_models
from tests.training.test_tensor_parallel import alone, assert_as_alone
from tfpar.parallel.split import whole

import keras
import numpy as np
import pytest

# A whole batch everywhere: padding would count as examples in the penalties of activities.
OPTIONS = {"steps": 6, "remainder": "drop", "eval_batch_size": 50}


class OwnLoss(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, y, y_pred, sample_weight, training)


def penalised(kind: type[keras.Sequential] = keras.Sequential) -> keras.Model:
    """Penalties that are sums over elements and others, of layers divided by inputs and by outputs, and of values."""
    sums, of_rows = keras.regularizers.L1L2(0.003, 0.01), keras.regularizers.OrthogonalRegularizer(0.05)
    return kind(
        [
            keras.Input((12,)),
            keras.layers.Dense(64, "tanh", name="first", kernel_regularizer=sums, bias_regularizer="l1"),
            keras.layers.Dense(24, name="second", kernel_regularizer=of_rows, activity_regularizer="l2"),
            keras.layers.Dense(64, "tanh", name="third", kernel_regularizer=of_rows),
            keras.layers.Dense(24, name="fourth", kernel_regularizer="l2"),
            keras.layers.Dense(3, name="last"),
        ]
    )


def penalised_activities() -> keras.Model:
    """Penalties of what a device would have parts of: outputs of the first of two layers, and of what is between."""
    return keras.Sequential(
        [
            keras.Input((12,)),
            keras.layers.Dense(64, "tanh", name="first", activity_regularizer=keras.regularizers.L1(0.1)),
            keras.layers.Dense(24, name="second"),
            keras.layers.Dense(64, name="third"),
            keras.layers.Activation("tanh", activity_regularizer="l2"),
            keras.layers.Dense(24, name="fourth"),
            keras.layers.Dense(64, "tanh", name="fifth"),
            keras.layers.Dense(3, name="last", activity_regularizer="l2"),
        ]
    )


@pytest.fixture(autouse=True)
def kinds(monkeypatch):
    for build in (penalised, penalised_activities):
        monkeypatch.setitem(divided_models.MODELS, build.__name__, build)
    alone.cache_clear()


SHARDED = {"mesh": "data:2,model:2", "devices": 4, "shard": "weights"}
STAGES = {"mesh": "pipeline:2,model:2", "devices": 4, "accumulate_steps": 2}


@pytest.mark.parametrize(
    ("model", "places"),
    [
        ("penalised", {"mesh": "model:2"}),
        ("penalised_activities", {"mesh": "model:2"}),
        ("penalised_activities", STAGES),
        pytest.param("penalised", STAGES, marks=pytest.mark.proof),
        pytest.param("penalised", SHARDED, marks=pytest.mark.proof),
    ],
)
def test_penalties_are_of_whole_values(model: str, places: dict[str, Any]):
    options = {**OPTIONS, "model": model}
    trainer = divided.here("mirrored", **{"devices": 2, **places, **options})
    assert_as_alone(trainer, **options)


def test_penalties_of_adapters_count_once():
    """Each device computes a part of the gradient of a factor, but the whole penalty of it."""
    options = {**OPTIONS, "model": "penalised", "lora": "2:first|third"}
    assert_as_alone(divided.here("mirrored", "model:2", 2, **options), **options)


def test_penalties_in_an_own_loss_are_of_whole_weights():
    """`compute_loss` reads `self.losses` by itself."""
    x = np.random.default_rng(0).normal(size=(32, 12)).astype(np.float32)
    y = np.arange(32, dtype=np.int32) % 3
    found = []
    for where in ({"strategy": "one_device"}, {"strategy": "mirrored", "devices": 2, "mesh": "model:2"}):
        keras.utils.set_random_seed(1)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        options = {"global_batch_size": 16, "exchange": "none", "jit_compile": "false", "shuffle": False, **where}
        trainer = tfpar.Trainer(lambda: penalised(OwnLoss), keras.optimizers.SGD(0.1), loss, **options)
        losses = trainer.fit(x, y, epochs=2).history["loss"]
        found.append([*losses, *map(whole, trainer.model.trainable_variables)])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)

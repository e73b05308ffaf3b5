"""Trainable weights without a path from the loss stay as they are, as in Keras' `fit`."""

from __future__ import annotations

import tfpar
from tests.training.trainers import SPARSE, source, trainer_of
from tfpar.config import ConfigError
from tfpar.parallel.split import whole

import keras
import numpy as np
import pytest


class Spare(keras.layers.Dense):
    """A layer with a weight that its output does not depend on."""

    def build(self, shape):
        super().build(shape)
        self.spare = self.add_weight(shape=(256, 64), initializer="ones", name="spare")

    def call(self, x):
        return super().call(x) + 0.0 * keras.ops.sum(keras.ops.stop_gradient(self.spare))


def model() -> keras.Model:
    return keras.Sequential(
        [keras.Input((6,)), Spare(64, activation="relu"), keras.layers.Dense(32), keras.layers.Dense(3)]
    )


def with_unread_head() -> keras.Model:
    """The loss reads one of two outputs, which the last of two stages makes."""
    inputs = keras.Input((6,))
    x = keras.layers.Dense(64, activation="relu", name="body")(keras.layers.Dense(64, activation="relu")(inputs))
    outputs = {"kind": keras.layers.Dense(3, name="kind")(x), "unread": keras.layers.Dense(3, name="unread")(x)}
    return keras.Model(inputs, outputs)


def by_name(trainer: tfpar.Trainer) -> dict[str, np.ndarray]:
    return {variable.name: whole(variable) for variable in trainer.model.trainable_variables}


TWO = {"strategy": "mirrored", "devices": 2}
ON_MODEL_AXIS = {"strategy": "mirrored", "mesh": "model:2"}


@pytest.mark.parametrize(
    ("optimizer", "layout"),
    [
        ("AdamW", {"accumulate_steps": 2, "jit_compile": True}),
        ("AdamW", {**TWO, "shard": "optimizer"}),
        *(
            pytest.param(*case, marks=pytest.mark.proof)
            for case in [
                ("AdamW", TWO),
                ("AdamW", {**TWO, "shard": "gradients", "accumulate_steps": 2}),
                ("AdamW", {**TWO, "local_steps": 2}),
                ("AdamW", {**TWO, "jit_segments": 2, "jit_compile": True}),
                ("AdamW", ON_MODEL_AXIS),
                ("AdamW", {"strategy": "mirrored", "mesh": "pipeline:2"}),
                ("AdamW", {"strategy": "mirrored", "mesh": "data:2,pipeline:2", "shard": "optimizer"}),
                ("AdamW", {"offload": "optimizer"}),
                ("Muon", ON_MODEL_AXIS),
                ("Nadam", {**TWO, "shard": "optimizer"}),
            ]
        ),
    ],
)
def test_it_stays_as_it_is(optimizer, layout, messages):
    trainer = trainer_of(model, getattr(keras.optimizers, optimizer)(0.01, weight_decay=0.5), **layout)
    before = by_name(trainer)
    trainer.fit(source(), steps=2)
    after = by_name(trainer)
    np.testing.assert_array_equal(after["spare"], before["spare"])
    assert (after["kernel"] != before["kernel"]).any()
    [line] = [line for line in messages if "Gradients do not exist for variables" in line]
    assert "sequential/spare/spare when" in line


@pytest.mark.parametrize(
    "layout",
    [
        {"strategy": "mirrored", "mesh": "pipeline:2", "stages": "body", "accumulate_steps": 2},
        pytest.param({**TWO, "jit_segments": 2, "jit_compile": True}, marks=pytest.mark.proof),
    ],
)
def test_so_do_those_of_an_output_that_the_loss_does_not_read(layout, messages):
    keras.utils.set_random_seed(1)
    optimizer, loss = keras.optimizers.AdamW(0.01, weight_decay=0.5), {"kind": SPARSE, "unread": None}
    options = {"global_batch_size": 8, "jit_compile": False, **layout}
    trainer = tfpar.Trainer(with_unread_head, optimizer, loss, **options)
    before = {variable.path: whole(variable) for variable in trainer.model.trainable_variables}
    x = np.random.default_rng(0).normal(size=(16, 6)).astype(np.float32)
    labels = np.arange(16) % 3
    trainer.fit(x, {"kind": labels, "unread": labels}, steps=2)
    after = {variable.path: whole(variable) for variable in trainer.model.trainable_variables}
    same = [path for path, value in after.items() if np.array_equal(value, before[path])]
    assert same == ["unread/kernel", "unread/bias"]
    [line] = [line for line in messages if "Gradients do not exist for variables" in line]
    assert "unread/kernel, unread/bias when" in line


def test_a_loss_of_no_weight_is_refused():
    trainer = trainer_of(loss=lambda y, outputs: keras.ops.cast(keras.ops.argmax(outputs, axis=-1), "float32"))
    with pytest.raises(ConfigError, match="depends on no trainable weight of the model"):
        trainer.fit(source(), steps=1)

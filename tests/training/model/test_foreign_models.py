"""Models that nobody wrote for tfpar, with random weights: the losses and weights of three steps are those of `fit`.

With SGD: Keras 3.15 hands adaptive optimizers the rows of an embedding's gradient one by one where tokens repeat, and
they square each; tfpar adds the rows up first.
"""

from __future__ import annotations

import tfpar
from tests.training.model import keras_steps
from tfpar import inputs

import keras
import numpy as np
import pytest

layers, ops = keras.layers, keras.ops
STEPS, BATCH, CLASSES, LENGTH = 3, 4, 3, 6
SPARSE = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def tokens(count: int = STEPS * BATCH) -> np.ndarray:
    found = np.random.default_rng(0).integers(1, 9, (count, LENGTH)).astype(np.int32)
    for row in range(count):
        found[row, LENGTH - row % 4 :] = 0  # padding of several lengths
    return found


def classes() -> np.ndarray:
    return np.random.default_rng(1).integers(0, CLASSES, STEPS * BATCH).astype(np.int32)


def images(size: int) -> np.ndarray:
    return np.random.default_rng(2).uniform(0, 255, (STEPS * BATCH, size, size, 3)).astype(np.float32)


def mobile_net():
    net = keras.applications.MobileNetV3Small(
        (32, 32, 3), alpha=0.35, minimalistic=True, weights=None, classes=CLASSES, dropout_rate=0.0
    )
    return net, images(32), classes(), keras.losses.SparseCategoricalCrossentropy()


def bidirectional_lstm():
    net = keras.Sequential(
        [
            keras.Input((LENGTH,), dtype="int32"),
            layers.Embedding(9, 5, mask_zero=True),
            layers.Bidirectional(layers.LSTM(4, return_sequences=True)),
            layers.Bidirectional(layers.LSTM(3)),
            layers.Dense(CLASSES),
        ]
    )
    return net, tokens(), classes(), SPARSE


def masked_attention():
    x = keras.Input((LENGTH,), dtype="int32")
    hidden = layers.Embedding(9, 8, mask_zero=True)(x)
    hidden = layers.MultiHeadAttention(2, 4)(hidden, hidden, use_causal_mask=True)
    return keras.Model(x, layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(hidden))), tokens(), classes(), SPARSE


def sequence_to_sequence():
    source = keras.Input((LENGTH,), dtype="int32", name="source")
    target = keras.Input((LENGTH,), dtype="int32", name="target")
    embed = layers.Embedding(9, 5)
    _, state = layers.GRU(4, return_state=True)(embed(source))
    decoded = layers.GRU(4, return_sequences=True)(embed(target), initial_state=state)
    net = keras.Model({"source": source, "target": target}, layers.Dense(9)(decoded))
    x = {"source": tokens(), "target": np.roll(tokens(), 1, axis=1)}
    return net, x, tokens(), SPARSE


class Detector(keras.Model):
    """Heat map and box of every cell, as dicts; the loss of the boxes counts where there is an object."""

    def __init__(self):
        super().__init__()
        self.backbone = keras.Sequential(
            [layers.Rescaling(1 / 255), layers.Conv2D(6, 3, 2, "same", activation="relu"), layers.GroupNormalization(2)]
        )
        self.heat = layers.Conv2D(1, 1, name="heat")
        self.box = layers.Conv2D(4, 1, name="box")

    def call(self, image):
        features = self.backbone(image)
        return {"heat": self.heat(features)[..., 0], "box": self.box(features)}

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        found = y[..., 0]
        heat = keras.losses.binary_crossentropy(found, y_pred["heat"], from_logits=True)
        distance = ops.sum(ops.abs(y[..., 1:] - y_pred["box"]), axis=-1)
        return ops.mean(heat) + 0.1 * ops.mean(found * distance)


def detector():
    net = Detector()
    net(np.zeros((1, 8, 8, 3), np.float32))
    generator = np.random.default_rng(3)
    y = generator.uniform(size=(STEPS * BATCH, 4, 4, 5)).astype(np.float32)
    y[..., 0] = y[..., 0] > 0.5
    return net, images(8), y, None


@pytest.mark.parametrize("build", [mobile_net, bidirectional_lstm, masked_attention, sequence_to_sequence, detector])
def test_three_steps_give_the_numbers_of_fit(build):
    # Batch statistics of four values make MobileNet's gradient long and chaotic: inputs 1e-6 off give another by 1 %.
    rate = 1e-5 if build is mobile_net else 0.05
    reference, x, y, loss = build()
    ours = build()[0]
    ours.set_weights(reference.get_weights())
    expected = keras_steps.fit(reference, keras.optimizers.SGD(rate), loss, x, y, BATCH)
    trainer = tfpar.Trainer(
        ours,
        keras.optimizers.SGD(rate),
        loss,
        strategy="one_device",
        global_batch_size=BATCH,
        shuffle=False,
        jit_compile=False,
    )
    assert trainer.model is ours
    summary = trainer.fit(inputs.from_arrays(x, y), epochs=1)
    assert summary["train_loss"] == pytest.approx(np.mean(expected), rel=1e-4)
    for one, other in zip(ours.get_weights(), reference.get_weights(), strict=True):
        if one.dtype == np.float32:  # the rest are states of random generators
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)

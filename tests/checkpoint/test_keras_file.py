"""What a `.keras` file says of its model before it is loaded."""

from __future__ import annotations

from tfpar.checkpoint.keras_file import gives_probabilities

import keras
import pytest
from keras import layers


def sequential(*last):
    return keras.Sequential([layers.Input((4,)), layers.Dense(5, activation="relu"), *last])


def functional(activation):
    inputs = layers.Input((4,))
    return keras.Model(inputs, layers.Dense(3, activation=activation)(inputs))


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda: sequential(layers.Dense(3, activation="softmax")), True),
        (lambda: sequential(layers.Dense(3), layers.Softmax()), True),
        (lambda: sequential(layers.Dense(3), layers.Activation("softmax", dtype="float32")), True),
        (lambda: keras.Sequential([layers.Input((4,)), functional("softmax")]), True),
        (lambda: functional("softmax"), True),
        (lambda: functional(None), False),
        (lambda: sequential(layers.Dense(3, activation="softmax"), layers.Dense(3)), False),
    ],
)
def test_probabilities_are_told_from_logits(build, expected, tmp_path):
    build().save(tmp_path / "m.keras")
    assert gives_probabilities(str(tmp_path / "m.keras")) is expected

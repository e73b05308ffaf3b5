"""What a `.keras` file says of its model before it is loaded."""

from __future__ import annotations

import zipfile

from tests import permissions
from tfpar.checkpoint.keras_file import check_model_file, gives_probabilities
from tfpar.config import ConfigError

import keras
import numpy as np
import pytest
from keras import layers


def sequential(*last):
    return keras.Sequential([layers.Input((4,)), layers.Dense(5, activation="relu"), *last])


def functional(activation, arranged=lambda output: output):
    inputs = layers.Input((4,))
    return keras.Model(inputs, arranged(layers.Dense(3, activation=activation)(inputs)))


def in_sequence(layer):
    return keras.Sequential([layers.Input((2, 4)), layer])


def shared_reshape():
    """The first output is of the second call of a layer."""
    inputs, reshape = layers.Input((4,)), layers.Reshape((1, 3))
    logits = reshape(layers.Dense(3)(inputs))
    return keras.Model(inputs, [reshape(layers.Dense(3, activation="softmax")(inputs)), logits])


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda: sequential(layers.Dense(3, activation="softmax")), True),
        (lambda: sequential(layers.Dense(3), layers.Softmax()), True),
        (lambda: sequential(layers.Dense(3), layers.Activation("softmax", dtype="float32")), True),
        (lambda: keras.Sequential([layers.Input((4,)), functional("softmax")]), True),
        (lambda: functional("softmax"), True),
        (lambda: functional(None), False),
        (lambda: functional("softmax", lambda output: {"classes": output}), True),
        (lambda: functional(None, lambda output: {"classes": output}), False),
        (lambda: functional("softmax", lambda output: [output]), True),
        (lambda: sequential(layers.Dense(3, activation="softmax"), layers.Dense(3)), False),
        (lambda: in_sequence(layers.TimeDistributed(layers.Dense(3, activation="softmax"))), True),
        (lambda: in_sequence(layers.TimeDistributed(layers.Dense(3))), False),
        (lambda: sequential(layers.Dense(3, activation="softmax"), layers.Activation("linear", dtype="float32")), True),
        (lambda: sequential(layers.Dense(3), layers.Activation("linear", dtype="float32")), False),
        (lambda: sequential(layers.Dense(6, activation="softmax"), layers.Reshape((2, 3)), layers.Flatten()), True),
        (lambda: functional("softmax", lambda output: layers.Identity()(layers.Reshape((1, 3))(output))), True),
        (lambda: functional(None, lambda output: layers.Identity()(layers.Reshape((1, 3))(output))), False),
        (shared_reshape, True),
    ],
)
def test_probabilities_are_told_from_logits(build, expected, tmp_path):
    build().save(tmp_path / "m.keras")
    assert gives_probabilities(str(tmp_path / "m.keras")) is expected


@keras.saving.register_keras_serializable("tests")
class OfOwnLayers(keras.Model):
    """A model of a class that has an option `layers`."""

    def __init__(self, layers, **options):
        super().__init__(**options)
        self.of_option, self.dense = layers, keras.layers.Dense(3)

    def call(self, x):
        return self.dense(x)

    def get_config(self):
        return {**super().get_config(), "layers": self.of_option}


@pytest.mark.parametrize("option", [2, [8, 8], []])
def test_a_class_may_have_an_option_layers(option, tmp_path):
    made = OfOwnLayers(option)
    made(np.zeros((1, 4), np.float32))
    made.save(tmp_path / "m.keras")
    assert gives_probabilities(str(tmp_path / "m.keras")) is False


def test_a_damaged_configuration_is_named_before_anything_is_loaded(tmp_path):
    path = tmp_path / "m.keras"
    functional(None).save(path)
    with zipfile.ZipFile(path) as archive:
        start = archive.getinfo("config.json").header_offset + len(zipfile.stringFileHeader) + 40
    content = bytearray(path.read_bytes())
    content[start] ^= 1
    path.write_bytes(content)
    for read in (check_model_file, gives_probabilities):
        with pytest.raises(ConfigError, match=r"--model_file=.*m.keras is damaged: its config.json cannot be read \("):
            read(str(path))


@pytest.mark.parametrize("text", ["[1]", "3", "null"])
def test_a_configuration_of_no_model_is_refused(text, tmp_path):
    with zipfile.ZipFile(tmp_path / "m.keras", "w") as archive:
        archive.writestr("config.json", text)
        archive.writestr("metadata.json", "{}")
    with pytest.raises(ConfigError, match=r"m\.keras is not a \.keras file"):
        check_model_file(str(tmp_path / "m.keras"))


def test_a_file_that_may_not_be_read_is_not_called_another_kind_of_file(tmp_path):
    path = tmp_path / "folder" / "m.keras"
    path.parent.mkdir()
    functional(None).save(path)
    for closed in (path, path.parent):
        with permissions.of(closed, 0), pytest.raises(ConfigError, match=r"cannot be read \(Permission denied\)"):
            check_model_file(str(path))
    with pytest.raises(ConfigError, match=r"is not a \.keras file"):
        check_model_file(str(tmp_path))

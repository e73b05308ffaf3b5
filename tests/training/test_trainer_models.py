"""Which models a trainer takes and refuses, and what it makes of their layers, weights and dtypes."""

from __future__ import annotations

import tfpar
from tests.training.trainers import CLASSES, model, source, trainer_of
from tfpar import inputs, models
from tfpar.config import ConfigError, ExperimentConfig

import keras
import numpy as np
import pytest
import tensorflow as tf

# Taken or refused


def subclassed() -> keras.Model:
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(CLASSES)

        def call(self, x):
            return self.dense(x)

        def get_config(self):
            raise NotImplementedError("no configuration")

    made = Net()
    made(np.zeros((1, 6), np.float32))
    return made


def functional() -> keras.Model:
    x = keras.Input((6,))
    return keras.Model(x, keras.layers.Dense(CLASSES)(keras.layers.Dense(4, activation="tanh")(x)))


def deferred() -> keras.Model:
    made = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(CLASSES)])
    made(np.zeros((1, 6), np.float32))
    return made


@pytest.mark.parametrize("builder", [model, functional, deferred])
def test_a_model_built_outside_the_strategy_is_rebuilt_under_it_with_its_weights(builder):
    outside, replicas = builder(), 3
    generator = np.random.default_rng(5)
    outside.set_weights([generator.normal(size=value.shape) for value in outside.get_weights()])
    trainer = trainer_of(outside, strategy="mirrored", devices=replicas)
    assert trainer.model is not outside
    assert type(trainer.model) is type(outside)
    for theirs, ours in zip(outside.weights, trainer.model.weights, strict=True):
        assert trainer.strategy.extended.variable_created_in_scope(ours.value)
        copies = trainer.strategy.experimental_local_results(ours.value)
        assert len(copies) == replicas
        for copy in copies:
            np.testing.assert_array_equal(copy.numpy(), theirs.numpy(), err_msg=ours.path)


def test_a_model_built_under_the_strategy_is_taken_as_it_is():
    runtime = tfpar.initialize(ExperimentConfig.from_flat_dict({"strategy": "mirrored", "devices": 2}))
    with runtime.strategy.scope():
        inside = model()
    assert trainer_of(inside, runtime=runtime, strategy="mirrored", devices=2).model is inside


def with_layer_as_activation(*, called: bool) -> keras.Model:
    x = keras.Input((6,))
    made = keras.Model(x, keras.layers.Dense(CLASSES)(keras.layers.Dense(4, keras.layers.PReLU(), name="first")(x)))
    if called:
        made(np.zeros((1, 6), np.float32))
    return made


def test_a_layer_as_activation_must_have_its_weights():
    """Keras makes them when the model is called first, which the step, traced with the others, cannot."""
    with pytest.raises(ConfigError, match=r"'first' .* a PReLU, as its activation, .* or call the model"):
        trainer_of(lambda: with_layer_as_activation(called=False))
    trainer = trainer_of(lambda: with_layer_as_activation(called=True))
    before = [variable.numpy() for variable in trainer.model.trainable_variables]
    assert len(before) == 5
    trainer.fit(source(), steps=2)
    for old, new in zip(before, trainer.model.trainable_variables, strict=True):
        assert not np.array_equal(old, new.numpy()), new.path


@pytest.mark.parametrize(
    ("builder", "message"),
    [
        (lambda: keras.Sequential([keras.layers.Dense(3)]), "it must return a built Keras model"),
        (lambda: "convnet", "it must return a built Keras model"),
        (keras.Sequential([keras.layers.Dense(3)]), "the model has no weights yet"),
        (keras.Sequential([keras.Input((2,)), keras.layers.ReLU()]), "has no weights, so there is nothing to train"),
        (subclassed, None),
    ],
)
def test_models_that_cannot_be_used(builder, message):
    options = {}
    if message is None:  # a model without a configuration, built outside
        builder, message = builder(), r"cannot be rebuilt under it \(no configuration\).*Trainer\(lambda"
        options = {"strategy": "mirrored", "devices": 2}
    with pytest.raises(ConfigError, match=message):
        trainer_of(builder, **options)


@pytest.mark.parametrize(("precision", "found"), [("mixed_bfloat16", "float32"), ("float32", "bfloat16")])
def test_a_model_of_another_precision_is_refused(precision, found):
    built = model(dtype=keras.DTypePolicy("mixed_bfloat16" if found == "bfloat16" else "float32"))
    plain = keras.Sequential([layer for layer in built.layers if isinstance(layer, keras.layers.Dense)][:1])
    plain.build((None, 6))
    with pytest.raises(ConfigError, match=rf"--precision={precision}: the model was built to compute in {found}"):
        trainer_of(plain, precision=precision)


# Layers, weights and dtypes


def convolutional(layer: keras.layers.Layer | None = None) -> keras.Model:
    layers = [keras.layers.Reshape((3, 2, 1)), layer or keras.layers.Conv2D(4, 2), keras.layers.Flatten()]
    return keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(3)])


class OwnConvolution(keras.layers.Layer):
    def build(self, shape):
        self.kernel = self.add_weight(shape=(2, 2, shape[-1], 4))

    def call(self, x):
        return tf.nn.conv2d(x, self.kernel, strides=1, padding="VALID")

    def compute_output_shape(self, shape):
        return (shape[0], shape[1] - 1, shape[2] - 1, 4)


def own_layers(layer: keras.layers.Layer) -> keras.Model:
    """A model without symbolic inputs, so that its cost is unknown before it runs."""

    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.inside = convolutional(layer)

        def call(self, x):
            return self.inside(x)

    made = Net()
    made(np.zeros((1, 6), np.float32))
    return made


@pytest.mark.xla
@pytest.mark.parametrize(
    ("builder", "jit_compile", "left_out"),
    [
        (model, "auto", False),
        (convolutional, "auto", True),
        (convolutional, "true", False),
        (lambda: convolutional(OwnConvolution()), "auto", True),
        (lambda: convolutional(keras.layers.Flatten()), "auto", False),
        (lambda: own_layers(keras.layers.Conv2D(4, 2)), "auto", True),
        (lambda: own_layers(keras.layers.Flatten()), "auto", False),
    ],
)
def test_auto_leaves_xla_out_for_convolutions_on_cpus(builder, jit_compile, left_out):
    trainer = trainer_of(builder, jit_compile=jit_compile)
    assert trainer.jit_compile == (not left_out)
    assert ("convolutions on CPUs" in trainer.program.xla_disabled_reason) == (left_out or jit_compile == "true")


def test_weights_of_several_dtypes():
    def mixed():
        return keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(4, dtype="bfloat16"), keras.layers.Dense(3, dtype="float32")]
        )

    assert np.isfinite(trainer_of(mixed).fit(source(), steps=2)["train_loss"])


def partly_frozen() -> keras.Model:
    frozen = keras.layers.Dense(50, trainable=False, activation="tanh")
    norm = keras.layers.BatchNormalization(trainable=False)
    return keras.Sequential([keras.Input((6,)), frozen, norm, keras.layers.Dense(CLASSES)])


def test_frozen_weights_keep_their_bits_and_do_not_travel():
    trainer = trainer_of(partly_frozen, strategy="mirrored", devices=3, remainder="pad")
    generator = np.random.default_rng(1)
    trainer.model.layers[1].set_weights([generator.uniform(0.5, 1.5, 50) for _ in range(4)])
    before = [value.numpy() for value in trainer.model.non_trainable_variables]
    first = trainer.model.trainable_variables[0].numpy()
    summary = trainer.fit(source(), steps=20)
    assert np.abs(trainer.model.trainable_variables[0].numpy() - first).max() > 1e-4
    for variable, value in zip(trainer.model.non_trainable_variables, before, strict=True):
        for copy in trainer.strategy.experimental_local_results(variable.value):
            np.testing.assert_array_equal(copy.numpy(), value, err_msg=variable.path)
    learning = sum(int(np.prod(weight.shape)) for weight in trainer.model.trainable_variables)
    # With flag, count, loss, the accuracy's two numbers, and the statistics of the normalisation.
    assert summary["exchange"]["payload_bytes_per_step"] == 4 * (learning + 3 + 2 + 100)


@pytest.mark.parametrize(
    ("builder", "examples", "warned"), [(partly_frozen, 41, False), (model, 41, True), (model, 40, False)]
)
def test_padding_that_keras_normalisation_counts_is_said(builder, examples, warned, capsys):
    trainer_of(builder, accumulate_steps=2).fit(source(examples), steps=1)
    assert ("BatchNormalization (batch_normalization) counts the padding" in capsys.readouterr().out) == warned


@pytest.mark.grappler
def test_accumulation_of_a_model_for_which_tensorflow_would_save_memory():
    # Estimated at more than 205 MB; see `tfpar.parallel.graph_passes`.
    config = ExperimentConfig.from_flat_dict({"dataset": "synthetic:tokens:512", "sequence_length": 128})
    data, _ = inputs.build_splits(config.input, 0)

    def builder() -> keras.Model:
        return models.build("transformer_lm_tiny", tfpar.task_spec(data), width=256, depth=5)

    trainer = trainer_of(builder, global_batch_size=4, accumulate_steps=2)
    assert np.isfinite(trainer.fit(data, steps=2).history["loss"]).all()

"""Models of other number formats: float64, float16 under every optimizer, float8."""

from __future__ import annotations

import tfpar
from tests.training.harness import Steps
from tests.training.model import keras_steps
from tfpar import inputs
from tfpar.config import ConfigError
from tfpar.optim.optimizers import OPTIMIZERS
from tfpar.training.core import Core
from tfpar.training.model.support import check_model
from tfpar.training.objective import Goal, SupervisedObjective

import keras
import numpy as np
import pytest
import tensorflow as tf

layers = keras.layers
STEPS, BATCH = 3, 8


def arrays():
    generator = np.random.default_rng(4)
    x = generator.normal(size=(STEPS * BATCH, 6)).astype(np.float32)
    return x, np.tanh(x[:, :1] - x[:, 1:2])


def model(**options) -> keras.Model:
    return keras.Sequential(
        [keras.Input((6,)), layers.Dense(8, activation="tanh", **options), layers.Dense(1, **options)]
    )


def steps(replicas: int, micro_batches: int = 1):
    shape = (STEPS, replicas, micro_batches, -1)
    x, y = (part.reshape(*shape, *part.shape[1:]) for part in arrays())
    return [[(x[i, j], y[i, j], np.ones(x.shape[2:4], np.float32)) for j in range(replicas)] for i in range(STEPS)]


@pytest.fixture
def _float64():
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx("float32")


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize("by_function", [True, False])
def test_a_float64_model_is_trained_in_float64(by_function, messages):
    keras.config.set_dtype_policy("float64")
    x, y = arrays()
    reference = model()
    given = keras.models.clone_model(reference)
    given.set_weights(start := reference.get_weights())
    expected = keras_steps.fit(reference, keras.optimizers.Adam(0.01), "mse", x, y, BATCH)
    options = {"strategy": "one_device", "global_batch_size": BATCH, "shuffle": False, "schedule": "constant"}
    trainer = tfpar.Trainer(model if by_function else given, "adam", "mse", learning_rate=0.01, **options)
    trainer.model.set_weights(start)
    summary = trainer.fit(inputs.from_arrays(x, y), steps=STEPS)
    assert summary["train_loss"] == pytest.approx(np.mean(expected), rel=1e-5)
    for ours, theirs in zip(trainer.model.get_weights(), reference.get_weights(), strict=True):
        assert ours.dtype == np.float64
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-7)
    assert any("float64; loss, gradients and their exchange are float32" in line for line in messages)


@pytest.mark.parametrize("name", sorted({*OPTIMIZERS, "adagrad", "adadelta", "adamax", "nadam", "ftrl", "rmsprop"}))
def test_mixed_float16_trains_with_every_optimizer(name):
    keras.config.set_dtype_policy("mixed_float16")
    optimizer = OPTIMIZERS[name] if name in OPTIMIZERS else type(keras.optimizers.get(name))
    run = Steps(1, model, lambda: optimizer(0.01), scale_loss=True)
    before = [value.copy() for value in run.model.get_weights()]
    result = run.run(steps(1), micro_batches=True)
    assert result.finite.numpy().all()
    assert np.isfinite(result.loss).all()
    assert any(not np.array_equal(one, other) for one, other in zip(before, run.model.get_weights(), strict=True))


def test_a_model_that_was_compiled_in_mixed_float16_trains():
    """Keras' `compile` puts a LossScaleOptimizer around its optimizer."""
    keras.config.set_dtype_policy("mixed_float16")
    given = model()
    given.compile(keras.optimizers.SGD(0.01), "mse")
    assert isinstance(given.optimizer, keras.optimizers.LossScaleOptimizer)
    with pytest.raises(ConfigError, match=r"built to compute in float16\. Use --precision=mixed_float16"):
        tfpar.Trainer(given, strategy="one_device", precision="float32")
    trainer = tfpar.Trainer(given, strategy="one_device", global_batch_size=4)
    assert isinstance(trainer.optimizer, keras.optimizers.SGD)
    assert trainer.config.precision.precision == "mixed_float16"
    assert np.isfinite(trainer.fit(*arrays(), epochs=1)["train_loss"])


def test_the_global_policy_is_the_precision_and_stays_as_it_was():
    keras.config.set_dtype_policy("mixed_bfloat16")
    trainer = tfpar.Trainer(model, "adam", "mse", strategy="one_device", global_batch_size=4)
    assert {layer.compute_dtype for layer in trainer.model.layers} == {"bfloat16"}
    other = tfpar.Trainer(model, "adam", "mse", strategy="one_device", precision="float32", global_batch_size=4)
    assert {layer.compute_dtype for layer in other.model.layers} == {"float32"}
    assert keras.config.dtype_policy().name == "mixed_bfloat16"
    assert np.isfinite(trainer.fit(*arrays(), epochs=1)["train_loss"])


# Float8


def quantised(start=None) -> keras.Model:
    made = model()
    if start is not None:
        made.set_weights(start)
    made.quantize("float8")
    return made


@pytest.mark.parametrize(("replicas", "jit_compile"), [(1, False), (1, True), (2, False)])
def test_float8_layers_train_as_in_keras(replicas, jit_compile):
    start = model().get_weights()
    x, y = arrays()
    reference = quantised(start)
    expected = keras_steps.fit(reference, keras.optimizers.Adam(0.05), "mse", x, y, BATCH)
    run = Steps(replicas, lambda: quantised(start), lambda: keras.optimizers.Adam(0.05), jit_compile=jit_compile)
    result = run.run(steps(replicas), micro_batches=True)
    # Noise: values have 3 bits of mantissa, and replicas scale by the maxima of their own examples.
    np.testing.assert_allclose(result.loss, expected, rtol=0.01 if replicas == 1 else 0.1)
    for variable, theirs in zip(run.model.trainable_variables, reference.trainable_variables, strict=True):
        if variable.overwrite_with_gradient:
            if replicas == 1:
                np.testing.assert_allclose(variable.numpy(), theirs.numpy(), rtol=0.05, err_msg=variable.path)
            assert np.any(variable.numpy() != (1.0 if "scale" in variable.path else 0.0))
    for one, other in zip(run.weights()[0], run.weights()[-1], strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_float8_model_is_copied_for_two_replicas_and_comes_back():
    start = model().get_weights()
    x, y = arrays()
    options = {"global_batch_size": BATCH, "shuffle": False, "jit_compile": False, "strategy": "mirrored", "devices": 2}
    given = quantised(start)
    tfpar.Trainer(given, keras.optimizers.SGD(0.05), "mse", **options).fit(x, y, steps=3)
    built = tfpar.Trainer(lambda: quantised(start), keras.optimizers.SGD(0.05), "mse", **options)
    built.fit(x, y, steps=3)
    assert np.abs(given.get_weights()[0] - start[0]).max() > 1e-3
    for ours, theirs in zip(given.weights, built.model.weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6, err_msg=ours.path)


@pytest.mark.parametrize("batch", [8, 12])  # as large as a power of two, and not
def test_float8_statistics_of_a_batch_that_is_not_full_are_those_of_keras(batch):
    """They are those of the gradients of a mean over the examples that are there."""
    start = model().get_weights()
    x, y = (part[: batch + batch // 4] for part in arrays())
    reference = quantised(start)
    reference.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=False)
    reference.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0)
    options = {"strategy": "one_device", "global_batch_size": batch, "shuffle": False, "schedule": "constant"}
    trainer = tfpar.Trainer(quantised(start), keras.optimizers.SGD(0.05), "mse", jit_compile=False, **options)
    trainer.fit(x, y, epochs=2)
    for ours, theirs in zip(trainer.model.weights, reference.weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6, err_msg=ours.path)


@pytest.mark.parametrize("jit", [False, True])
def test_micro_batches_keep_the_maximum_of_float8_statistics(jit):
    made = quantised()
    objective = SupervisedObjective(made, Goal(keras.losses.MeanSquaredError()))
    objective.bind(tf.TensorSpec([6]), tf.TensorSpec([1]))
    core = Core(made, objective)
    params = [tf.convert_to_tensor(variable.value) for variable in made.trainable_variables]
    x, y = (part[:8].reshape(2, 4, -1) for part in arrays())
    x = tf.constant(x * np.array([1.0, 3.0], np.float32)[:, None, None])

    def sums(first, last):
        batch = (x[first:last], tf.constant(y[first:last]), tf.ones([last - first, 4]))
        function = tf.function(core.accumulate, jit_compile=jit, autograph=False)
        return function(params, [], batch, tf.constant([0, 0]), None)

    both, parts = sums(0, 2), [sums(0, 1), sums(1, 2)]
    for together, one, other in zip(both.overwritten, *(part.overwritten for part in parts), strict=True):
        np.testing.assert_allclose(together, np.maximum(one, other), rtol=1e-5)
    for place in core.overwritten:
        assert not np.any(both.gradients[place])


def test_parameter_servers_refuse_weights_that_set_themselves():
    spectral = keras.Sequential([keras.Input((6,)), layers.SpectralNormalization(layers.Dense(1), name="norm")])
    for made, name in ((spectral, "norm"), (quantised(), "dense")):
        check_model(made)
        with pytest.raises(ConfigError, match=f"parameter_server: the layers {name}.*--strategy=multi_worker"):
            check_model(made, synchronous=False)

"""Which optimizers a trainer takes and refuses, and which learning rate they follow."""

from __future__ import annotations

import functools

import tfpar
from tests.training.trainers import BATCH, trainer_of
from tfpar import inputs
from tfpar.config import ConfigError
from tfpar.training.optimizer_spec import OptimizerSpec

import keras
import numpy as np
import pytest
import tensorflow as tf


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), "precision='mixed_float16'"),
        (lambda: keras.optimizers.SGD(loss_scale_factor=8.0), r"loss_scale_factor=8\.0"),
        (lambda: "adamm", r"--optimizer='adamm' is not known\. Did you mean 'adam'"),
        (lambda: keras.optimizers.SGD, "is not a Keras 3 optimizer"),  # the class itself
    ],
)
def test_optimizers_that_are_refused(optimizer, message):
    with pytest.raises(ConfigError, match=message):
        trainer_of(optimizer=optimizer())


def linear() -> keras.Model:
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])


def descend(rates: list[float]) -> np.ndarray:
    """Weights of `linear` after full-batch gradient descent on its data, in NumPy."""
    x, y = line()
    weight = np.ones((2, 1))
    for rate in rates:
        weight = weight - rate * 2 * x.T @ (x @ weight - y) / len(x)
    return weight


def line() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(3)
    return generator.normal(size=(BATCH, 2)).astype(np.float32), generator.normal(size=(BATCH, 1)).astype(np.float32)


def squared_error(y, outputs):
    return tf.square(outputs - y)


def fit_line(optimizer, steps: int, **options) -> np.ndarray:
    trainer = tfpar.Trainer(
        linear, optimizer, squared_error, strategy="one_device", global_batch_size=BATCH, jit_compile=False, **options
    )
    trainer.fit(inputs.from_arrays(*line()), steps=steps)
    return trainer.model.get_weights()[0]


def test_an_optimizer_object_keeps_its_own_schedule():
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, decay_steps=2, decay_rate=0.5)
    expected = descend([0.1 * 0.5 ** (step / 2) for step in range(6)])
    np.testing.assert_allclose(fit_line(keras.optimizers.SGD(decay), 6), expected, rtol=1e-5)


class Halving(keras.optimizers.schedules.LearningRateSchedule):
    """Cannot be serialised."""

    def __call__(self, step):
        return 0.1 * 0.5 ** tf.cast(step, tf.float32)


@pytest.mark.parametrize(
    ("rate", "rates"), [(Halving(), [0.1 * 0.5**step for step in range(4)]), (lambda: 0.1, [0.1] * 4)]
)
def test_a_rate_that_cannot_be_saved_is_followed_also_when_a_run_resumes(tmp_path, rate, rates):
    for steps in (2, 4):
        weights = fit_line(keras.optimizers.SGD(rate), steps, workdir=str(tmp_path))
        np.testing.assert_allclose(weights, descend(rates[:steps]), rtol=1e-5)


def test_an_optimizer_object_keeps_its_own_learning_rate():
    np.testing.assert_allclose(fit_line(keras.optimizers.SGD(0.07), 5), descend([0.07] * 5), rtol=1e-5)


@pytest.mark.parametrize("option", ["learning_rate", "warmup_steps", "weight_decay", "ema"])
def test_options_without_effect_on_an_optimizer_object_are_refused(option):
    value = 3 if option == "warmup_steps" else 0.5
    with pytest.raises(ConfigError, match=f"{option}: without effect on the SGD object"):
        trainer_of(optimizer=keras.optimizers.SGD(0.07), **{option: value})


def test_what_a_configuration_says_without_effect_on_an_optimizer_object_is_logged(messages):
    config = tfpar.ExperimentConfig.from_flat_dict({"warmup_steps": 3, "weight_decay": 0.5, "schedule": "constant"})
    OptimizerSpec.of(keras.optimizers.SGD(0.07), {}, config)
    assert messages == [
        "WARNING: schedule, warmup_steps, weight_decay of the configuration: without effect on the SGD object given as "
        "optimizer. Set it there, or give the optimizer by name."
    ]
    OptimizerSpec.of(keras.optimizers.SGD(0.07), {"schedule": "constant"}, tfpar.ExperimentConfig())
    OptimizerSpec.of("sgd", {}, config)
    assert len(messages) == 1


@pytest.mark.parametrize("option", ["learning_rate", "schedule"])
def test_schedule_objects_belong_to_optimizer_objects(option):
    given = keras.optimizers.schedules.CosineDecay(0.1, 10)
    with pytest.raises(ConfigError, match=rf"{option}=CosineDecay.*keras\.optimizers\.AdamW\(CosineDecay"):
        trainer_of(**{option: given})


def test_a_schedule_that_is_asked_for_takes_the_place_of_the_optimizers_rate():
    found = fit_line(keras.optimizers.SGD(0.9), 4, schedule="constant", learning_rate=0.02)
    np.testing.assert_allclose(found, descend([0.02] * 4), rtol=1e-5)


def test_a_schedule_beside_an_optimizer_object_scales_its_rate():
    options = {"schedule": "step", "schedule_args": "milestones=[2],factor=0.5"}
    found = fit_line(keras.optimizers.SGD(0.1), 4, **options)
    np.testing.assert_allclose(found, descend([0.1, 0.1, 0.05, 0.05]), rtol=1e-5)
    decaying = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5))
    with pytest.raises(ConfigError, match="the SGD object given as optimizer has a learning-rate schedule of its own"):
        trainer_of(optimizer=decaying, **options)


def test_an_optimizer_by_name_follows_the_options():
    options = {"schedule": "step", "schedule_args": "milestones=[2],factor=0.5", "learning_rate": 0.1}
    found = fit_line("sgd", 4, optimizer_args="momentum=0", **options)
    np.testing.assert_allclose(found, descend([0.1, 0.1, 0.05, 0.05]), rtol=1e-5)


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_optimizer_made_outside_gets_its_slots_under_the_strategy(replicas):
    given = keras.optimizers.AdamW(0.01, weight_decay=0.1, beta_1=0.7)
    given.exclude_from_weight_decay(var_names=["bias"])
    trainer = trainer_of(optimizer=given, strategy="mirrored" if replicas > 1 else "one_device", devices=replicas)
    ours = trainer.optimizer
    assert ours.get_config() == given.get_config()
    kernel, bias = trainer.model.trainable_variables[:2]
    assert ours._use_weight_decay(kernel)
    assert not ours._use_weight_decay(bias)
    for variable in ours.variables:
        assert len(trainer.strategy.experimental_local_results(variable.value)) == replicas


def excluding_kernels() -> keras.optimizers.Optimizer:
    optimizer = keras.optimizers.AdamW(1e-3, weight_decay=20.0)
    optimizer.exclude_from_weight_decay(var_names=["^kernel$"])
    return optimizer


@pytest.mark.parametrize(
    "make", [excluding_kernels, lambda: keras.optimizers.Muon(1e-2, exclude_layers=["second/kernel$"])]
)
def test_owners_of_pieces_exclude_weights_by_whole_names(make):
    def build():
        keras.utils.set_random_seed(1)
        dense = functools.partial(keras.layers.Dense, bias_initializer="ones")
        layers = [dense(64, "tanh", name="first"), dense(64, "tanh", name="second"), dense(1, name="last")]
        return keras.Sequential([keras.Input((12,)), *layers])

    x = np.random.default_rng(0).normal(size=(32, 12)).astype(np.float32)
    found = []
    for options in ({"strategy": "one_device"}, {"strategy": "mirrored", "devices": 2, "shard": "optimizer"}):
        trainer = tfpar.Trainer(build, make(), loss="mse", global_batch_size=8, verbose=0, **options)
        trainer.fit(x, x[:, :1], steps=4)
        found.append(trainer.model.get_weights())
    for expected, value in zip(*found, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-5)

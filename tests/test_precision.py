"""Dtype policies, the TF32 switch, and loss scaling against a plain Python account of the rule."""

from __future__ import annotations

from tfpar import precision
from tfpar.config import ConfigError, PrecisionConfig

import keras
import numpy as np
import pytest
import tensorflow as tf


@pytest.fixture
def _tf32_restored():
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    yield
    tf.config.experimental.enable_tensor_float_32_execution(before)


@pytest.mark.usefixtures("_tf32_restored")
@pytest.mark.parametrize(
    ("name", "compute"), [("float32", "float32"), ("mixed_bfloat16", "bfloat16"), ("mixed_float16", "float16")]
)
@pytest.mark.parametrize("tf32", [True, False])
def test_set_policy_reaches_layers_and_gpu_switch(name, compute, tf32):
    precision.set_policy(PrecisionConfig(precision=name, tf32=tf32))
    layer = keras.layers.Dense(3)
    layer.build((None, 2))
    assert layer.compute_dtype == compute
    assert layer.kernel.dtype == "float32"
    assert tf.config.experimental.tensor_float_32_execution_enabled() is tf32


def test_unknown_precision_suggests():
    with pytest.raises(ConfigError, match="mixed_float16"):
        precision.policy("mixed_float61")


def test_only_float16_is_scaled():
    assert precision.uses_loss_scale("mixed_float16")
    assert not precision.uses_loss_scale("mixed_bfloat16")
    assert not precision.uses_loss_scale("float32")
    state = precision.initial(PrecisionConfig(precision="mixed_float16", initial_loss_scale=1024.0))
    assert (float(state.scale), int(state.good_steps)) == (1024.0, 0)


@pytest.mark.parametrize("name", ["float32", "mixed_bfloat16"])
def test_scale_stays_one_without_float16(name):
    config = PrecisionConfig(precision=name, loss_scale_growth_steps=1)
    state = precision.initial(config)
    for finite in (True, False, True):
        state = precision.update(state, tf.constant(finite), growth_steps=precision.growth_steps(config))
    assert float(state.scale) == 1.0


def _expected(scale, good, finite, growth_steps):
    """The rule of Micikevicius et al. 2018 in plain Python."""
    if not finite:
        return max(scale / 2, 1.0), 0
    good += 1
    if good == growth_steps:
        return min(scale * 2, 2.0**24), 0
    return scale, good


@pytest.mark.parametrize("jit", [False, True])
def test_update_follows_the_rule_over_a_random_history(jit):
    @tf.function(jit_compile=jit, autograph=False)
    def step(state, finite):
        return precision.update(state, finite, growth_steps=3)

    history = np.random.default_rng(0).random(200) < 0.7
    config = PrecisionConfig(precision="mixed_float16", initial_loss_scale=8.0, loss_scale_growth_steps=3)
    state, scale, good = precision.initial(config), 8.0, 0
    seen = set()
    for finite in history:
        state = step(state, tf.constant(bool(finite)))
        scale, good = _expected(scale, good, finite, 3)
        assert (float(state.scale), int(state.good_steps)) == (scale, good)
        seen.add(scale)
    assert min(seen) == 1.0  # the floor was reached and held
    assert max(seen) >= 16.0


def test_scale_is_capped():
    state = precision.LossScale(tf.constant(precision.MAXIMUM_LOSS_SCALE), tf.constant(0, tf.int32))
    for _ in range(3):
        state = precision.update(state, tf.constant(True), growth_steps=1)
    assert float(state.scale) == 2.0**24


def test_replicas_agree_without_talking():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    state = precision.LossScale(tf.constant(64.0), tf.constant(0, tf.int32))

    @tf.function(autograph=False)
    def run(finite):
        return strategy.run(lambda: precision.update(state, finite, growth_steps=2))

    result = run(tf.constant(False))
    assert [float(x) for x in strategy.experimental_local_results(result.scale)] == [32.0, 32.0]


def test_scaling_rescues_a_gradient_that_float16_loses():
    """The reason for all this: 2**-26 is nothing in float16, and survives with a scale of 2**15."""
    tiny = tf.constant(2.0**-26)

    def gradient(scale):
        weight = tf.constant(1.0)
        with tf.GradientTape() as tape:
            tape.watch(weight)
            half = tf.cast(weight, tf.float16)
            loss = tf.cast(half * tf.constant(1.0, tf.float16), tf.float32) * tiny * scale
        return float(tape.gradient(loss, weight) / scale)

    assert gradient(1.0) == 0.0
    assert gradient(2.0**15) == 2.0**-26

"""What `optimizers.build` promises: options that reach the optimizer, decay by path, averages."""

from __future__ import annotations

import re

from tests.optim.updates import gradients_of, matrices_and_vectors, run_pure, values_of
from tfpar.config import ConfigError, OptimizerConfig
from tfpar.optim import optimizers
from tfpar.optim.pure_update import pure_apply

import keras
import numpy as np
import pytest
import tensorflow as tf


@pytest.mark.parametrize("name", sorted(optimizers.OPTIMIZERS))
def test_build_trains_and_survives_saving(name):
    config = OptimizerConfig(optimizer=name, learning_rate=0.02, base_batch_size=32)
    optimizer = optimizers.build(config, global_batch_size=64)
    optimizers.check_optimizer(optimizer)
    assert float(tf.convert_to_tensor(optimizer.learning_rate)) == pytest.approx(0.04)
    # What loading a .keras file calls. keras.optimizers.deserialize does not know Lamb (Keras 3.15.1).
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(optimizer))
    assert type(again) is optimizers.OPTIMIZERS[name]
    assert again.get_config() == optimizer.get_config()
    # A least-squares problem: every optimizer must get closer.
    generator = np.random.default_rng(0)
    x = tf.constant(generator.normal(size=(64, 5)), tf.float32)
    y = x @ tf.constant(generator.normal(size=(5, 5)), tf.float32)
    weight = keras.Variable(np.eye(5, dtype="float32"), name="kernel")
    optimizer.build([weight])
    value, variables = tf.convert_to_tensor(weight), values_of(optimizer.variables)

    def loss_and_gradient(value):
        with tf.GradientTape() as tape:
            tape.watch(value)
            loss = tf.reduce_mean((x @ value - y) ** 2)
        return loss, tape.gradient(loss, value)

    first, _ = loss_and_gradient(value)
    for _ in range(60):
        _, gradient = loss_and_gradient(value)
        (value,), variables = pure_apply(optimizer, variables, [value], [gradient])
    last, _ = loss_and_gradient(value)
    # LARS moves a layer by a thousandth of its norm at a rate of 1, and by 0.04 of that here. Adadelta begins with
    # steps of the square root of its epsilon.
    assert float(last) < (0.999 if name in ("lars", "adadelta") else 0.6) * float(first)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "lamb", "lion", "muon"])
def test_weight_decay_is_decoupled_and_excludes_by_path(name):
    """With zero gradients, decayed weights shrink by exactly 1 - rate x decay and excluded ones keep their bits."""
    model = matrices_and_vectors()
    for variable in model.trainable_variables:
        variable.assign(tf.ones(variable.shape))
    config = OptimizerConfig(optimizer=name, learning_rate=0.5, weight_decay=0.1)
    optimizer = optimizers.build(config, global_batch_size=1)
    optimizer.build(model.trainable_variables)
    start = values_of(model.trainable_variables)
    zeros = [tf.zeros_like(value) for value in start]
    pure, _ = run_pure(optimizer, start, [zeros])
    optimizer.apply(zeros, model.trainable_variables)  # Keras' own path excludes the same
    for variable, value in zip(model.trainable_variables, pure, strict=True):
        expected = 0.95 if variable.name == "kernel" else 1.0
        np.testing.assert_allclose(value, np.full(value.shape, expected), rtol=1e-6, err_msg=variable.path)
        np.testing.assert_allclose(variable.numpy(), value, rtol=1e-6)
    names = [variable.name for variable in model.trainable_variables]
    assert names == ["embeddings", "kernel", "bias", "gamma", "beta", "kernel", "bias"]


def _decayed(optimizer, model):
    """Names of the variables that an update with zero gradients moves."""
    optimizer.build(model.trainable_variables)
    start = [tf.ones(variable.shape) for variable in model.trainable_variables]
    params, _ = run_pure(optimizer, start, [[tf.zeros_like(value) for value in start]])
    moved = [float(tf.reduce_max(tf.abs(new - old))) > 0 for new, old in zip(params, start, strict=True)]
    return {v.name for v, is_moved in zip(model.trainable_variables, moved, strict=True) if is_moved}


def test_a_recreated_optimizer_keeps_its_exclusions():
    config = OptimizerConfig(optimizer="adamw", learning_rate=0.5, weight_decay=0.1)
    first = optimizers.build(config, global_batch_size=1)
    assert _decayed(first, matrices_and_vectors()) == {"kernel"}
    assert _decayed(optimizers.recreate(first), matrices_and_vectors()) == {"kernel"}
    named = keras.optimizers.AdamW(0.5, weight_decay=0.1)
    named.exclude_from_weight_decay(var_names=["bias", "kernel"])
    assert _decayed(optimizers.recreate(named), matrices_and_vectors()) == {"embeddings", "gamma", "beta"}
    listed = keras.optimizers.AdamW(0.5, weight_decay=0.1)
    listed.exclude_from_weight_decay(var_list=matrices_and_vectors().trainable_variables[:1])
    with pytest.raises(ConfigError, match="var_names"):
        optimizers.recreate(listed)


def test_nothing_is_excluded_where_nothing_is_asked():
    model = matrices_and_vectors()
    config = OptimizerConfig(optimizer="sgd", learning_rate=0.5, weight_decay=0.1, weight_decay_exclude="")
    optimizer = optimizers.build(config, global_batch_size=1)
    optimizer.build(model.trainable_variables)
    start = [tf.ones(variable.shape) for variable in model.trainable_variables]
    params, _ = run_pure(optimizer, start, [[tf.zeros_like(value) for value in start]])
    for value in params:
        np.testing.assert_allclose(value, np.full(value.shape, 0.95), rtol=1e-6)


def test_a_decay_that_reaches_nothing_is_refused():
    """'--weight_decay_exclude=net' would silently switch the decay of a model named 'subnet' off."""
    config = OptimizerConfig(optimizer="sgd", weight_decay=0.1, weight_decay_exclude="sequential")
    optimizer = optimizers.build(config, global_batch_size=1)
    with pytest.raises(ConfigError, match="weight_decay_exclude"):
        optimizer.build(matrices_and_vectors().trainable_variables)


def test_muon_orthogonalises_hidden_matrices_only():
    model = matrices_and_vectors()
    optimizer = optimizers.build(OptimizerConfig(optimizer="muon", learning_rate=1.0), global_batch_size=1)
    optimizer.build(model.trainable_variables)
    start = values_of(model.trainable_variables)
    params, _ = run_pure(optimizer, start, gradients_of(model.trainable_variables, 1))
    for variable, old, new in zip(model.trainable_variables, start, params, strict=True):
        update = (old - new).numpy()
        if variable.path.endswith("hidden/kernel"):
            singular = np.linalg.svd(update, compute_uv=False) / (0.2 * np.sqrt(max(update.shape)))
            assert singular.min() > 0.5
            assert singular.max() < 1.3
        else:  # Adam's first update is the sign of the gradient
            np.testing.assert_allclose(np.abs(update), 1.0, rtol=1e-3, err_msg=variable.path)


def test_muon_leaves_attention_heads_to_its_own_rule():
    """The output pattern must not take 'multi_head_attention' for a head."""
    for path, is_output in [
        ("head/kernel", True),
        ("lm/logits/kernel", True),
        ("classifier_1/kernel", True),
        ("block_0/multi_head_attention/query/kernel", False),
        ("block_0/attention_output/kernel", False),
    ]:
        assert bool(re.search(optimizers.MUON_OUTPUT_LAYERS, path)) is is_output, path


@pytest.mark.parametrize("value", ["first", '["first"]', '["nonesuch", "^first"]'])
def test_muon_leaves_out_excluded_layers_beside_output_layers(value):
    kernels = [keras.Variable(np.ones((2, 2), np.float32), name=name) for name in ("first", "second", "logits")]
    config = OptimizerConfig(optimizer="muon", optimizer_args=f"exclude_layers={value}")
    optimizer = optimizers.build(config, global_batch_size=1)
    optimizer.learning_rate.assign(1.0)
    optimizer.build(kernels)
    optimizer.apply([np.ones((2, 2), np.float32)] * 3, kernels)
    # Adam moves all elements by 1; Muon moves by a matrix of rank 1 with another norm.
    steps = [1.0 - kernel.numpy().mean() for kernel in kernels]
    assert [step > 0.9 for step in steps] == [True, False, True], steps


@pytest.mark.parametrize("value", ["3", '["a", "("]', '[""]'])
def test_patterns_that_muon_cannot_exclude_are_refused(value):
    config = OptimizerConfig(optimizer="muon", optimizer_args=f"exclude_layers={value}")
    with pytest.raises(
        ConfigError, match=r"--optimizer_args=.*exclude_layers of muon is a regular expression for paths"
    ):
        optimizers.check_arguments(config)


def test_ema_weights_follow_the_formula():
    model = matrices_and_vectors()
    optimizer = optimizers.build(OptimizerConfig(optimizer="sgd", learning_rate=0.1, ema=0.8), global_batch_size=1)
    optimizer.build(model.trainable_variables)
    expected = None
    for gradients in gradients_of(model.trainable_variables, 4):
        optimizer.apply(gradients, model.trainable_variables)
        now = [variable.numpy() for variable in model.trainable_variables]
        # The first weights are the first average (Keras), then 0.8 x average + 0.2 x weights.
        expected = now if expected is None else [0.8 * e + 0.2 * n for e, n in zip(expected, now, strict=True)]
    for average, value in zip(optimizers.ema_variables(optimizer), expected, strict=True):
        np.testing.assert_allclose(average.numpy(), value, rtol=1e-5, atol=1e-7)


def test_no_ema_no_weights():
    model = matrices_and_vectors()
    optimizer = optimizers.build(OptimizerConfig(optimizer="sgd"), global_batch_size=1)
    optimizer.build(model.trainable_variables)
    assert optimizers.ema_variables(optimizer) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "adamv"}, r"--optimizer='adamv'.*'adamw'"),
        ({"optimizer": "adam", "optimizer_args": "beta1=0.8"}, r"--optimizer_args='beta1'.*'beta_1'"),
        ({"optimizer": "adam", "optimizer_args": "learning_rate=1.0"}, "governed by --learning_rate"),
        ({"optimizer": "sgd", "optimizer_args": "use_ema=true"}, "governed by --ema"),
        ({"optimizer": "sgd", "optimizer_args": "gradient_accumulation_steps=2"}, "governed by --accumulate_steps"),
        ({"optimizer": "sgd", "optimizer_args": "momentum=7"}, "sgd refuses it"),
        ({"optimizer": "lars", "optimizer_args": "momentum=1"}, "lars refuses it"),
    ],
)
def test_build_names_flag_value_and_way_out(options, message):
    with pytest.raises(ConfigError, match=message):
        optimizers.build(OptimizerConfig(**options), global_batch_size=8)


def test_arguments_reach_the_optimizer():
    config = OptimizerConfig(optimizer="sgd", optimizer_args="momentum=0,nesterov=true,clipvalue=2")
    optimizer = optimizers.build(config, global_batch_size=8)
    assert (optimizer.momentum, optimizer.nesterov, optimizer.clipvalue) == (0.0, True, 2)
    assert optimizers.build(OptimizerConfig(optimizer="sgd"), global_batch_size=8).momentum == 0.9

"""Misuse of the drop-in, and differences between workers, are noticed."""

from __future__ import annotations

import sys

import tfpar
from tests.drop_in.alone import X, Y, fit, model_of
from tfpar.process.exit_codes import USAGE_ERROR

import keras
import pytest
import tensorflow as tf


def test_misuse_is_refused_in_one_line(alone):
    distributed = tfpar.DistributedOptimizer

    def under_strategy():
        with tf.distribute.OneDeviceStrategy("CPU:0").scope():
            distributed(keras.optimizers.SGD())

    def mixed_float16():
        keras.config.set_dtype_policy("mixed_float16")
        fit(alone)

    def scaled_and_accumulated():
        inner = keras.optimizers.SGD(gradient_accumulation_steps=2)
        distributed(keras.optimizers.LossScaleOptimizer(inner))

    def several_and_accumulated(selects):
        inner = keras.optimizers.SGD(gradient_accumulation_steps=2)
        fit(alone, distributed(keras.optimizers.MultiOptimizer(selects(inner))))

    generator = tf.data.Dataset.from_generator(
        lambda: iter([(X, Y)]), output_signature=(tf.TensorSpec(X.shape), tf.TensorSpec(Y.shape))
    )
    for misuse, said in [
        (under_strategy, "train with tfpar.Trainer"),
        (lambda: distributed(distributed(keras.optimizers.SGD())), "distributed already"),
        (lambda: distributed(None), "None is not a Keras 3 optimizer"),
        (lambda: distributed(keras.optimizers.Adam), "is not a Keras 3 optimizer. Pass e.g. keras.optimizers.Adam"),
        (lambda: distributed("adamz"), "'adamz' is not a Keras 3 optimizer"),
        (scaled_and_accumulated, "would exchange at every step"),
        (lambda: several_and_accumulated(keras.optimizers.OptimizerMap), "MultiOptimizer with gradient_accumulation"),
        (lambda: several_and_accumulated(lambda inner: lambda _: inner), "MultiOptimizer with gradient_accumulation"),
        (lambda: fit(alone, keras.optimizers.SGD()), "does not exchange gradients"),
        (lambda: fit(alone, model=keras.Sequential([keras.layers.Dense(1)])), "Give it a keras.Input"),
        (lambda: fit(alone, data=(generator,)), "steps_per_epoch=N"),
        (mixed_float16, "tfpar.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))"),
    ]:
        with pytest.raises(tfpar.ConfigError) as caught:
            misuse()
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "misuse", [lambda: tfpar.DistributedOptimizer("adamz"), tfpar.init_cluster], ids=["optimizer", "init_cluster"]
)
def test_misuse_is_no_failure_to_start_again_after(monkeypatch, capsys, misuse):
    monkeypatch.setenv("TF_CONFIG", "{'cluster'}")
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with pytest.raises(tfpar.ConfigError) as caught:
        misuse()
    with pytest.raises(SystemExit, match=str(USAGE_ERROR)):
        sys.excepthook(caught.type, caught.value, caught.tb)
    assert capsys.readouterr().err == f"error: {caught.value}\n"


@pytest.mark.parametrize("policy", ["mixed_float16", "float16"])
def test_float16_with_loss_scaling_inside(alone, policy):
    keras.config.set_dtype_policy(policy)
    optimizer = tfpar.DistributedOptimizer(
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=64.0)
    )
    model = model_of()
    history = fit(alone, optimizer, model=model, epochs=4)
    assert model.optimizer is optimizer  # Keras put no second one around it
    assert history.history["loss"][-1] < history.history["loss"][0]


def test_keras_chooses_xla_by_itself_where_there_is_a_gpu(alone, monkeypatch):
    class Gpu:
        device_type = "GPU"

    monkeypatch.setattr(tf.config, "list_physical_devices", lambda *_: [Gpu()])
    model = model_of()
    model.compile(tfpar.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    with pytest.raises(tfpar.ConfigError, match="jit_compile=False"):
        model.fit(X, Y, verbose=0, callbacks=[tfpar.BroadcastInitialWeights()])


def test_data_that_runs_out(alone):
    data = tf.data.Dataset.from_tensors((X, Y)).repeat(3)
    with pytest.raises(tfpar.ConfigError, match="worker 0 ended epoch 1 after 3 of 5 steps"):
        fit(alone, data=(data,), steps_per_epoch=5, epochs=2)


def test_stopping_at_different_times_is_noticed(alone):
    alone.others = [lambda value: value | {"stop_training": True} if isinstance(value, dict) else value]
    with pytest.raises(tfpar.ConfigError, match=r"values of stop_training, \[False, True\]"):
        fit(alone, callback=tfpar.AverageMetrics)


def test_other_names_in_the_logs_are_noticed(alone):
    alone.others = [lambda value: value | {"values": {"other": 1.0}} if isinstance(value, dict) else value]
    with pytest.raises(tfpar.ConfigError, match="worker 1 logs other, worker 0 loss"):
        fit(alone, callback=tfpar.AverageMetrics)

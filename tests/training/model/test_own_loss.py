"""Models that compute their own loss, and models that count their own metrics."""

from __future__ import annotations

import tfpar
from tests.training.model import keras_steps
from tfpar import inputs
from tfpar.config import ConfigError

import keras
import numpy as np
import pytest

layers, ops = keras.layers, keras.ops


def arrays(count: int = 24):
    x = np.random.default_rng(2).normal(size=(count, 4)).astype(np.float32)
    return x, x[:, :1] * 2


class OwnLoss(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1, kernel_regularizer="l2", kernel_initializer="ones")
        self.drift = keras.metrics.Mean(name="drift")

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        loss = ops.mean((y - y_pred) ** 2 * ops.abs(x[:, :1])) + ops.sum(self.losses)
        self.drift.update_state(loss)
        return loss if training else 10 * loss


class Extended(keras.Sequential):
    """Adds to the loss that the model was compiled with; the method is older than the argument `training`."""

    def compute_loss(self, x, y, y_pred, sample_weight=None):
        return super().compute_loss(x, y, y_pred, sample_weight) + ops.mean(ops.square(y_pred))


def own_loss() -> keras.Model:
    made = OwnLoss()
    made(np.zeros((1, 4), np.float32))
    return made


def extended() -> keras.Model:
    return Extended([keras.Input((4,)), layers.Dense(1, kernel_initializer="ones")])


def trainer(model, replicas: int = 1, loss=None, **options) -> tfpar.Trainer:
    strategy = {"strategy": "mirrored", "devices": replicas} if replicas > 1 else {"strategy": "one_device"}
    options = {"global_batch_size": 8, "shuffle": False, "jit_compile": False, **options}
    return tfpar.Trainer(model, keras.optimizers.SGD(0.05), loss, **strategy, **options)


@pytest.mark.parametrize(
    ("build", "loss", "replicas", "accumulate_steps"),
    [(own_loss, None, 1, 1), (own_loss, None, 2, 2), (extended, "mse", 1, 1), (extended, "mse", 2, 1)],
)
def test_an_overridden_loss_gives_the_numbers_of_fit(build, loss, replicas, accumulate_steps):
    x, y = arrays()
    reference = build()
    expected = keras_steps.fit(reference, keras.optimizers.SGD(0.05), loss, x, y, 8)
    made = trainer(build, replicas, loss, accumulate_steps=accumulate_steps)
    summary = made.fit(inputs.from_arrays(x, y), epochs=1)
    assert summary["train_loss"] == pytest.approx(np.mean(expected), rel=1e-4)
    for ours, theirs in zip(made.model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    evaluated = reference.evaluate(x, y, batch_size=8, verbose=0, return_dict=True)
    ours = made.evaluate(inputs.from_arrays(x, y))
    assert ours["loss"] == pytest.approx(evaluated["loss"], rel=1e-4)
    if build is own_loss:
        assert ours["drift"] == pytest.approx(evaluated["drift"], rel=1e-4)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_given_loss_replaces_that_of_a_compiled_model(replicas):
    """Also in Keras' `compute_loss`, which the override calls."""
    x, y = arrays()
    reference, ours = extended(), extended()
    expected = keras_steps.fit(reference, keras.optimizers.SGD(0.05), "mae", x, y, 8, loss_weights=[0.5])
    ours.compile("adam", "mse")
    made = trainer(ours, replicas, "mae", loss_weights=[0.5])
    assert made.fit(x, y, epochs=1)["train_loss"] == pytest.approx(np.mean(expected), rel=1e-5)
    assert made.evaluate(x, y)["loss"] == pytest.approx(reference.evaluate(x, y, batch_size=8, verbose=0), rel=1e-5)
    for one, other in zip(ours.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_an_overridden_loss_refuses_padding_in_micro_batches():
    made = trainer(own_loss, accumulate_steps=2)
    x, y = arrays(20)
    with pytest.raises(ConfigError, match=r"compute_loss.*padding.*--remainder=drop.*divides the 20 examples"):
        made.fit(inputs.from_arrays(x, y), steps=2)
    trainer(own_loss, accumulate_steps=2, remainder="drop").fit(inputs.from_arrays(x, y), steps=2)


class Total(Extended):
    def compute_loss(self, x, y, y_pred, sample_weight=None):
        return ops.sum((y - y_pred) ** 2) / ops.sum(ops.abs(y))


@pytest.mark.parametrize(("kind", "warned"), [(Extended, False), (Total, True)])
def test_a_loss_that_depends_on_the_parts_of_a_batch_is_warned_of(kind, warned, messages):
    for replicas in (1, 2):
        messages.clear()
        made = trainer(kind([keras.Input((4,)), layers.Dense(1)]), replicas, "mse")
        made.fit(*arrays(), steps=1)
        said = [line for line in messages if "compute_loss is not a mean over examples" in line]
        assert len(said) == int(warned and replicas > 1)


def test_an_overridden_loss_must_be_a_scalar():
    class Vector(Extended):
        def compute_loss(self, x, y, y_pred, sample_weight=None):
            return ops.mean((y - y_pred) ** 2, axis=-1)

    made = trainer(Vector([keras.Input((4,)), layers.Dense(1)]))
    with pytest.raises(ConfigError, match="must return a scalar"):
        made.fit(inputs.from_arrays(*arrays()), steps=1)


@pytest.mark.parametrize(
    ("later", "named"),
    [
        (lambda x, y: (x, {"a": y, "b": y}), "labels.*different structure"),
        (lambda x, y: (x[:, :3], y), r"cannot be called on .*\[3\]"),
    ],
)
def test_later_data_of_another_structure_are_refused(later, named):
    made = trainer(own_loss)
    x, y = arrays()
    made.fit(inputs.from_arrays(x, y), steps=1)
    made.evaluate(inputs.from_arrays(x[:7], y[:7]))
    with pytest.raises(ConfigError, match=named):
        made.evaluate(inputs.from_arrays(*later(x, y)))


def test_a_missing_loss_is_named_also_where_a_function_builds_the_model():
    made = trainer(lambda: keras.Sequential([keras.Input((4,)), layers.Dense(1)]))
    with pytest.raises(ConfigError, match="loss is missing"):
        made.fit(*arrays(), steps=1)


# Metrics that the model updates itself


class Counted(layers.Layer):
    def __init__(self):
        super().__init__()
        self.activity = keras.metrics.Mean(name="activity")
        self.unused = keras.metrics.Mean(name="unused")

    def call(self, x):
        self.activity.update_state(ops.abs(x))
        return x


def counting(batch_size: int | None = None) -> keras.Model:
    return keras.Sequential(
        [keras.Input((4,), batch_size=batch_size), Counted(), layers.Dense(1, kernel_initializer="ones")]
    )


@pytest.mark.parametrize(("replicas", "accumulate_steps"), [(1, 1), (2, 1), (1, 2)])
def test_metrics_that_the_model_updates_are_counted(replicas, accumulate_steps):
    x, y = arrays()
    logs: list[dict] = []

    class Note(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs_=None, logs=logs):
            logs.append(dict(logs_ or {}))

    made = trainer(counting, replicas, "mse", accumulate_steps=accumulate_steps)
    made.fit(inputs.from_arrays(x, y), epochs=1, callbacks=[Note()])
    reference = counting()
    reference.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=False)
    history = reference.fit(x, y, batch_size=8, shuffle=False, verbose=0).history
    assert logs[0]["activity"] == pytest.approx(history["activity"][0], rel=1e-5)
    assert logs[0]["activity"] == pytest.approx(np.mean(np.abs(x)), rel=1e-5)
    evaluated = made.evaluate(inputs.from_arrays(x, y))
    assert evaluated["activity"] == pytest.approx(np.mean(np.abs(x)), rel=1e-5)
    assert "unused" not in evaluated


def test_padding_refuses_own_metrics_in_training_and_leaves_them_out_of_evaluation(messages):
    made = trainer(lambda: counting(batch_size=4), 2, "mse")
    source = inputs.from_arrays(*arrays(20))
    with pytest.raises(ConfigError, match=r"updates metrics of its own \(activity, unused\).*--remainder=drop"):
        made.fit(source, steps=2)
    for _ in range(2):
        assert made.evaluate(source).keys() == {"loss", "examples"}
    assert sum("leaves out activity, unused" in line for line in messages) == 1


def test_own_metrics_that_are_no_sums_or_share_a_name_are_refused():
    class Odd(layers.Layer):
        def __init__(self, metric):
            super().__init__()
            self.metric = metric

        def call(self, x):
            return x

    class Smallest(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="smallest")
            self.least = self.add_variable((), initializer="ones", name="least")

        def reset_state(self):
            self.least.assign(1.0)

    def build(*metrics):
        return keras.Sequential([keras.Input((4,)), *map(Odd, metrics), layers.Dense(1)])

    with pytest.raises(ConfigError, match=r"'smallest' that layer 'odd' of model .* does not start at zero"):
        trainer(build(Smallest()), 1, "mse")
    with pytest.raises(ConfigError, match=r"'mean' that layer 'odd.*name of another metric"):
        trainer(build(keras.metrics.Mean(name="mean"), keras.metrics.Mean(name="mean")), 1, "mse")

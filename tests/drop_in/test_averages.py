"""The averages that the logs of all workers show."""

from __future__ import annotations

import tfpar
from tests.drop_in.alone import X, Y, fit
from tfpar.drop_in import callbacks

import keras
import numpy as np
import tensorflow as tf


class Largest(keras.metrics.Metric):
    """A metric whose state is no sum."""

    def __init__(self, name="largest"):
        super().__init__(name=name)
        self.value = self.add_variable((), "zeros")

    def update_state(self, y, y_pred, sample_weight=None):
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y)))

    def result(self):
        return self.value


class Errors(keras.metrics.MeanSquaredError):
    """A metric of Keras with two results."""

    def result(self):
        return {"mse": super().result(), "root": keras.ops.sqrt(super().result())}


def test_logs_are_those_of_all_examples_and_weights(alone):
    """The other worker has more examples, and other sample weights: each metric counts in its own way."""
    generator = np.random.default_rng(4)
    x = generator.standard_normal((64, 3)).astype(np.float32)
    y = (x.sum(axis=1, keepdims=True) > 0).astype(np.float32)
    weight = generator.uniform(0.1, 9.0, 64).astype(np.float32)
    shares = {"train": [slice(0, 24), slice(24, 40)], "validation": [slice(40, 45), slice(45, 64)]}

    def metrics():
        # The name of a metric that does not add up is a part of other names.
        plain = [
            "accuracy",
            keras.metrics.AUC(name="auc"),
            keras.metrics.F1Score(threshold=0.5),
            Largest("a"),
            Errors(),
        ]
        return {"metrics": plain, "weighted_metrics": [keras.metrics.RootMeanSquaredError(name="rms")]}

    def model_with_weights():
        keras.utils.set_random_seed(0)
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, activation="sigmoid")])

    # What the other worker has seen, from a callback of its own on a model that does not change.
    def snapshots(share):
        model, spy = model_with_weights(), callbacks.AverageMetrics()
        model.compile(keras.optimizers.SGD(0.0), "binary_crossentropy", jit_compile=False, **metrics())
        spy.set_model(model)
        seen = {}
        for split in shares:
            part = shares[split][share]
            logs = model.evaluate(x[part], y[part], sample_weight=weight[part], verbose=0, return_dict=True)
            seen[split] = spy._snapshot(), logs
        return seen

    theirs = snapshots(1)

    def other(value):
        if not isinstance(value, dict):
            return value
        logs = theirs["train"][1] | {f"val_{name}": one for name, one in theirs["validation"][1].items()}
        plain = {name: np.asarray(one).tolist() for name, one in logs.items()}
        return value | {"values": plain, "train": theirs["train"][0], "validation": theirs["validation"][0]}

    alone.others = [other]
    model = model_with_weights()
    model.compile(
        tfpar.DistributedOptimizer(keras.optimizers.SGD(0.0)), "binary_crossentropy", jit_compile=False, **metrics()
    )
    own = {split: (x[part[0]], y[part[0]], weight[part[0]]) for split, part in shares.items()}
    history = model.fit(
        *own["train"][:2],
        sample_weight=own["train"][2],
        validation_data=own["validation"],
        callbacks=[tfpar.AverageMetrics()],
        batch_size=8,
        verbose=0,
    )
    whole = model_with_weights()
    whole.compile(keras.optimizers.SGD(0.0), "binary_crossentropy", jit_compile=False, **metrics())
    for prefix, part in (("", slice(0, 40)), ("val_", slice(40, 64))):
        expected = whole.evaluate(x[part], y[part], sample_weight=weight[part], verbose=0, return_dict=True)
        for name, value in expected.items():
            np.testing.assert_allclose(history.history[prefix + name][0], value, rtol=1e-6, err_msg=prefix + name)


def test_a_model_of_its_own_loss_is_weighted_by_examples(alone):
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)
            self.mean = keras.metrics.Mean(name="own")

        def call(self, inputs):
            return self.dense(inputs)

        def train_step(self, data):
            self.mean.update_state(tf.reshape(data[1], [-1]))
            self.optimizer.apply([tf.zeros([3, 1]), tf.zeros([1])], self.trainable_variables)
            return {"own": self.mean.result(), "unknown": 1.0}

    def other(value):
        if not isinstance(value, dict):
            return value
        state = {"examples": 8.0, "state": [*value["train"]["state"][:-2], 4.0, 8.0], "results": {"own": 0.5}}
        return value | {"train": state, "values": {"own": 0.5, "unknown": 5.0}}

    alone.others = [other]
    model = Model()
    model(X)
    history = fit(alone, model=model, callback=tfpar.AverageMetrics)
    np.testing.assert_allclose(history.history["own"][0], (Y.sum() + 4.0) / 32, rtol=1e-6)
    np.testing.assert_allclose(history.history["unknown"][0], (24 * 1.0 + 8 * 5.0) / 32, rtol=1e-12)


def test_weighted_mean():
    assert callbacks.weighted_mean([1.0, 4.0], [2.0, 1.0]) == 2.0
    assert callbacks.weighted_mean([1.0, 2.0], [0.0, 0.0]) == 1.5
    assert callbacks.weighted_mean([float("nan"), 2.0], [0.0, 3.0]) == 2.0
    assert callbacks.weighted_mean([0.1, 0.1, 0.1], [1.0, 1.0, 1.0]) == 0.1


def test_ends_of_batches_may_come_out_of_order(alone, monkeypatch):
    """Keras calls them in threads: that of the last batch but one may be the last to run."""
    spy = callbacks.AverageMetrics()
    ended = []

    def swapped(batch, logs=None):
        ended.append(batch)
        if len(ended) % 4 in (1, 2):
            callbacks.AverageMetrics.on_train_batch_end(spy, batch, logs)
        elif len(ended) % 4 == 0:
            for late in (3, 2):
                callbacks.AverageMetrics.on_train_batch_end(spy, late, logs)

    monkeypatch.setattr(spy, "on_train_batch_end", swapped)
    history = fit(alone, callback=lambda: spy, epochs=2, batch_size=len(X) // 4)
    assert ended == [0, 1, 2, 3] * 2
    assert len(history.history["loss"]) == 2

"""An objective of the user's own in place of losses and metrics."""

from __future__ import annotations

import dataclasses

import tfpar
from tfpar.config import ConfigError
from tfpar.training.objective import ObjectiveSums, Totals

import keras
import numpy as np
import pytest
import tensorflow as tf


class SquaredError:
    """The mean squared error, written down by hand, and the mean output as a metric."""

    def __init__(self, model):
        self.model = model
        self.totals = Totals(
            variables=[tf.TensorSpec([]), tf.TensorSpec([])],
            results=lambda sums: {"mean_output": float(sums[0]) / max(float(sums[1]), 1.0)},
        )

    def __call__(self, params, state, batch, *, training):
        x, y, weight = batch
        outputs, state = self.model.stateless_call(params, state, x, training=training)
        error = tf.reduce_mean(tf.square(outputs - y), axis=-1)
        sums = [tf.reduce_sum(weight * outputs[:, 0]), tf.reduce_sum(weight)]
        return ObjectiveSums(tf.reduce_sum(weight * error), tf.reduce_sum(weight), state, sums)


def model():
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])


def fitted(model=model, **goal):
    random = np.random.default_rng(0)
    x = random.normal(size=[22, 3]).astype(np.float32)
    trainer = tfpar.Trainer(model, "sgd", learning_rate=0.05, global_batch_size=8, verbose=0, seed=2, **goal)
    return trainer, trainer.fit(x, x[:, :1] * 2.0, steps=9)


def test_it_trains_as_the_loss_that_it_writes_down():
    by_name, expected = fitted(loss="mse")
    by_hand, result = fitted(objective=SquaredError)
    for one, other in zip(by_name.model.get_weights(), by_hand.model.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    assert result["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-5)
    assert np.isfinite(result.history["mean_output"]).all()


def test_it_takes_the_place_of_a_loss_that_the_model_was_compiled_with():
    compiled = model()
    compiled.compile(keras.optimizers.SGD(0.05), "mae", metrics=["mse"], loss_weights=2.0)
    _, expected = fitted(objective=SquaredError)
    _, result = fitted(model=compiled, objective=SquaredError)
    assert result["params_sha256"] == expected["params_sha256"]
    assert result.history.keys() == expected.history.keys()


@pytest.mark.parametrize(
    ("goal", "said"),
    [
        ({"objective": SquaredError, "loss": "mse"}, r"objective=... determines what is minimised.*leave loss out"),
        ({"objective": "mse"}, r"objective='mse': give a function of the built model"),
        ({"objective": SquaredError(None)}, r"is an objective already.*objective=lambda model: SquaredError\(model"),
        ({"objective": lambda built: 3}, r"objective=... made 3, which is not a .*Objective"),
    ],
)
def test_what_is_no_objective_is_refused(goal, said):
    with pytest.raises(ConfigError, match=said):
        tfpar.Trainer(model, "sgd", **goal)


@pytest.mark.parametrize(
    ("sums", "said"),
    [
        (
            lambda sums: 3,
            r"objective=... \(WrongSquaredError\) returned 3. Return .*ObjectiveSums\(loss",
        ),
        (lambda sums: sums._replace(metrics=[]), r"returned 0 metrics, and its totals have 2 variables"),
    ],
)
def test_an_objective_that_returns_no_such_sums_is_refused(sums, said):
    class WrongSquaredError(SquaredError):
        def __call__(self, *arguments, **options):
            return sums(super().__call__(*arguments, **options))

    with pytest.raises(ConfigError, match=said):
        fitted(objective=WrongSquaredError)


def test_the_metrics_of_an_evaluation_are_those_that_evaluation_computes():
    class EvaluatedSquaredError(SquaredError):
        def __init__(self, built):
            super().__init__(built)
            results = self.totals.results
            self.totals = dataclasses.replace(
                self.totals, evaluation=lambda loss, count, sums: {"loss": loss / count, **results(sums)}
            )

    x = np.ones([6, 3], np.float32)
    plain, with_metrics = (
        fitted(objective=kind)[0].evaluate(x, x[:, :1]) for kind in (SquaredError, EvaluatedSquaredError)
    )
    assert "mean_output" not in plain
    assert with_metrics["loss"] == pytest.approx(plain["loss"])
    assert np.isfinite(with_metrics["mean_output"])

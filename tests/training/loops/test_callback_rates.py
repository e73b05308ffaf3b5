"""Learning rates that Keras callbacks set."""

from __future__ import annotations

import tfpar
from tests.training.loops.test_keras_callbacks import EPOCH, Recorder, plain
from tests.training.trainers import source, trainer_of
from tfpar.config import ConfigError

import keras
import numpy as np
import pytest


def test_a_lower_rate_takes_effect_under_a_schedule_and_without_one():
    """Of two epochs, the second at a rate of nearly nothing changes nearly nothing."""

    class Freeze(Recorder):
        def on_epoch_end(self, epoch, logs=None):
            super().on_epoch_end(epoch, logs)
            self.model.optimizer.learning_rate = 1e-12

    for optimizer, options in (
        ("sgd", {"schedule": "constant", "optimizer_args": "momentum=0"}),
        (keras.optimizers.SGD(0.1), {}),
    ):
        freeze = Freeze()
        trainer_of(plain, optimizer, **options).fit(source(), epochs=2, callbacks=[freeze])
        (first, second) = (call[3] for call in freeze.epoch_ends())
        for one, other in zip(first, second, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("rate", [float("nan"), -0.1])
def test_a_rate_with_which_no_step_makes_sense_is_refused(rate):
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch: rate)
    with pytest.raises(ConfigError, match=r"a Keras callback set the learning rate to .* Set a finite rate, 0 or more"):
        trainer_of().fit(source(), epochs=1, callbacks=[schedule])


def test_a_rate_of_zero_is_not_for_good():
    """Such as that of a warm-up by epochs."""
    rates: list[float] = []

    class Noted(keras.callbacks.LearningRateScheduler):
        def on_epoch_end(self, epoch, logs=None):
            rates.append(float(self.model.optimizer.learning_rate))

    trainer = trainer_of(plain, optimizer="sgd", schedule="constant", learning_rate=0.1)
    trainer.fit(source(), epochs=4, callbacks=[Noted(lambda epoch: 0.02 * epoch)])
    assert rates == pytest.approx([0.0, 0.02, 0.04, 0.06])


@pytest.mark.parametrize("has_schedule", [True, False])
def test_a_relative_rate_counts_once_in_a_resumed_epoch(has_schedule, tmp_path):
    """The resumed run calls `on_epoch_begin` again."""

    def fit(**options) -> tfpar.Trainer:
        scheduled = {"optimizer": "sgd", "schedule": "constant", "learning_rate": 0.1}
        given = scheduled if has_schedule else {"optimizer": keras.optimizers.SGD(0.1)}
        trainer = trainer_of(plain, workdir=str(tmp_path), **given, **options)
        rates = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.1 * rate if epoch == 1 else rate)
        trainer.fit(source(), steps=2 * EPOCH, callbacks=[rates])
        return trainer

    fit(stop_after=EPOCH + 1)
    assert float(fit().optimizer.learning_rate.numpy()) == pytest.approx(0.01)


@pytest.mark.parametrize("rate", [lambda: 0.1, keras.optimizers.schedules.PiecewiseConstantDecay([EPOCH], [0.1, 0.2])])
def test_a_run_whose_rate_is_a_function_resumes_within_an_epoch(rate, tmp_path):
    """There is no number in it that a callback could have set."""

    def fit(**options) -> Recorder:
        recorder = Recorder()
        trainer = trainer_of(plain, keras.optimizers.SGD(rate), workdir=str(tmp_path), **options)
        trainer.fit(source(), steps=2 * EPOCH, callbacks=[recorder])
        return recorder

    fit(stop_after=EPOCH + 1)
    assert len(fit().epoch_ends()) == 1

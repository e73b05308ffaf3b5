"""Learning rates that are schedules or functions, and the private name of Keras that reading them needs."""

from __future__ import annotations

from tfpar.config import ConfigError
from tfpar.optim import keras_rates, optimizers

import keras
import pytest


class Halving(keras.optimizers.schedules.LearningRateSchedule):
    """Without a configuration."""

    def __call__(self, step):
        return 0.5 ** keras.ops.cast(step, "float32")


def constant() -> float:
    return 0.25


def test_keras_still_keeps_the_rate_where_it_is_looked_for():
    assert [(row.owner, row.name) for row in keras_rates.INTERNALS] == [("Optimizer", "_learning_rate")]
    assert isinstance(keras.optimizers.SGD(0.1)._learning_rate, keras.Variable)
    for rate in (Halving(), constant):
        assert keras.optimizers.SGD(rate)._learning_rate is rate


@pytest.mark.parametrize("rate", [Halving(), constant, lambda: 0.25], ids=["schedule", "function", "lambda"])
def test_a_copy_shares_the_schedule(rate):
    optimizer = keras.optimizers.SGD(rate, momentum=0.75)
    before = dict(vars(optimizer))
    copy = optimizers.recreate(optimizer)
    assert vars(optimizer) == before
    assert copy.momentum == 0.75
    assert keras_rates.config_of(copy) == keras_rates.config_of(optimizer)
    assert keras_rates.config_of(copy)["learning_rate"] is rate


def test_only_schedules_with_a_configuration_can_be_compared():
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    assert keras_rates.schedule_config(decay) == keras.optimizers.schedules.serialize(decay)
    assert keras_rates.schedule_config(Halving()) is None
    assert keras_rates.schedule_config(lambda: 0.25) is None


def test_a_class_that_cannot_be_copied_says_what_it_lacks():
    class Incomplete(keras.optimizers.SGD):
        def __init__(self, factor: float, **options) -> None:
            super().__init__(**options)

    class Failing(keras.optimizers.SGD):
        def get_config(self):
            return super().get_config() | {"factor": self.factor}

    with pytest.raises(
        ConfigError, match=r"Incomplete\.from_config\(.*TypeError: .*'factor'.*Define get_config\(\) in"
    ):
        optimizers.recreate(Incomplete(2.0))
    with pytest.raises(ConfigError, match=r"Failing\(\.\.\.\): its get_config\(\) raised AttributeError: .*'factor'"):
        optimizers.recreate(Failing())

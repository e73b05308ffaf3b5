"""Arguments that Keras' methods take, given to those of `Trainer`."""

from __future__ import annotations

import inspect

import tfpar
from tests.training.trainers import source, trainer_of
from tfpar.config import ConfigError, MonitorConfig
from tfpar.training.model import keras_arguments

import pytest


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        ("fit", {"validation_data": 1}, r"Trainer\.fit takes no validation_data=: give validation=\(x, y\)\."),
        ("fit", {"batch_size": 32}, r"takes no batch_size=: the batch is Trainer\(global_batch_size="),
        ("fit", {"validations": 1}, r"takes no validations=: did you mean validation=\?"),
        ("fit", {"zzz": 1}, r"takes no zzz=: besides the examples it takes y, sample_weight, class_weight, steps"),
        ("evaluate", {"verbose": 0}, r"Trainer\.evaluate takes no verbose=: give Trainer\(verbose=\.\.\.\)\."),
        ("predict", {"zzz": 1}, r"Trainer\.predict takes no zzz=: besides the examples it takes callbacks\."),
    ],
)
def test_they_are_refused_with_what_to_write_instead(method, arguments, message):
    trainer = trainer_of()
    with pytest.raises(ConfigError, match=message):
        getattr(trainer, method)(source(), **arguments)


@pytest.mark.parametrize(("given", "value"), [("auto", 1), (True, 1), (False, 0), (2, 2)])
def test_verbose_is_what_keras_takes(given, value):
    assert MonitorConfig(verbose=given).verbose == value
    assert type(MonitorConfig(verbose=given).verbose) is int


def test_steps_that_the_run_does_not_have_are_not_profiled():
    message = r"--profile_steps=3,60: the run has 7 steps. Write e.g. --profile_steps=2,7"
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        trainer_of(profile_steps="3,60").fit(source(), steps=7)


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_what_a_method_takes_is_what_messages_say(method):
    names = list(inspect.signature(getattr(tfpar.Trainer, method)).parameters)
    assert list(keras_arguments._KNOWN[method]) == names[2:-1]

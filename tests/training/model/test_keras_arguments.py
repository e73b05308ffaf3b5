"""Arguments that Keras' methods take, given to those of `Trainer`."""

from __future__ import annotations

import inspect

import tfpar
from tests.training.trainers import SPARSE, source, trainer_of
from tfpar.config import ConfigError, MonitorConfig
from tfpar.training.model import keras_arguments

import keras
import numpy as np
import pytest
import tensorflow as tf


def arrays():
    """Inputs `[24, 6]` and labels from 0 to 2, both new."""
    return np.random.default_rng(0).normal(size=(24, 6)).astype(np.float32), np.arange(24, dtype=np.int32) % 3


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


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_examples_by_the_name_that_keras_gives_them(method):
    with pytest.raises(ConfigError, match=rf"Trainer\.{method} takes no x=: give the examples first, without a name"):
        getattr(trainer_of(), method)(x=np.ones((4, 6)))
    with pytest.raises(ConfigError, match="NoneType is not a source of examples"):
        getattr(trainer_of(), method)()


def test_the_option_on_bad_record_counts_for_arrays():
    x, y = arrays()
    x[3, 0] = np.nan
    with pytest.raises(ConfigError, match="train example 3 has NaN"):
        trainer_of().fit(x, y, steps=1)
    trainer = trainer_of(on_bad_record="skip")
    assert trainer.fit(x, y, epochs=1, validation=(x, y))["skipped_examples"] == 1
    assert trainer.evaluate(x, y)["examples"] == len(x) - 1
    assert np.isnan(trainer.predict(x)).any(axis=1).tolist() == [index == 3 for index in range(len(x))]


@pytest.mark.parametrize("on_bad_record", ["fail", "skip"])
@pytest.mark.parametrize("loss", ["mse", keras.losses.Hinge(), ["huber"]], ids=["mse", "hinge", "list"])
def test_integers_are_no_classes_where_the_loss_reads_numbers(loss, on_bad_record):
    x, y = arrays()
    numbers, results = 2 * y - 3, []
    for labels in (numbers, numbers.astype(np.float32)):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        trainer = tfpar.Trainer(
            *(model, "sgd", loss), global_batch_size=8, jit_compile=False, on_bad_record=on_bad_record
        )
        results.append(trainer.fit(x, labels, steps=3, validation=(x, labels)))
    assert results[0]["eval"] == results[1]["eval"]
    assert results[0]["params_sha256"] == results[1]["params_sha256"]


def test_negative_integers_are_bad_where_the_loss_may_read_classes():
    x, y = arrays()
    message = "example 0 has label -1, but labels must be 0 to 1, or floating point if they are no classes; 7 more"
    for loss in (SPARSE, "crossentropy", lambda y, outputs: outputs):
        with pytest.raises(ConfigError, match=message):
            trainer_of(loss=loss).fit(x, y - 1, steps=1)


def test_predictions_do_not_read_labels():
    x, y = arrays()
    trainer = trainer_of()
    assert np.array_equal(trainer.predict((x, -y)), trainer.predict(x))


def test_a_list_for_validation_is_several_inputs():
    x, y = arrays()
    message = r"\{'0': \['\(6,\)', 'float32'\], '1'.*A list is several inputs; a tuple \(x, y\) has labels"
    with pytest.raises(ConfigError, match=message):
        trainer_of().fit(x, y, steps=1, validation=[x, y])


def test_a_stream_without_examples_is_named_by_its_argument():
    nothing = tf.data.Dataset.from_tensor_slices(arrays()).take(0)
    message = r"fit\(train=\.\.\.\): dataset: the stream has no examples\. Check what"
    with pytest.raises(ConfigError, match=message):
        trainer_of().fit(nothing, epochs=1)


@pytest.mark.parametrize("method", ["evaluate", "predict"])
def test_a_checkpoint_that_was_not_read_is_noticed(method, tmp_path, caplog):
    def call(trainer):
        caplog.clear()
        getattr(trainer, method)(source())
        return "only fit reads it" in caplog.text

    options = {"workdir": str(tmp_path), "eval_every": 1}
    first = trainer_of(**options)
    assert not call(first)  # there is none
    first.fit(source(), steps=1, hooks=[tfpar.Hook(1, lambda state: print(getattr(first, method)(source())))])
    assert "only fit" not in caplog.text
    second = trainer_of(**options)
    assert call(second)
    second.fit(source(), steps=1)
    assert not call(second)


def test_an_ignored_class_is_no_matter_for_a_stream():
    x, y = arrays()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
    trainer = trainer_of(loss=loss)
    trainer.fit(lambda context: tf.data.Dataset.from_tensor_slices((x, y)).batch(8), steps=1)


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


def test_steps_of_an_evaluation_are_batches():
    assert [keras_arguments.batches("evaluate", steps) for steps in (None, 0, 3, np.int64(2))] == [0, 0, 3, 2]
    for steps in (-1, 1.5, True, "3"):
        with pytest.raises(ConfigError, match=rf"evaluate\(steps={steps!r}\): give a whole number of batches"):
            keras_arguments.batches("evaluate", steps)

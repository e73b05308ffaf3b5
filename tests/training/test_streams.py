"""A tf.data.Dataset in the Trainer: the same weights as arrays in the same order, and as Keras' own `fit`."""

from __future__ import annotations

import functools

import tfpar
from tfpar import inputs
from tfpar.config import ConfigError

import keras
import numpy as np
import pytest
import tensorflow as tf

EXAMPLES, BATCH, CLASSES = 45, 8, 3


@functools.cache
def arrays() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(EXAMPLES, 4)).astype(np.float32)
    return x, (np.abs(x).sum(axis=1) % CLASSES).astype(np.int32)


def dataset(batch: int = 5) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(arrays()).batch(batch)


def model() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(CLASSES)])


def trainer_on(replicas: int = 1, **options) -> tfpar.Trainer:
    keras.utils.set_random_seed(1)
    return tfpar.Trainer(
        model,
        keras.optimizers.SGD(0.1),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        ["accuracy"],
        strategy="one_device" if replicas == 1 else "mirrored",
        devices=replicas,
        global_batch_size=BATCH,
        uneven_batches=True,
        shuffle=False,
        jit_compile=False,
        **options,
    )


@pytest.mark.parametrize("replicas", [1, 2])
def test_trains_and_evaluates_as_arrays_and_as_keras_do(replicas):
    trainer = trainer_on(replicas)
    theirs = model()
    theirs.set_weights(trainer.model.get_weights())
    result = trainer.fit(dataset(), epochs=3, validation=dataset(7))
    other = trainer_on(replicas)
    expected = other.fit(inputs.from_arrays(*arrays()), epochs=3, validation=inputs.from_arrays(*arrays()))
    assert result["params_sha256"] == expected["params_sha256"]
    assert result["eval"] == pytest.approx(expected["eval"], rel=1e-6)
    assert result.history["loss"] == pytest.approx(expected.history["loss"], rel=1e-6)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    theirs.compile(keras.optimizers.SGD(0.1), loss, jit_compile=False)
    theirs.fit(dataset(BATCH), epochs=3, verbose=0)
    for ours, keras_own in zip(trainer.model.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(ours, keras_own, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(
        trainer.predict(dataset(3)), theirs.predict(arrays()[0], verbose=0), rtol=1e-4, atol=1e-5
    )
    assert trainer.evaluate(dataset(4))["examples"] == EXAMPLES


class Loader:
    """Batches of another library, which can be iterated again and again."""

    def __iter__(self):
        x, y = arrays()
        return iter([[x[at : at + 7], y[at : at + 7]] for at in range(0, EXAMPLES, 7)])


def test_a_loader_trains_as_arrays_do():
    trainer, other = trainer_on(), trainer_on()
    result = trainer.fit(Loader(), epochs=2, validation=Loader())
    expected = other.fit(*arrays(), epochs=2, validation=arrays())
    assert result["params_sha256"] == expected["params_sha256"]
    assert result.history["val_loss"] == pytest.approx(expected.history["val_loss"], rel=1e-6)
    np.testing.assert_array_equal(trainer.predict(Loader()), other.predict(arrays()[0]))


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_run_resumes_where_it_stopped_in_the_stream(tmp_path, replicas, caplog):
    def shuffled() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(arrays()).shuffle(30, seed=4).batch(6)

    options = {"stop_after": 0, "checkpoint_every": 4}
    whole = trainer_on(replicas, workdir=str(tmp_path / "whole"), **options).fit(shuffled(), steps=15)
    for stop_after in (7, 0):
        resumed = {**options, "stop_after": stop_after, "workdir": str(tmp_path / "cut")}
        summary = trainer_on(replicas, **resumed).fit(shuffled(), steps=15)
    assert "dataset: the stream continues where it stopped" in caplog.text
    assert summary["steps"] == 15
    assert summary["params_sha256"] == whole["params_sha256"]


def test_a_run_on_a_stream_of_unknown_length_is_resumed_without_epochs(tmp_path, caplog):
    def endless(context: tf.distribute.InputContext) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(arrays()).batch(6).repeat()

    for stop_after in (3, 0):
        trainer_on(stop_after=stop_after, checkpoint_every=3, workdir=str(tmp_path)).fit(endless, steps=6)
    assert f"resumed from step 3 of {tmp_path}" in caplog.text
    assert "(epoch" not in caplog.text


def test_a_run_on_other_replicas_starts_the_stream_again_and_says_so(tmp_path, caplog):
    for replicas, stop_after in ((1, 7), (2, 0)):
        trainer_on(replicas, stop_after=stop_after, workdir=str(tmp_path)).fit(dataset(), steps=12)
    assert "dataset: the stream starts again from its beginning (the saved run had other workers)" in caplog.text


def test_an_endless_stream_needs_steps():
    endless = dataset().repeat()
    with pytest.raises(ConfigError, match=r"has no end, so there are no epochs"):
        trainer_on().fit(endless, epochs=2)
    with pytest.raises(ConfigError, match="has no end"):
        trainer_on().fit(endless, steps=2, validation=endless)
    result = trainer_on().fit(endless, steps=12)
    assert (result["steps"], result.epoch) == (12, [0])


class Endless:
    """Batches without an end; tf.data does not know that there is none."""

    def __iter__(self):
        return iter(dataset().repeat().as_numpy_iterator())


@pytest.mark.parametrize("endless", [lambda: dataset().repeat(), Endless], ids=["dataset", "iterable"])
def test_an_evaluation_of_so_many_steps_reads_the_beginning_of_an_endless_stream(endless):
    whole, endless = dataset().take(1), endless()
    size = len(next(iter(whole))[1])
    trainer = trainer_on(eval_batch_size=size, eval_steps=1)
    result = trainer.fit(dataset(), steps=2, validation=endless)
    found = trainer.evaluate(endless, steps=1)
    assert found == trainer.evaluate(whole) == result["eval"] | {"examples": size}
    assert trainer.evaluate(endless, steps=5)["examples"] == 5 * size


def test_an_evaluation_of_an_endless_stream_needs_a_number():
    trainer, endless = trainer_on(), dataset().repeat()
    declared = inputs.from_dataset(endless, examples=3)
    assert trainer.evaluate(declared) == trainer.evaluate(dataset(3).take(1))
    with pytest.raises(ConfigError, match=r"evaluate with --eval_steps \(evaluate\(steps=\.\.\.\)\)"):
        trainer.evaluate(endless)


def test_labels_of_text_are_refused():
    x, y = arrays()
    with pytest.raises(ConfigError, match=r"the labels .* are text, which no loss takes.*StringLookup"):
        trainer_on().fit(tf.data.Dataset.from_tensor_slices((x, y.astype(str))).batch(5), epochs=1)


def test_labels_that_are_no_classes_are_left_out():
    x, y = (each.copy() for each in arrays())
    y[3], y[8] = -1, CLASSES
    source = inputs.from_arrays(x, y, num_classes=CLASSES, on_bad_record="skip")
    trainer = trainer_on(on_bad_record="skip")
    assert trainer.fit(source, epochs=1)["skipped_examples"] == 2
    y[8] = 0
    assert trainer.fit(x, y, epochs=1)["skipped_examples"] == 1


def test_a_stream_that_ends_early_or_fails_is_named():
    with pytest.raises(tfpar.TrainingError, match="does not have 99 examples"):
        trainer_on().evaluate(inputs.from_dataset(dataset(), examples=99, name="short"))
    with pytest.raises(tfpar.TrainingError, match="does not have 10 examples"):
        trainer_on().evaluate(inputs.from_dataset(dataset(), examples=10))
    with pytest.raises(ConfigError, match="has no examples"):
        trainer_on().evaluate(dataset().take(0))
    with pytest.raises(tfpar.TrainingError, match="has no examples"):
        trainer_on().fit(dataset().take(0), steps=2)
    with pytest.raises(ConfigError, match="holds its labels"):
        trainer_on().fit(dataset(), arrays()[1], steps=2)


def test_a_stream_that_cannot_be_read_is_named_whatever_comes_after_what_fails():
    broken = dataset().map(lambda x, y: (tf.debugging.check_numerics(x / 0.0, "division"), y))

    def generated():
        yield tuple(part[0] for part in arrays())
        raise KeyError("division")

    signature = tf.nest.map_structure(lambda spec: tf.TensorSpec(spec.shape[1:], spec.dtype), broken.element_spec)
    generator = tf.data.Dataset.from_generator(generated, output_signature=signature)
    for stream in (broken, broken.unbatch().batch(2), generator.batch(2)):
        with pytest.raises(tfpar.TrainingError, match=r"the stream could not be read: .*division"):
            trainer_on().fit(stream, steps=3)
        with pytest.raises(tfpar.TrainingError, match=r"the stream could not be read: .*division"):
            trainer_on().fit(stream, epochs=1)


def test_an_error_of_the_model_is_not_one_of_the_stream():
    class Division(keras.layers.Layer):
        def call(self, x):
            return tf.debugging.check_numerics(x / 0.0, "division")

    layers = [keras.Input((4,)), Division(), keras.layers.Dense(CLASSES)]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    trainer = tfpar.Trainer(keras.Sequential(layers), "sgd", loss, jit_compile=False, verbose=0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="division"):
        trainer.fit(dataset(), steps=3)


def test_a_stream_of_bad_values_ends_without_names(tmp_path):
    nan = dataset().map(lambda x, y: (x * np.nan, y))
    with pytest.raises(tfpar.TrainingError, match=r"The examples of a stream .* have no numbers"):
        trainer_on(max_bad_steps=3, workdir=str(tmp_path)).fit(nan, steps=9)

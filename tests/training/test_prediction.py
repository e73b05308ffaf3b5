"""Predictions of several replicas equal Keras' own, in the order of the examples."""

from __future__ import annotations

import tfpar
from tfpar import inputs
from tfpar.config import ConfigError

import keras
import numpy as np
import pytest

EXAMPLES = 53  # a prime: neither the batch of 10 nor 3 replicas divide it


def data() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(EXAMPLES, 6)).astype(np.float32)


def two_heads() -> keras.Model:
    x = keras.Input((6,))
    hidden = keras.layers.Dropout(0.5)(keras.layers.BatchNormalization()(keras.layers.Dense(8)(x)))
    return keras.Model(x, {"a": keras.layers.Dense(3)(hidden), "b": keras.layers.Dense(1)(hidden)})


def one_head() -> keras.Model:
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(3)])


def trainer_on(replicas: int, builder, **options) -> tfpar.Trainer:
    return tfpar.Trainer(
        builder,
        optimizer="sgd",
        loss="sparse_categorical_crossentropy",
        strategy="one_device" if replicas == 1 else "mirrored",
        devices=replicas,
        global_batch_size=10,
        uneven_batches=True,
        schedule="constant",
        **options,
    )


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("replicas", [1, 3])
def test_equals_keras_predict(replicas, jit_compile):
    trainer = trainer_on(replicas, one_head, jit_compile=jit_compile)
    x = data()
    source = inputs.from_arrays(x, np.zeros(EXAMPLES, np.int32), num_classes=3)
    expected = one_head()
    expected.set_weights(trainer.model.get_weights())
    predicted = trainer.predict(source)
    np.testing.assert_allclose(predicted, expected.predict(x, verbose=0), rtol=1e-5, atol=1e-6)
    assert np.array_equal(trainer.predict(source), predicted)  # what is compiled serves again


def test_predicts_with_the_averages_that_evaluation_uses():
    trainer = trainer_on(1, one_head, ema=0.5, jit_compile=False, learning_rate=1.0)
    x = data()
    source = inputs.from_arrays(x, np.arange(EXAMPLES, dtype=np.int32) % 3)
    trainer.fit(source, steps=3)
    expected = one_head()
    expected.set_weights([weight.numpy() for weight in trainer.program.eval_weights()])
    np.testing.assert_allclose(trainer.predict(source), expected.predict(x, verbose=0), rtol=1e-5, atol=1e-5)


def test_a_skipped_example_has_no_prediction():
    trainer = trainer_on(3, one_head, jit_compile=False)
    x = data()
    x[7] = np.nan
    source = inputs.from_arrays(x, np.zeros(EXAMPLES, np.int32), num_classes=3, on_bad_record="skip")
    predicted = trainer.predict(source)
    assert np.flatnonzero(np.isnan(predicted).any(axis=1)).tolist() == [7]
    assert np.isnan(predicted[7]).all()


def test_several_sources_are_evaluated_by_name():
    trainer = trainer_on(1, one_head, jit_compile=False)
    labels = np.arange(EXAMPLES, dtype=np.int32) % 3
    parts = {name: inputs.from_arrays(data()[part], labels[part], num_classes=3) for name, part in PARTS.items()}
    results = trainer.evaluate(parts)
    assert results == {name: trainer.evaluate(part) for name, part in parts.items()}
    assert [result["examples"] for result in results.values()] == [20, 33]
    with pytest.raises(ConfigError, match=r"fit\(validation=...\): first, rest are several data sets"):
        trainer.fit(data(), labels, steps=1, validation=parts)


PARTS = {"first": slice(0, 20), "rest": slice(20, None)}

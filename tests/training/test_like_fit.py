"""What a user of Keras' `fit` expects of the Trainer: the same numbers, in cases beside the main road."""

from __future__ import annotations

import tfpar
from tfpar.config import ConfigError

import keras
import numpy as np
import pytest

layers = keras.layers
EXAMPLES = 20


def data() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(EXAMPLES, 4)).astype(np.float32)
    return x, x.sum(axis=1, keepdims=True)


def model() -> keras.Model:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((4,)), layers.Dense(3, "tanh"), layers.Dense(1)])


def trainer(made=model, optimizer=None, loss="mse", replicas: int = 1, **options) -> tfpar.Trainer:
    devices = {"strategy": "mirrored", "devices": replicas} if replicas > 1 else {"strategy": "one_device"}
    options = {"global_batch_size": 8, "shuffle": False, "jit_compile": False, **devices, **options}
    return tfpar.Trainer(made, optimizer or keras.optimizers.SGD(0.05), loss, **options)


def reference(loss="mse", optimizer=None, made=model, **options) -> keras.Model:
    plain = made()
    plain.compile(optimizer or keras.optimizers.SGD(0.05), loss, jit_compile=False, **options)
    return plain


def assert_same(history, expected) -> None:
    assert history.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_batch_larger_than_the_data(replicas, messages):
    x, y = data()
    expected = reference().fit(x, y, batch_size=64, epochs=3, shuffle=False, verbose=0).history
    assert_same(trainer(replicas=replicas, global_batch_size=64).fit(x, y, epochs=3).history, expected)
    assert "all examples, which are fewer than --global_batch_size=64" in "\n".join(messages)


def two_inputs() -> keras.Model:
    one, other = keras.Input((4,), name="one"), keras.Input((4,), name="other")
    return keras.Model([one, other], layers.Dense(1)(layers.Concatenate()([one, other])))


def test_more_inputs_than_the_model_has_are_refused():
    x, y = data()
    message = r"has 1 input \('.*'\), but the examples have 2: .*labels in y"
    for made in (model, lambda: keras.Model(one := keras.Input((4,)), layers.Dense(1)(one))):
        for call in (lambda made: made.fit([x, x], y, steps=1), lambda made: made.evaluate([x, x], y)):
            with pytest.raises(ConfigError, match=message):
                call(trainer(made))
    with pytest.raises(ConfigError, match=r"has 2 inputs \('one', 'other'\), but the examples have 3"):
        trainer(two_inputs).fit([x, x, x], y, steps=1)
    assert trainer(two_inputs).fit([x, x], y, steps=1)["steps"] == 1


@pytest.mark.parametrize("replicas", [1, 2])
def test_gradient_accumulation_of_the_optimizer(replicas, messages):
    def accumulating() -> keras.optimizers.Optimizer:
        return keras.optimizers.SGD(0.05, momentum=0.9, clipnorm=0.5, gradient_accumulation_steps=2)

    x, y = data()
    plain = reference(optimizer=accumulating())
    expected = plain.fit(x, y, batch_size=5, epochs=3, shuffle=False, verbose=0).history
    given = accumulating()
    ours = trainer(optimizer=given, replicas=replicas, global_batch_size=10, uneven_batches=True)
    assert ours.config.train.accumulate_steps == given.gradient_accumulation_steps == 2
    assert any("taken as accumulate_steps=2" in line and "batch_size x 2" in line for line in messages)
    assert_same(ours.fit(x, y, epochs=3).history, expected)
    for one, other in zip(ours.model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_two_numbers_of_micro_batches_contradict():
    accumulating = keras.optimizers.SGD(0.05, gradient_accumulation_steps=2)
    with pytest.raises(ConfigError, match="accumulate_steps=4 contradicts gradient_accumulation_steps=2"):
        trainer(optimizer=accumulating, accumulate_steps=4)


def test_accumulation_beside_a_schedule_or_with_state_is_refused_with_the_way_out():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)
    used = keras.optimizers.SGD(0.05, gradient_accumulation_steps=2)
    used.build(model().trainable_variables)
    for accumulating in (keras.optimizers.SGD(schedule, gradient_accumulation_steps=2), used):
        with pytest.raises(ConfigError, match=r"--accumulate_steps=2.*counts in micro-batches"):
            trainer(optimizer=accumulating)


def tokens() -> tuple[np.ndarray, np.ndarray]:
    """Sequences of several lengths, with a number for each position."""
    x = np.random.default_rng(1).integers(1, 9, (EXAMPLES, 6)).astype(np.int32)
    for row in range(EXAMPLES):
        x[row, 6 - row % 5 :] = 0
    return x, x[..., None] / np.float32(4.0)


def masked() -> keras.Model:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((6,), dtype="int32"), layers.Embedding(9, 4, mask_zero=True), layers.Dense(1)])


def masked_and_plain() -> keras.Model:
    """One output with a mask, one without, and a loss that the model adds itself."""
    keras.utils.set_random_seed(0)
    x = keras.Input((6,), dtype="int32")
    hidden = layers.Embedding(9, 4, mask_zero=True)(x)
    pooled = layers.Dense(1, name="plain", activity_regularizer="l2")(layers.GlobalAveragePooling1D()(hidden))
    return keras.Model(x, {"masked": layers.Dense(1, name="masked")(hidden), "plain": pooled})


def two_labels() -> tuple[np.ndarray, dict[str, np.ndarray]]:
    x, y = tokens()
    return x, {"masked": y, "plain": y.sum(axis=1)}


def summed() -> keras.losses.Loss:
    return keras.losses.MeanSquaredError(reduction="sum")


@pytest.mark.parametrize(
    ("made", "examples", "loss"),
    [
        (model, data, summed),
        (masked, tokens, lambda: "mse"),
        (masked_and_plain, two_labels, lambda: {"masked": "mse", "plain": summed()}),
    ],
)
@pytest.mark.parametrize("replicas", [1, 2])
def test_evaluations_average_over_batches(made, examples, loss, replicas):
    """A loss of reduction "sum", or with a mask, is not a mean over examples: the size of a batch counts."""
    x, y = examples()
    plain, ours = reference(loss(), made=made), trainer(made, loss=loss(), replicas=replicas, eval_batch_size=8)
    expected = plain.fit(
        x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, validation_data=(x, y), validation_batch_size=8
    ).history
    history = ours.fit(x, y, epochs=2, validation=(x, y)).history
    for name in ("loss", "val_loss"):
        np.testing.assert_allclose(history[name], expected[name], rtol=1e-5, err_msg=name)
    evaluated = ours.evaluate(x, y)
    assert evaluated["loss"] == pytest.approx(plain.evaluate(x, y, batch_size=8, verbose=0, return_dict=True)["loss"])
    assert ours.evaluate(x, y, callbacks=[keras.callbacks.Callback()]) == pytest.approx(evaluated)


class PenaltyInTraining(layers.Layer):
    """Adds a loss in training alone, as auxiliary losses of routers do."""

    supports_masking = True

    def call(self, x, training=None):
        if training:
            self.add_loss(10.0 * keras.ops.mean(keras.ops.square(x)))
        return x


def masked_and_penalized() -> keras.Model:
    keras.utils.set_random_seed(0)
    x = keras.Input((6,), dtype="int32")
    return keras.Model(x, layers.Dense(1)(PenaltyInTraining()(layers.Embedding(9, 4, mask_zero=True)(x))))


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_loss_that_a_layer_adds_in_training_alone_beside_a_mask(replicas):
    """It is not divided by the number of unmasked positions."""
    x, y = tokens()
    plain, ours = reference(made=masked_and_penalized), trainer(masked_and_penalized, replicas=replicas)
    expected = plain.fit(x[:16], y[:16], batch_size=8, epochs=2, shuffle=False, verbose=0).history
    assert_same(ours.fit(x[:16], y[:16], epochs=2).history, expected)
    for one, other in zip(ours.model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_model_whose_only_loss_is_added_in_training_alone():
    def made() -> keras.Model:
        keras.utils.set_random_seed(0)
        x = keras.Input((4,))
        return keras.Model(x, PenaltyInTraining()(layers.Dense(3)(x)))

    x, _ = data()
    expected = reference(None, made=made).fit(x[:16], batch_size=8, epochs=2, shuffle=False, verbose=0).history
    assert_same(trainer(made, loss=None).fit(x[:16], epochs=2).history, expected)

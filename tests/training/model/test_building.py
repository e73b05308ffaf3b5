"""Whose model is trained: the given one, or a copy that it is kept in step with."""

from __future__ import annotations

import tfpar
from tests.training.harness import strategy_of
from tests.training.model import keras_steps
from tfpar import inputs
from tfpar.config import ConfigError, ExperimentConfig
from tfpar.process.exit_codes import Preempted
from tfpar.training.loops.hooks import Hook
from tfpar.training.model.building import Original, build_model
from tfpar.training.optimizer_spec import OptimizerSpec

import keras
import numpy as np
import pytest
import tensorflow as tf

layers = keras.layers


def source(count: int = 16) -> inputs.Source:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(count, 4)).astype(np.float32)
    return inputs.from_arrays(x, x[:, :1])


def model(width: int = 3) -> keras.Model:
    return keras.Sequential(
        [keras.Input((4,)), layers.Dense(width, activation="tanh", name="first"), layers.Dense(1, name="last")]
    )


def trainer(given, replicas: int = 1, optimizer="adam", **options) -> tfpar.Trainer:
    options = {"global_batch_size": 8, "jit_compile": False, "learning_rate": 0.05, **options}
    if not isinstance(optimizer, str):
        del options["learning_rate"]
    strategy = {"strategy": "mirrored", "devices": replicas} if replicas > 1 else {"strategy": "one_device"}
    return tfpar.Trainer(given, optimizer, "mse", **strategy, **options)


def same(one, other) -> bool:
    return all(map(np.array_equal, one, other))


def test_on_one_device_the_given_model_itself_is_trained(messages):
    given = model()
    start = given.get_weights()
    made = trainer(given)
    assert made.model is given
    assert "model sequential: the model itself is trained" in messages
    made.fit(source(), steps=2)
    assert not same(given.get_weights(), start)
    copy = trainer(lambda: keras.models.clone_model(given), exchange="none")
    copy.model.set_weights(start)
    copy.fit(source(), steps=2)
    assert same(given.get_weights(), copy.model.get_weights())


def test_on_several_devices_the_weights_are_written_back(messages):
    given = model()
    start = given.get_weights()
    made = trainer(given, 2)
    assert made.model is not given
    assert "model sequential: a copy is trained; fit writes its weights back into the given model" in messages
    assert same(made.model.get_weights(), start)
    made.fit(source(), steps=2)
    assert not same(given.get_weights(), start)
    assert same(given.get_weights(), made.model.get_weights())


@pytest.mark.parametrize(("replicas", "shard"), [(1, "none"), (2, "none"), (2, "optimizer")])
def test_averages_of_an_optimizer_object_are_left_as_keras_leaves_them(replicas, shard, tmp_path):
    """The next call goes on from there; with a workdir from the weights, as it is one run."""
    x = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)

    def optimizer():
        return keras.optimizers.SGD(0.002, use_ema=True, ema_momentum=0.9)

    reference, given, once = (model(256) for _ in range(3))
    options = {"shuffle": False, "shard": shard}
    for each in (given, once):
        each.set_weights(reference.get_weights())
    start = reference.get_weights()
    reference.compile(optimizer(), "mse", jit_compile=False)
    made = trainer(given, replicas, optimizer(), **options)
    for _ in range(2):
        reference.fit(x, x[:, :1], batch_size=8, shuffle=False, epochs=2, verbose=0)
        made.fit(source(), steps=4)
        for one, other in zip(given.get_weights(), reference.get_weights(), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(given.predict(x, verbose=0), made.predict(source()), rtol=1e-5, atol=1e-6)
    given.set_weights(start)
    in_parts = trainer(given, replicas, optimizer(), **options, workdir=str(tmp_path / "parts"))
    in_parts.fit(source(), steps=4)
    in_parts.fit(source(), steps=6)
    trainer(once, replicas, optimizer(), **options).fit(source(), steps=6)
    assert same(given.get_weights(), once.get_weights())


def test_a_model_that_a_function_builds_is_under_the_strategy():
    built = []
    made = trainer(lambda: built.append(model()) or built[-1], 2)
    assert made.model is built[0]


def test_a_copy_normalises_as_the_adapted_model_and_back():
    norm = layers.Normalization(name="norm")
    norm.adapt(np.float32([[10.0] * 4, [30.0] * 4]))
    given = keras.Sequential([keras.Input((4,)), norm])
    strategy = strategy_of(2)
    with strategy.scope():
        copy, original = build_model(given, strategy)
    x = np.full((1, 4), 30.0, np.float32)
    np.testing.assert_array_equal(copy(x), given(x))
    copy.get_layer("norm").adapt_mean.assign(np.full(4, 5.0))
    with original.written_back(lambda variables: [tf.constant(variable.numpy()) for variable in variables]):
        pass
    np.testing.assert_allclose(given(x), np.full((1, 4), 2.5))


@pytest.mark.parametrize("error", [Preempted, KeyboardInterrupt, ValueError])
def test_a_run_that_does_not_finish_leaves_its_weights_too(error):
    given = model()
    start = given.get_weights()
    made = trainer(given, 2)

    def stop(state):
        if state.step == 2:
            raise error

    with pytest.raises(error):
        made.fit(source(), steps=4, hooks=[Hook(1, stop)])
    assert not same(given.get_weights(), start)
    assert same(given.get_weights(), made.model.get_weights())


# What is done to the given model and optimizer


def original_of(given: keras.Model) -> Original:
    strategy = strategy_of(2)
    with strategy.scope():
        return build_model(given, strategy)[1]


def first_values(variables):
    return [tf.constant(variable.numpy()) for variable in variables]


def test_weights_that_are_assigned_to_the_given_model_are_taken_over():
    given = model()
    original = original_of(given)
    with original.written_back(first_values):
        original.copy.set_weights([value + 1 for value in given.get_weights()])
    start = given.get_weights()
    original.copy.get_layer("first").kernel.assign(np.zeros((4, 3)))
    original.take_over()
    assert not original.copy.get_layer("first").kernel.numpy().any()  # nothing was assigned to the given model
    given.get_layer("last").set_weights([np.full((3, 1), np.nan), np.ones(1)])
    original.take_over()
    assert np.isnan(original.copy.get_layer("last").kernel.numpy()).all()
    assert not original.copy.get_layer("first").kernel.numpy().any()
    given.get_layer("first").kernel.value.assign_add(np.ones((4, 3)))
    original.take_over()
    np.testing.assert_array_equal(original.copy.get_layer("first").kernel, start[0] + 1)


def trained(made: keras.Model) -> list[str]:
    return ["/".join(variable.path.split("/")[-2:]) for variable in made.trainable_variables]


def test_single_frozen_weights_are_frozen_in_the_copy():
    given = model()
    given.get_layer("first").kernel.trainable = False
    original = original_of(given)
    assert trained(original.copy) == trained(given) == ["first/bias", "last/kernel", "last/bias"]
    given.get_layer("first").kernel.trainable = True
    given.get_layer("last").bias.trainable = False
    original.take_over()
    assert trained(original.copy) == trained(given) == ["first/kernel", "first/bias", "last/kernel"]


def test_before_each_call_weights_and_rate_are_those_of_the_given_objects():
    given, optimizer = model(), keras.optimizers.SGD(0.1)
    made = trainer(given, 2, optimizer, exchange="none")
    given.get_layer("last").set_weights([np.zeros((3, 1)), np.ones(1)])
    optimizer.learning_rate = 0.25
    made._refresh()
    assert same(made.model.get_weights(), given.get_weights())
    assert float(made.optimizer.learning_rate.numpy()) == 0.25
    made.optimizer.learning_rate = 0.125  # as a callback does
    made._refresh()
    assert float(made.optimizer.learning_rate.numpy()) == 0.125
    given.get_layer("first").trainable = False
    made._refresh()  # makes another optimizer
    optimizer.learning_rate = 0.5
    made._refresh()
    assert float(made.optimizer.learning_rate.numpy()) == 0.5


def built_for(given: keras.Model, others: list | None = None) -> keras.optimizers.Optimizer:
    """A copy, for the copy of a model, of an optimizer that has state for some weights."""
    optimizer = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5), momentum=0.9)
    optimizer.build(given.trainable_variables if others is None else others)
    for number, variable in enumerate(optimizer.variables):
        variable.assign(np.full(variable.shape, number + 3))
    strategy = strategy_of(2)
    with strategy.scope():
        copy, _ = build_model(given, strategy)
        return OptimizerSpec.of(optimizer, {}).build(ExperimentConfig(), copy.trainable_variables)


def test_the_state_of_an_optimizer_that_has_made_steps_is_taken_over():
    copy = built_for(model())
    assert int(copy.iterations.numpy()) == 3
    assert [variable.numpy().flat[0] for variable in copy.variables] == [3, 4, 5, 6, 7]
    assert float(copy.learning_rate) == pytest.approx(0.1 * 0.5**3)


def test_state_for_other_weights_is_not_taken_over_and_said_to_be_lost(messages):
    copy = built_for(model(), model().trainable_variables)
    assert int(copy.iterations.numpy()) == 0
    assert any("begins anew, without the state of its 3 steps" in message for message in messages)


# Freezing between two calls of fit


@pytest.mark.parametrize("replicas", [1, 2])
def test_layers_are_frozen_and_unfrozen_between_two_fits(replicas):
    given = model()
    made = trainer(given, replicas)
    made.fit(source(), steps=2)
    frozen, moments = given.get_layer("first").get_weights(), slots(made)

    given.get_layer("first").trainable = False
    made.fit(source(), steps=2)
    assert same(given.get_layer("first").get_weights(), frozen)
    assert len(made.optimizer.variables) == len(moments) - 4  # two moments of kernel and bias
    assert int(made.optimizer.iterations.numpy()) == 4
    assert slots(made).keys() < moments.keys()
    head = given.get_layer("last").get_weights()

    given.get_layer("first").trainable = True
    given.get_layer("last").trainable = False
    made.fit(source(), steps=2)
    assert not same(given.get_layer("first").get_weights(), frozen)
    assert same(given.get_layer("last").get_weights(), head)
    assert made.evaluate(source())["examples"] == 16


def slots(made: tfpar.Trainer) -> dict[str, np.ndarray]:
    return {variable.path: np.array(variable.numpy()) for variable in made.optimizer.variables}


def test_the_optimizer_keeps_its_state_of_the_other_weights():
    """As a momentum that goes on: the numbers are Keras' with the same optimizer and the first layer frozen."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(16, 4)).astype(np.float32)
    given, reference = model(), model()
    reference.set_weights(given.get_weights())
    data = inputs.from_arrays(x, x[:, :1])
    made = trainer(given, optimizer=keras.optimizers.SGD(0.05, momentum=0.9), global_batch_size=16)
    made.fit(data, steps=2)
    given.get_layer("first").trainable = False
    made.fit(data, steps=1)

    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    for frozen in (False, False, True):
        reference.get_layer("first").trainable = not frozen
        keras_steps.fit(reference, optimizer, "mse", x, x[:, :1], 16)
    for ours, theirs in zip(given.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_moving_averages_of_unfrozen_weights_start_at_the_weights():
    given = model()
    given.get_layer("first").trainable = False
    made = trainer(given, ema=0.5)
    made.fit(source(), steps=2)
    frozen = given.get_layer("first").get_weights()
    given.get_layer("first").trainable = True
    made.fit(source(), steps=1)
    averages = dict(zip([w.path for w in given.trainable_variables], made.program.eval_weights(), strict=True))
    for before, weight in zip(frozen, given.get_layer("first").weights, strict=True):
        np.testing.assert_allclose(averages[weight.path].numpy(), (before + weight.numpy()) / 2, rtol=1e-5, atol=1e-7)


def test_a_checkpoint_of_other_trainable_weights_is_refused_by_name(tmp_path):
    given = model()
    made = trainer(given, workdir=str(tmp_path))
    made.fit(source(), steps=2)
    given.get_layer("first").trainable = False
    with pytest.raises(ConfigError, match=r"optimizer/.*first.*Were layers frozen or unfrozen.*another workdir"):
        made.fit(source(), steps=4)


def test_nothing_left_to_train_is_refused():
    given = model()
    made = trainer(given)
    given.trainable = False
    with pytest.raises(ConfigError, match="no trainable weights"):
        made.fit(source(), steps=1)


# What is refused by name


def test_a_layer_is_no_model():
    with pytest.raises(ConfigError, match=r"is a layer, not a model.*keras\.Sequential"):
        trainer(layers.Dense(3))


def test_stateful_layers_are_refused():
    inputs_ = keras.Input(batch_shape=(8, 4, 2))
    given = keras.Model(inputs_, layers.Dense(1)(layers.LSTM(3, stateful=True, name="memory")(inputs_)))
    with pytest.raises(ConfigError, match=r"layers memory of model .* stateful=True.*stateful=False.*Distributed"):
        trainer(given)


def test_rematerialised_layers_are_refused():
    with keras.RematScope(mode="full"):
        given = model()
    with pytest.raises(ConfigError, match=r"keras\.RematScope.*would not learn.*outside the scope"):
        trainer(given)


class OwnStep(keras.Sequential):
    def train_step(self, data):
        return {}


class OwnFunction(keras.Sequential):
    def make_train_function(self, force=False):
        return None


class OwnTestStep(keras.Sequential):
    def test_step(self, data):
        return {}

    def predict_step(self, data):
        return {}

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return {}


@pytest.mark.parametrize(("kind", "name"), [(OwnStep, "train_step"), (OwnFunction, "make_train_function")])
def test_an_overridden_training_loop_is_refused(kind, name):
    given = kind([keras.Input((4,)), layers.Dense(1)])
    with pytest.raises(ConfigError, match=f"{kind.__name__} overrides {name}.*tfpar.DistributedOptimizer"):
        trainer(given)


def test_an_overridden_evaluation_is_warned_of(messages):
    trainer(OwnTestStep([keras.Input((4,)), layers.Dense(1)]))
    for name in ("test_step", "predict_step", "compute_metrics"):
        assert any(line.startswith("WARNING") and f"OwnTestStep overrides {name}" in line for line in messages)

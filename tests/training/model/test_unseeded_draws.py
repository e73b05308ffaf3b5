"""Random numbers without a seed: others in each step, a function of `--seed`, the same however a model is divided."""

from __future__ import annotations

import tfpar
from tests.training.harness import Steps
from tfpar.config import ConfigError
from tfpar.optim import keras_calls
from tfpar.optim.keras_draws import current_draws, draw_state, drawing
from tfpar.training.model.call import call_model, recording

import keras
import numpy as np
import pytest
import tensorflow as tf

layers, ops = keras.layers, keras.ops
FEATURES, EXAMPLES = 64, 8


class Noisy(layers.Layer):
    def call(self, x, training=False):
        return x + keras.random.normal(ops.shape(x))


class InBranch(layers.Layer):
    """Draws in both branches, and then again."""

    def compute_output_shape(self, shape):
        return shape

    def call(self, x):
        def draw():
            return keras.random.normal(ops.shape(x))

        return x + ops.cond(ops.sum(x) > 1e9, lambda: 2 * draw(), draw) - draw()


def noisy() -> keras.Model:
    """Draws twice in one layer and once in another, each on its own stage of a pipeline of two."""
    keras.utils.set_random_seed(1)
    hidden = [layers.Dense(FEATURES, "tanh", name=f"dense_{name}") for name in "ab"]
    return keras.Sequential([keras.Input((FEATURES,)), hidden[0], InBranch(), hidden[1], Noisy(), layers.Dense(2)])


def plain() -> keras.Model:
    return keras.Sequential([keras.Input((FEATURES,)), layers.Dense(2)])


def noise() -> keras.Model:
    return keras.Sequential([keras.Input((2,)), layers.Dense(1, kernel_initializer="zeros"), Noisy()])


def data(features: int = FEATURES):
    x = np.random.default_rng(0).normal(size=(EXAMPLES, features)).astype(np.float32)
    return x, x[:, :2]


def trainer(build, loss="mse", rate=0.1, **options) -> tfpar.Trainer:
    options = {
        "strategy": "one_device",
        "global_batch_size": EXAMPLES,
        "jit_compile": "false",
        "shuffle": False,
        **options,
    }
    return tfpar.Trainer(build, keras.optimizers.SGD(rate), loss, exchange="none", **options)


def losses(first: int, count: int, replicas: int = 1, seed: int = 0) -> list[float]:
    """The losses of steps from the first one on, on examples that have no part in them."""
    run = Steps(replicas, noise, seed=seed, jit_compile=False)
    run.done = first
    share = [(np.zeros((4, 2)), np.zeros((4, 1)), np.ones(4))] * replicas
    run.optimizer.learning_rate = 0.0
    return [float(run.run([share]).loss[0]) for _ in range(count)]


def test_each_step_draws_other_numbers_which_depend_on_the_seed_alone():
    found = losses(0, 3)
    assert len(set(found)) == 3
    assert losses(1, 2) == found[1:]  # as after a resume
    assert losses(0, 1, seed=1)[0] not in found


def test_replicas_draw_different_numbers():
    (alone,), (both,) = losses(0, 1), losses(0, 1, replicas=2)
    assert both != pytest.approx(alone, rel=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        {"recompute": "dense|branch|noisy"},
        {"strategy": "mirrored", "devices": 2, "mesh": "pipeline:2"},
        {"strategy": "mirrored", "devices": 2, "mesh": "model:2"},
    ],
)
def test_the_numbers_are_those_of_one_device(options):
    def weights(**options):
        built = trainer(noisy, **options)
        built.fit(*data(), steps=2)
        return built.fit(*data(), steps=3).history["loss"]

    np.testing.assert_allclose(weights(**options), weights(), rtol=1e-5)


def test_a_loss_and_an_augmentation_draw_in_each_replica():
    def loss(y, outputs):
        return ops.mean(ops.square(y - outputs + keras.random.normal(ops.shape(outputs))), axis=-1)

    def history(seed):
        keras.utils.clear_session(free_memory=False)  # Keras' own generator would be made in the trace
        options = {"strategy": "mirrored", "devices": 2, "augmentation": Noisy(), "seed": seed}
        built = trainer(plain, loss, rate=0.0, **options)
        return built.fit(*data(), epochs=3, validation=data()).history["loss"]

    found = history(0)
    assert len(set(found)) == 3
    assert history(0) == found != history(1)


def test_branches_and_what_follows_draw_different_numbers():
    layer = InBranch()
    model = keras.Sequential([keras.Input((1000,)), layer])

    @tf.function
    def outputs(x):
        with drawing(tf.constant([1, 2])):
            return call_model(model, [], [], x, training=True).outputs

    for sign, deviation in ((-1.0, 2), (1e7, 5)):
        found = outputs(tf.fill([1, 1000], sign)).numpy() - sign
        assert np.var(found) == pytest.approx(deviation, rel=0.3)  # of two normal ones; of one and twice another


def test_calls_continue_where_the_previous_one_stopped():
    model = keras.Sequential([keras.Input((3,)), Noisy()])
    x = tf.zeros([1, 3])

    def call():
        return call_model(model, [], [], x, training=True).outputs.numpy()

    np.testing.assert_array_equal(call(), call())  # as in an evaluation
    with drawing(tf.constant([1, 2])):
        state = current_draws().outside
        first, second, outside = call(), call(), keras.random.normal([1, 3])
        assert current_draws().outside.numpy().tolist() == [state.numpy()[0], state.numpy()[1] + 3]
    assert len({tuple(each[0]) for each in (first, second, np.asarray(outside))}) == 3


def test_the_generator_of_keras_is_left_alone():
    keras.random.normal([1])
    generator = keras_calls.unseeded_generator()
    before = generator.state.numpy()
    with drawing(tf.constant([1, 2])):
        keras.random.normal([1])
    assert keras_calls.unseeded_generator() is generator
    np.testing.assert_array_equal(generator.state.numpy(), before)
    assert draw_state() is draw_state()


class Counting(layers.Layer):
    def call(self, x):
        elsewhere["calls"].assign_add(1.0)
        return x


elsewhere: dict[str, keras.Variable] = {}


def test_a_variable_of_no_layer_is_refused_in_training():
    elsewhere["calls"] = keras.Variable(0.0, name="calls")
    model = keras.Sequential([keras.Input((3,)), Counting()])
    call_model(model, [], [], tf.zeros([1, 3]), training=False)
    with (
        pytest.raises(ConfigError, match="variable 'calls', which is of none of its layers"),
        tf.GradientTape() as tape,
        recording(tape),
    ):
        call_model(model, [], [], tf.zeros([1, 3]), training=True)
    assert elsewhere["calls"].numpy() == 0

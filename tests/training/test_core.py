"""Loss and gradients as a pure function."""

from __future__ import annotations

from tests.graphs import ancestors
from tfpar.inputs import Weighted
from tfpar.training.core import Core
from tfpar.training.model.support import own_metrics
from tfpar.training.objective import Goal, LocalSums, Objective, ObjectiveSums, SupervisedObjective, Totals
from tfpar.training.pipeline.step import PipelineCore

import keras
import numpy as np
import pytest
import tensorflow as tf

SPARSE = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def classifier(**layer_options) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(8, activation="tanh", **layer_options),
            keras.layers.Dense(3),
        ]
    )


def batch(accumulate_steps: int, size: int, weight=None):
    generator = np.random.default_rng(1)
    x = tf.constant(generator.normal(size=(accumulate_steps, size, 5)), tf.float32)
    y = tf.constant(generator.integers(0, 3, (accumulate_steps, size)), tf.int32)
    weight = np.ones((accumulate_steps, size)) if weight is None else np.asarray(weight)
    return x, y, tf.constant(weight, tf.float32)


def core_of(model: keras.Model, loss, metrics=(), **goal) -> Core:
    return Core(model, SupervisedObjective(model, Goal(loss, metrics=list(metrics), **goal)))


def bind(core: Core, data) -> Core:
    """Assigns losses and metrics, for labels like those of `data`."""
    if isinstance(core.objective, SupervisedObjective):
        x, y, _ = data
        y = y.y if isinstance(y, Weighted) else y
        core.objective.bind(*tf.nest.map_structure(lambda part: tf.TensorSpec(part.shape[2:], part.dtype), (x, y)))
    return core


def values(variables):
    return [tf.convert_to_tensor(variable.value) for variable in variables]


def run(core: Core, data, seed=(0, 0), jit=False):
    model = bind(core, data).model
    function = tf.function(core.accumulate, jit_compile=jit, autograph=False)
    return function(
        values(model.trainable_variables),
        values(model.non_trainable_variables),
        data,
        tf.constant(seed, tf.int32),
        None,
    )


@pytest.mark.parametrize("jit", [False, True])
def test_sums_equal_keras_loss_times_count(jit):
    model = classifier()
    core = core_of(model, SPARSE, ["sparse_categorical_accuracy"])
    x, y, _ = data = batch(1, 12)
    sums = run(core, data, jit=jit)
    with tf.GradientTape() as tape:
        loss = SPARSE(y[0], model(x[0]))
    gradients = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
    assert sums.count.numpy() == 12
    np.testing.assert_allclose(sums.loss, 12 * loss, rtol=1e-5)
    for ours, theirs in zip(sums.gradients, gradients, strict=True):
        np.testing.assert_allclose(ours, 12 * theirs, rtol=1e-4, atol=1e-5)
    accuracy = keras.metrics.SparseCategoricalAccuracy()(y[0], model(x[0]))
    assert core.metric_results([part.numpy() for part in sums.metrics])["sparse_categorical_accuracy"] == pytest.approx(
        float(accuracy)
    )


def test_padding_contributes_nothing():
    core = core_of(classifier(), SPARSE, ["sparse_categorical_accuracy"])
    x, y, weight = batch(1, 8, [[1, 1, 1, 1, 1, 0, 0, 0]])
    padded = run(core, (x, y, weight))
    cut = run(core, (x[:, :5], y[:, :5], weight[:, :5]))
    assert padded.count.numpy() == 5
    for one, other in zip(tf.nest.flatten(padded), tf.nest.flatten(cut), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


class LogMeter(keras.layers.Layer):
    """Counts the logarithm of its inputs, which of padding is no number."""

    def __init__(self):
        super().__init__()
        self.meter = keras.metrics.Mean(name="log")

    def call(self, x):
        self.meter.update_state(keras.ops.log(x))
        return x


def test_own_metrics_of_padding_alone_are_zero():
    model = keras.Sequential([keras.Input((5,)), LogMeter(), keras.layers.Dense(3)])
    objective = SupervisedObjective(model, Goal(SPARSE))
    core = Core(model, objective, model_metrics=own_metrics(model))
    x, y, weight = batch(1, 8, np.zeros((1, 8)))
    data = tf.zeros_like(x), y, weight
    assert [part.numpy().tolist() for part in run(core, data).metrics] == [0.0, 0.0]
    evaluated = core.evaluate(values(model.trainable_variables), values(model.non_trainable_variables), data)
    assert [part.numpy().tolist() for part in evaluated.metrics] == [0.0, 0.0]


@pytest.mark.parametrize("jit", [False, True])
def test_micro_batches_add_up_to_the_whole_batch(jit):
    core = core_of(classifier(), SPARSE, ["sparse_categorical_accuracy"])
    whole = batch(1, 12)
    micro = tf.nest.map_structure(lambda part: tf.reshape(part, [4, 3, *part.shape[2:]]), whole)
    for one, other in zip(
        tf.nest.flatten(run(core, whole, jit=jit)), tf.nest.flatten(run(core, micro, jit=jit)), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_regularisation_counts_once_per_example():
    model = classifier(kernel_regularizer=keras.regularizers.L2(0.1))
    x, y, _ = data = batch(1, 6)
    sums = run(core_of(model, SPARSE), data)
    expected = SPARSE(y[0], model(x[0])) + 0.1 * tf.reduce_sum(model.trainable_variables[0].value ** 2)
    np.testing.assert_allclose(sums.loss / sums.count, expected, rtol=1e-5)


def test_dropout_depends_on_the_seed_alone():
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dropout(0.5), keras.layers.Dense(3)])
    core = core_of(model, SPARSE)
    data = batch(1, 64)
    first, again, other = (run(core, data, seed).loss.numpy() for seed in ((1, 2), (1, 2), (1, 3)))
    assert first == again
    assert first != other


def test_micro_batches_draw_different_dropout():
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dropout(0.5), keras.layers.Dense(3)])
    core = core_of(model, SPARSE)
    x, y, weight = batch(1, 64)
    twice = run(core, tuple(tf.concat([part, part], axis=0) for part in (x, y, weight))).loss.numpy()
    once = run(core, (x, y, weight)).loss.numpy()
    assert abs(twice - 2 * once) > 1e-3


def test_loss_scale_is_exact_for_powers_of_two():
    core = core_of(classifier(), SPARSE)
    data = batch(1, 12)
    params = values(bind(core, data).model.trainable_variables)
    plain = core.accumulate(params, [], data, tf.constant([0, 0]), None)
    scaled = core.accumulate(params, [], data, tf.constant([0, 0]), tf.constant(1024.0))
    for one, other in zip(plain.gradients, scaled.gradients, strict=True):
        np.testing.assert_array_equal(one * 1024.0, other)
    assert plain.loss == scaled.loss


def test_embedding_gradients_are_dense():
    model = keras.Sequential([keras.Input((4,), dtype="int32"), keras.layers.Embedding(7, 3), keras.layers.Dense(7)])
    core = core_of(model, SPARSE)
    tokens = tf.constant([[[1, 2, 3, 1], [0, 0, 6, 5]]], tf.int32)
    sums = run(core, (tokens, tokens, tf.ones([1, 2])))
    assert sums.gradients[0].shape == (7, 3)
    np.testing.assert_array_equal(sums.gradients[0][4], np.zeros(3))  # row 4 does not occur


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("accumulate_steps", [1, 3])
def test_any_objective_is_differentiated_and_added_up(accumulate_steps, jit):
    """A policy gradient: labels are a dict, and positions count instead of examples."""
    model = keras.Sequential([keras.Input((4,), dtype="int32"), keras.layers.Embedding(5, 3)])

    def loss_and_weight(logits, y, weight):
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y["action"], logits) * y["advantage"]
        counted = y["mask"] * weight[..., None]
        return tf.reduce_sum(losses * counted), tf.reduce_sum(counted)

    class PolicyGradient:
        totals = Totals()

        def __call__(self, params, state, batch, *, training, scales=None):
            x, y, weight = batch
            logits, state = model.stateless_call(params, state, x, training=training)
            return ObjectiveSums(*loss_and_weight(logits, y, weight), list(state), [])

    objective: Objective = PolicyGradient()
    generator = np.random.default_rng(5)
    shape = (accumulate_steps, 6, 4)
    x = tf.constant(generator.integers(0, 5, shape), tf.int32)
    y = {
        "action": tf.constant(generator.integers(0, 3, shape), tf.int32),
        "advantage": tf.constant(generator.normal(size=shape), tf.float32),
        "mask": tf.constant(generator.integers(0, 2, shape), tf.float32),
    }
    weight = tf.constant([[1.0, 1.0, 1.0, 1.0, 0.0, 0.0]] * accumulate_steps)
    sums = run(Core(model, objective), (x, y, weight), jit=jit)

    table = model.trainable_variables[0].value
    with tf.GradientTape() as tape:
        loss, count = loss_and_weight(tf.gather(table, x), y, weight)
    assert sums.count == count
    np.testing.assert_allclose(sums.loss, loss, rtol=1e-5)
    np.testing.assert_allclose(
        sums.gradients[0], tf.convert_to_tensor(tape.gradient(loss, table)), rtol=1e-4, atol=1e-5
    )


def accumulated(core: Core, accumulate_steps: int) -> tuple[tf.Graph, LocalSums]:
    """The graph of `accumulate`, and its results in it."""
    data = batch(accumulate_steps, 4)
    kept = []
    weights = values(bind(core, data).model.trainable_variables)

    @tf.function(autograph=False)
    def function(params, data):
        kept.append(core.accumulate(params, [], data, tf.constant([0, 0]), None))
        return kept[0].gradients

    return function.get_concrete_function(weights, data).graph, kept[0]


def products_by_micro_batch(graph: tf.Graph) -> list[list[tf.Operation]]:
    """The first matrix product of each micro-batch, and the last, in the order in which they were traced."""
    products = [operation for operation in graph.get_operations() if operation.type == "MatMul"]
    count = len(products) // 3
    return [[products[number], products[number + count - 1]] for number in range(0, len(products), count)]


@pytest.mark.parametrize("in_turn", [True, False])
def test_unrolled_micro_batches_run_in_turn(in_turn):
    """Each waits for the gradients of the one before, so that only one has activations; stages of a pipeline do not."""
    model = classifier()
    kind = Core if in_turn else PipelineCore
    core = kind(model, SupervisedObjective(model, Goal(SPARSE, metrics=[])), unrolls=True)
    graph, sums = accumulated(core, 3)
    (_, last), (second, _), _ = products_by_micro_batch(graph)
    assert (last in ancestors(second)) == in_turn
    assert last in ancestors(sums.gradients[0].op) | ancestors(sums.gradients[2].op)


def test_a_pipeline_adds_gradients_as_they_come():
    """Each sum waits for another of the micro-batch before: otherwise TensorFlow would add them all at the end."""
    model = classifier()
    core = PipelineCore(model, SupervisedObjective(model, Goal(SPARSE, metrics=[])), unrolls=True)
    _, sums = accumulated(core, 3)
    for gradient in sums.gradients:
        assert gradient.op.type == "AddV2"
        assert gradient.op.control_inputs

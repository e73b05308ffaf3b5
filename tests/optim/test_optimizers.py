"""The pure update of optimizers against Keras' own."""

from __future__ import annotations

from tests.optim.updates import assert_close, gradients_of, matrices_and_vectors, run_pure, values_of
from tfpar.config import ConfigError, OptimizerConfig
from tfpar.optim import optimizers
from tfpar.optim.pure_update import pure_apply

import keras
import numpy as np
import pytest
import tensorflow as tf

# Those of the configuration, and others a user may hand to the Trainer; Nadam overrides what the pure update replaces.
KINDS = {
    **optimizers.OPTIMIZERS,
    "nadam": keras.optimizers.Nadam,
    "adafactor": keras.optimizers.Adafactor,
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", sorted(KINDS))
def test_pure_apply_equals_apply(name, jit):
    """Weights and every optimizer variable after 5 updates, with decay, clipping and an EMA that is written back.

    Under XLA in float64: in float32 its `pow` differs from TensorFlow's in the last bit, and Adam's `1 - 0.999**t`
    makes 1e-5 of that. The formula is what is compared. Muon knows float32 alone (Keras 3.15.1 does not cast its rate).
    """
    double = jit and name != "muon"
    model = matrices_and_vectors("float64" if double else "float32")
    arguments = {"learning_rate": 0.01, "weight_decay": 0.1, "global_clipnorm": 1.5}
    average = {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 3}
    plain, pure = (KINDS[name](**arguments, **average) for _ in range(2))
    plain.build(model.trainable_variables)
    pure.build(model.trainable_variables)
    start = values_of(model.trainable_variables)
    gradients = gradients_of(model.trainable_variables)
    before = [variable.numpy() for variable in pure.variables]

    params, variables = run_pure(pure, start, gradients, jit=jit)
    for variable, value in zip(pure.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)  # pure: nothing was assigned
    for gradient in gradients:
        plain.apply(gradient, model.trainable_variables)

    rtol = 1e-6 if double or not jit else 1e-4
    assert_close(params, model.trainable_variables, rtol)
    assert_close(variables, plain.variables, rtol)
    assert int(variables[0]) == len(gradients)
    assert all(float(tf.reduce_max(tf.abs(new - old))) > 0 for new, old in zip(params, start, strict=True))


@pytest.mark.parametrize("name", sorted(optimizers.OPTIMIZERS))
def test_pure_apply_in_replicas_with_local_copies(name):
    """Two replicas under XLA inside `strategy.run`, each on copies of its own, in step with one plain optimizer."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    config = OptimizerConfig(optimizer=name, learning_rate=0.01, weight_decay=0.1, ema=0.9)
    dtype = "float32" if name == "muon" else "float64"
    with strategy.scope():
        model = matrices_and_vectors(dtype)
        optimizer = optimizers.build(config, global_batch_size=8)
        optimizer.build(model.trainable_variables)
    everything = [*model.trainable_variables, *optimizer.variables]
    count = len(model.trainable_variables)
    compiled = tf.function(lambda v, p, g, r: pure_apply(optimizer, v, p, g, r), jit_compile=True, autograph=False)

    def replica_step(gradients):
        replica = int(tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group))
        copies = [strategy.experimental_local_results(variable.value)[replica] for variable in everything]
        values = [copy.read_value() for copy in copies]
        new = compiled(values[count:], values[:count], gradients, tf.constant(0.02))
        for copy, value in zip(copies, tf.nest.flatten(new), strict=True):
            copy.assign(value)

    @tf.function(autograph=False)
    def step(gradients):
        strategy.run(replica_step, args=(gradients,))

    alone = matrices_and_vectors(dtype)
    reference = optimizers.build(config, global_batch_size=8)
    reference.build(alone.trainable_variables)
    reference.learning_rate = 0.02
    for gradients in gradients_of(alone.trainable_variables):
        step(gradients)
        reference.apply(gradients, alone.trainable_variables)

    for variable, expected in zip(everything, [*alone.trainable_variables, *reference.variables], strict=True):
        copies = strategy.experimental_local_results(variable.value)
        np.testing.assert_array_equal(copies[0].numpy(), copies[1].numpy())
        if variable is not optimizer._learning_rate:
            tolerance = {"rtol": 1e-6, "atol": 1e-12} if dtype == "float64" else {"rtol": 1e-4, "atol": 1e-6}
            np.testing.assert_allclose(copies[0].numpy(), expected.numpy(), **tolerance)
    assert float(tf.convert_to_tensor(optimizer.learning_rate)) == pytest.approx(0.01)  # the substitute leaves no trace


def test_compiled_update_reads_no_variable():
    model = matrices_and_vectors()
    optimizer = keras.optimizers.AdamW(weight_decay=0.1, use_ema=True)
    optimizer.build(model.trainable_variables)
    function = tf.function(lambda v, p, g: pure_apply(optimizer, v, p, g), jit_compile=True, autograph=False)
    concrete = function.get_concrete_function(
        values_of(optimizer.variables), values_of(model.trainable_variables), gradients_of(model.trainable_variables)[0]
    )
    assert concrete.captured_inputs == []
    assert not any("Collective" in op.type or "VariableOp" in op.type for op in concrete.graph.get_operations())


@pytest.mark.parametrize("clip", [{"clipnorm": 0.5}, {"clipvalue": 0.1}, {"global_clipnorm": 0.7}])
def test_clipping_of_the_optimizer_is_kept(clip):
    model = matrices_and_vectors()
    optimizer, unclipped = keras.optimizers.SGD(0.1, **clip), keras.optimizers.SGD(0.1)
    for each in (optimizer, unclipped):
        each.build(model.trainable_variables)
    start, gradients = values_of(model.trainable_variables), gradients_of(model.trainable_variables, 1)
    params, _ = run_pure(optimizer, start, gradients)
    free, _ = run_pure(unclipped, start, gradients)
    optimizer.apply(gradients[0], model.trainable_variables)
    assert_close(params, model.trainable_variables)
    assert any(float(tf.reduce_max(tf.abs(a - b))) > 1e-4 for a, b in zip(params, free, strict=True))


def test_learning_rate_none_follows_the_optimizers_own_schedule():
    model = matrices_and_vectors()
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, decay_steps=1, decay_rate=0.5)
    optimizer = keras.optimizers.SGD(schedule)
    optimizer.build(model.trainable_variables)
    start = values_of(model.trainable_variables)
    ones = [[tf.ones_like(value) for value in start]] * 3
    params, _ = run_pure(optimizer, start, ones, jit=True)
    assert_close(params, [value - (0.1 + 0.05 + 0.025) for value in start], rtol=1e-5)
    assert float(tf.convert_to_tensor(optimizer.learning_rate)) == pytest.approx(0.1)


def test_missing_sparse_and_constrained():
    """No gradient leaves a parameter alone, IndexedSlices count as dense, constraints are kept."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((2,), dtype="int32"),
            keras.layers.Embedding(5, 3, name="table"),
            keras.layers.Dense(2, name="positive", kernel_constraint="non_neg"),
        ]
    )
    table, kernel, bias = start = values_of(model.trainable_variables)
    optimizer = keras.optimizers.SGD(0.5)
    optimizer.build(model.trainable_variables)
    sparse = tf.IndexedSlices(tf.ones([2, 3]), tf.constant([1, 1]), tf.constant([5, 3]))
    params, _ = pure_apply(optimizer, values_of(optimizer.variables), start, [sparse, tf.zeros_like(kernel), None])
    expected = table.numpy()
    expected[1] -= 1.0  # two slices of one row add up
    np.testing.assert_allclose(params[0], expected, rtol=1e-6)
    np.testing.assert_array_equal(params[1], np.maximum(kernel, 0.0))
    assert float(tf.reduce_min(kernel)) < 0
    np.testing.assert_array_equal(params[2], bias)


def test_schedule_free_follows_its_paper():
    """Defazio et al. 2024. Keras 3.15 on TensorFlow reads z after overwriting it; a tensor cannot change meanwhile."""
    variable = keras.Variable(np.float32([1.0]))
    optimizer = keras.optimizers.ScheduleFreeAdamW(0.1, beta_1=0.9, beta_2=0.99, warmup_steps=0)
    optimizer.build([variable])
    params, _ = run_pure(optimizer, [tf.constant([1.0])], [[tf.constant([g])] for g in (1.0, -2.0, 0.5)])
    x = z = 1.0
    second = 0.0
    for step, gradient in enumerate((1.0, -2.0, 0.5), start=1):
        second = 0.99 * second + 0.01 * gradient**2
        z -= 0.1 * gradient / (np.sqrt(second / (1 - 0.99**step)) + optimizer.epsilon)
        x = (1 - 1 / step) * x + z / step
    np.testing.assert_allclose(params[0], [0.1 * z + 0.9 * x], rtol=1e-5)


def test_pure_apply_refuses_what_does_not_fit():
    model = matrices_and_vectors()
    optimizer = keras.optimizers.SGD(0.1)
    start = values_of(model.trainable_variables)
    with pytest.raises(ValueError, match="build"):
        pure_apply(optimizer, [], start, start)
    optimizer.build(model.trainable_variables)
    with pytest.raises(ValueError, match="gradients holds 1 tensors"):
        pure_apply(optimizer, values_of(optimizer.variables), start, start[:1])


@pytest.mark.parametrize(
    ("optimizer", "way_out"),
    [
        (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)), "precision=mixed_float16"),
        (lambda: keras.optimizers.SGD(0.1, loss_scale_factor=8.0), "precision=mixed_float16"),
        (lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=4), "accumulate_steps=4"),
        (
            lambda: keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1))),
            "single optimizer",
        ),
        (lambda: "sgd", "not a Keras 3 optimizer"),
    ],
)
def test_check_refuses_with_a_way_out(optimizer, way_out):
    with pytest.raises(ConfigError, match=way_out):
        optimizers.check_optimizer(optimizer())


# A copy for other weights


@pytest.mark.parametrize(
    ("make", "slots"), [(keras.optimizers.Adam, [4, 5]), (lambda: keras.optimizers.SGD(momentum=0.9), [3])]
)
def test_each_weight_keeps_its_own_state_where_paths_repeat(make, slots):
    left, right = (keras.Variable(np.zeros(3), name="kernel") for _ in range(2))
    optimizer = make()
    optimizer.build([left, right])
    for number, variable in enumerate(optimizer.variables):
        variable.assign(np.full(variable.shape, number))
    copy = optimizers.recreate_for(optimizer, [right])
    assert [variable.numpy().flat[0] for variable in copy.variables] == [0, 1, *slots]


def test_averages_that_were_kept_go_on_and_others_begin_at_the_weights():
    left, right = (keras.Variable(np.ones(3), name="kernel") for _ in range(2))
    optimizer = keras.optimizers.SGD(use_ema=True)
    optimizer.build([right])
    optimizers.ema_variables(optimizer)[0].assign(np.full(3, 7.0))
    copy = optimizers.recreate_for(optimizer, [left, right])
    assert [average.numpy()[0] for average in optimizers.ema_variables(copy)] == [1.0, 7.0]

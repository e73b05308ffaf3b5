"""Optimizers: the pure update against Keras' own, LARS against its paper, and what `build` promises."""

from __future__ import annotations

from tfpar.config import ConfigError, OptimizerConfig
from tfpar.optim import optimizers
from tfpar.optim.lars import LARS
from tfpar.optim.pure_update import pure_apply

import keras
import numpy as np
import pytest
import tensorflow as tf

STEPS = 5
# Those of the configuration, and others a user may hand to the Trainer; Nadam overrides what the pure update replaces.
KINDS = {
    **optimizers.OPTIMIZERS,
    "nadam": keras.optimizers.Nadam,
    "adafactor": keras.optimizers.Adafactor,
}


def _model(dtype: str = "float32") -> keras.Model:
    """Matrices, vectors, a norm, an embedding and an output: every case the optimizers tell apart."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            layers.Embedding(7, 6, name="embedding", dtype=dtype),
            layers.Flatten(dtype=dtype),
            layers.Dense(8, name="hidden", dtype=dtype),
            layers.LayerNormalization(name="norm", dtype=dtype),
            layers.Dense(3, name="logits", dtype=dtype),
        ]
    )


def _gradients(variables, steps=STEPS):
    generator = np.random.default_rng(0)
    return [[tf.constant(generator.normal(size=v.shape), dtype=v.dtype) for v in variables] for _ in range(steps)]


def _values(variables):
    return [tf.convert_to_tensor(variable) for variable in variables]


def _run_pure(optimizer, params, gradients, *, jit=False, learning_rate=None):
    """Several pure updates. Returns the new parameters and optimizer variables."""
    function = lambda v, p, g: pure_apply(optimizer, v, p, g, learning_rate)  # noqa: E731
    if jit:
        function = tf.function(function, jit_compile=True, autograph=False)
    variables = _values(optimizer.variables)
    for gradient in gradients:
        params, variables = function(variables, params, gradient)
    return params, variables


def _assert_close(actual, expected, rtol=1e-6):
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a.numpy(), e.numpy(), rtol=rtol, atol=1e-7 if a.dtype == "float32" else 1e-12)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", sorted(KINDS))
def test_pure_apply_equals_apply(name, jit):
    """Weights and every optimizer variable after 5 updates, with decay, clipping and an EMA that is written back.

    Under XLA in float64: in float32 its `pow` differs from TensorFlow's in the last bit, and Adam's `1 - 0.999**t`
    makes 1e-5 of that. The formula is what is compared. Muon knows float32 alone (Keras 3.15.1 does not cast its rate).
    """
    double = jit and name != "muon"
    model = _model("float64" if double else "float32")
    arguments = {"learning_rate": 0.01, "weight_decay": 0.1, "global_clipnorm": 1.5}
    average = {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 3}
    plain, pure = (KINDS[name](**arguments, **average) for _ in range(2))
    plain.build(model.trainable_variables)
    pure.build(model.trainable_variables)
    start = _values(model.trainable_variables)
    gradients = _gradients(model.trainable_variables)
    before = [variable.numpy() for variable in pure.variables]

    params, variables = _run_pure(pure, start, gradients, jit=jit)
    for variable, value in zip(pure.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)  # pure: nothing was assigned
    for gradient in gradients:
        plain.apply(gradient, model.trainable_variables)

    rtol = 1e-6 if double or not jit else 1e-4
    _assert_close(params, model.trainable_variables, rtol)
    _assert_close(variables, plain.variables, rtol)
    assert int(variables[0]) == STEPS
    assert all(float(tf.reduce_max(tf.abs(new - old))) > 0 for new, old in zip(params, start, strict=True))


@pytest.mark.parametrize("name", sorted(optimizers.OPTIMIZERS))
def test_pure_apply_in_replicas_with_local_copies(name):
    """Two replicas under XLA inside `strategy.run`, each on copies of its own, in step with one plain optimizer."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    config = OptimizerConfig(optimizer=name, learning_rate=0.01, weight_decay=0.1, ema=0.9)
    dtype = "float32" if name == "muon" else "float64"
    with strategy.scope():
        model = _model(dtype)
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

    alone = _model(dtype)
    reference = optimizers.build(config, global_batch_size=8)
    reference.build(alone.trainable_variables)
    reference.learning_rate = 0.02
    for gradients in _gradients(alone.trainable_variables):
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
    model = _model()
    optimizer = keras.optimizers.AdamW(weight_decay=0.1, use_ema=True)
    optimizer.build(model.trainable_variables)
    function = tf.function(lambda v, p, g: pure_apply(optimizer, v, p, g), jit_compile=True, autograph=False)
    concrete = function.get_concrete_function(
        _values(optimizer.variables), _values(model.trainable_variables), _gradients(model.trainable_variables)[0]
    )
    assert concrete.captured_inputs == []
    assert not any("Collective" in op.type or "VariableOp" in op.type for op in concrete.graph.get_operations())


@pytest.mark.parametrize("clip", [{"clipnorm": 0.5}, {"clipvalue": 0.1}, {"global_clipnorm": 0.7}])
def test_clipping_of_the_optimizer_is_kept(clip):
    model = _model()
    optimizer, unclipped = keras.optimizers.SGD(0.1, **clip), keras.optimizers.SGD(0.1)
    for each in (optimizer, unclipped):
        each.build(model.trainable_variables)
    start, gradients = _values(model.trainable_variables), _gradients(model.trainable_variables, 1)
    params, _ = _run_pure(optimizer, start, gradients)
    free, _ = _run_pure(unclipped, start, gradients)
    optimizer.apply(gradients[0], model.trainable_variables)
    _assert_close(params, model.trainable_variables)
    assert any(float(tf.reduce_max(tf.abs(a - b))) > 1e-4 for a, b in zip(params, free, strict=True))


def test_learning_rate_none_follows_the_optimizers_own_schedule():
    model = _model()
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, decay_steps=1, decay_rate=0.5)
    optimizer = keras.optimizers.SGD(schedule)
    optimizer.build(model.trainable_variables)
    start = _values(model.trainable_variables)
    ones = [[tf.ones_like(value) for value in start]] * 3
    params, _ = _run_pure(optimizer, start, ones, jit=True)
    _assert_close(params, [value - (0.1 + 0.05 + 0.025) for value in start], rtol=1e-5)
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
    table, kernel, bias = start = _values(model.trainable_variables)
    optimizer = keras.optimizers.SGD(0.5)
    optimizer.build(model.trainable_variables)
    sparse = tf.IndexedSlices(tf.ones([2, 3]), tf.constant([1, 1]), tf.constant([5, 3]))
    params, _ = pure_apply(optimizer, _values(optimizer.variables), start, [sparse, tf.zeros_like(kernel), None])
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
    params, _ = _run_pure(optimizer, [tf.constant([1.0])], [[tf.constant([g])] for g in (1.0, -2.0, 0.5)])
    x = z = 1.0
    second = 0.0
    for step, gradient in enumerate((1.0, -2.0, 0.5), start=1):
        second = 0.99 * second + 0.01 * gradient**2
        z -= 0.1 * gradient / (np.sqrt(second / (1 - 0.99**step)) + optimizer.epsilon)
        x = (1 - 1 / step) * x + z / step
    np.testing.assert_allclose(params[0], [0.1 * z + 0.9 * x], rtol=1e-5)


def test_pure_apply_refuses_what_does_not_fit():
    model = _model()
    optimizer = keras.optimizers.SGD(0.1)
    start = _values(model.trainable_variables)
    with pytest.raises(ValueError, match="build"):
        pure_apply(optimizer, [], start, start)
    optimizer.build(model.trainable_variables)
    with pytest.raises(ValueError, match="gradients holds 1 tensors"):
        pure_apply(optimizer, _values(optimizer.variables), start, start[:1])


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


# --- build -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(optimizers.OPTIMIZERS))
def test_build_trains_and_survives_saving(name):
    config = OptimizerConfig(optimizer=name, learning_rate=0.02, base_batch_size=32)
    optimizer = optimizers.build(config, global_batch_size=64)
    optimizers.check_optimizer(optimizer)
    assert float(tf.convert_to_tensor(optimizer.learning_rate)) == pytest.approx(0.04)
    # What loading a .keras file calls. keras.optimizers.deserialize does not know Lamb (Keras 3.15.1).
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(optimizer))
    assert type(again) is optimizers.OPTIMIZERS[name]
    assert again.get_config() == optimizer.get_config()
    # A least-squares problem: every optimizer must get closer.
    generator = np.random.default_rng(0)
    x = tf.constant(generator.normal(size=(64, 5)), tf.float32)
    y = x @ tf.constant(generator.normal(size=(5, 5)), tf.float32)
    weight = keras.Variable(np.eye(5, dtype="float32"), name="kernel")
    optimizer.build([weight])
    value, variables = tf.convert_to_tensor(weight), _values(optimizer.variables)

    def loss_and_gradient(value):
        with tf.GradientTape() as tape:
            tape.watch(value)
            loss = tf.reduce_mean((x @ value - y) ** 2)
        return loss, tape.gradient(loss, value)

    first, _ = loss_and_gradient(value)
    for _ in range(60):
        _, gradient = loss_and_gradient(value)
        (value,), variables = pure_apply(optimizer, variables, [value], [gradient])
    last, _ = loss_and_gradient(value)
    # LARS moves a layer by a thousandth of its norm at a rate of 1, and by 0.04 of that here. Adadelta begins with
    # steps of the square root of its epsilon.
    assert float(last) < (0.999 if name in ("lars", "adadelta") else 0.6) * float(first)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "lamb", "lion", "muon"])
def test_weight_decay_is_decoupled_and_excludes_by_path(name):
    """With zero gradients, decayed weights shrink by exactly 1 - rate x decay and excluded ones keep their bits."""
    model = _model()
    for variable in model.trainable_variables:
        variable.assign(tf.ones(variable.shape))
    config = OptimizerConfig(optimizer=name, learning_rate=0.5, weight_decay=0.1)
    optimizer = optimizers.build(config, global_batch_size=1)
    optimizer.build(model.trainable_variables)
    start = _values(model.trainable_variables)
    zeros = [tf.zeros_like(value) for value in start]
    pure, _ = _run_pure(optimizer, start, [zeros])
    optimizer.apply(zeros, model.trainable_variables)  # Keras' own path excludes the same
    for variable, value in zip(model.trainable_variables, pure, strict=True):
        expected = 0.95 if variable.name == "kernel" else 1.0
        np.testing.assert_allclose(value, np.full(value.shape, expected), rtol=1e-6, err_msg=variable.path)
        np.testing.assert_allclose(variable.numpy(), value, rtol=1e-6)
    names = [variable.name for variable in model.trainable_variables]
    assert names == ["embeddings", "kernel", "bias", "gamma", "beta", "kernel", "bias"]


def _decayed(optimizer, model):
    """Names of the variables that an update with zero gradients moves."""
    optimizer.build(model.trainable_variables)
    start = [tf.ones(variable.shape) for variable in model.trainable_variables]
    params, _ = _run_pure(optimizer, start, [[tf.zeros_like(value) for value in start]])
    moved = [float(tf.reduce_max(tf.abs(new - old))) > 0 for new, old in zip(params, start, strict=True)]
    return {v.name for v, is_moved in zip(model.trainable_variables, moved, strict=True) if is_moved}


def test_a_recreated_optimizer_keeps_its_exclusions():
    config = OptimizerConfig(optimizer="adamw", learning_rate=0.5, weight_decay=0.1)
    first = optimizers.build(config, global_batch_size=1)
    assert _decayed(first, _model()) == {"kernel"}
    assert _decayed(optimizers.recreate(first), _model()) == {"kernel"}
    named = keras.optimizers.AdamW(0.5, weight_decay=0.1)
    named.exclude_from_weight_decay(var_names=["bias", "kernel"])
    assert _decayed(optimizers.recreate(named), _model()) == {"embeddings", "gamma", "beta"}
    listed = keras.optimizers.AdamW(0.5, weight_decay=0.1)
    listed.exclude_from_weight_decay(var_list=_model().trainable_variables[:1])
    with pytest.raises(ConfigError, match="var_names"):
        optimizers.recreate(listed)


def test_nothing_is_excluded_where_nothing_is_asked():
    model = _model()
    config = OptimizerConfig(optimizer="sgd", learning_rate=0.5, weight_decay=0.1, weight_decay_exclude="")
    optimizer = optimizers.build(config, global_batch_size=1)
    optimizer.build(model.trainable_variables)
    start = [tf.ones(variable.shape) for variable in model.trainable_variables]
    params, _ = _run_pure(optimizer, start, [[tf.zeros_like(value) for value in start]])
    for value in params:
        np.testing.assert_allclose(value, np.full(value.shape, 0.95), rtol=1e-6)


def test_a_decay_that_reaches_nothing_is_refused():
    """'--weight_decay_exclude=net' would silently switch the decay of a model named 'subnet' off."""
    config = OptimizerConfig(optimizer="sgd", weight_decay=0.1, weight_decay_exclude="sequential")
    optimizer = optimizers.build(config, global_batch_size=1)
    with pytest.raises(ConfigError, match="weight_decay_exclude"):
        optimizer.build(_model().trainable_variables)


def test_muon_orthogonalises_hidden_matrices_only():
    model = _model()
    optimizer = optimizers.build(OptimizerConfig(optimizer="muon", learning_rate=1.0), global_batch_size=1)
    optimizer.build(model.trainable_variables)
    start = _values(model.trainable_variables)
    params, _ = _run_pure(optimizer, start, _gradients(model.trainable_variables, 1))
    for variable, old, new in zip(model.trainable_variables, start, params, strict=True):
        update = (old - new).numpy()
        if variable.path.endswith("hidden/kernel"):
            singular = np.linalg.svd(update, compute_uv=False) / (0.2 * np.sqrt(max(update.shape)))
            assert singular.min() > 0.5
            assert singular.max() < 1.3
        else:  # Adam's first update is the sign of the gradient
            np.testing.assert_allclose(np.abs(update), 1.0, rtol=1e-3, err_msg=variable.path)


def test_muon_leaves_attention_heads_to_its_own_rule():
    """The output pattern must not take 'multi_head_attention' for a head."""
    import re

    for path, is_output in [
        ("head/kernel", True),
        ("lm/logits/kernel", True),
        ("classifier_1/kernel", True),
        ("block_0/multi_head_attention/query/kernel", False),
        ("block_0/attention_output/kernel", False),
    ]:
        assert bool(re.search(optimizers.MUON_OUTPUT_LAYERS, path)) is is_output, path


def test_ema_weights_follow_the_formula():
    model = _model()
    optimizer = optimizers.build(OptimizerConfig(optimizer="sgd", learning_rate=0.1, ema=0.8), global_batch_size=1)
    optimizer.build(model.trainable_variables)
    expected = None
    for gradients in _gradients(model.trainable_variables, 4):
        optimizer.apply(gradients, model.trainable_variables)
        now = [variable.numpy() for variable in model.trainable_variables]
        # The first weights are the first average (Keras), then 0.8 x average + 0.2 x weights.
        expected = now if expected is None else [0.8 * e + 0.2 * n for e, n in zip(expected, now, strict=True)]
    for average, value in zip(optimizers.ema_variables(optimizer), expected, strict=True):
        np.testing.assert_allclose(average.numpy(), value, rtol=1e-5, atol=1e-7)


def test_no_ema_no_weights():
    model = _model()
    optimizer = optimizers.build(OptimizerConfig(optimizer="sgd"), global_batch_size=1)
    optimizer.build(model.trainable_variables)
    assert optimizers.ema_variables(optimizer) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "adamv"}, r"--optimizer='adamv'.*'adamw'"),
        ({"optimizer": "adam", "optimizer_args": "beta1=0.8"}, r"--optimizer_args='beta1'.*'beta_1'"),
        ({"optimizer": "adam", "optimizer_args": "learning_rate=1.0"}, "governed by --learning_rate"),
        ({"optimizer": "sgd", "optimizer_args": "use_ema=true"}, "governed by --ema"),
        ({"optimizer": "sgd", "optimizer_args": "gradient_accumulation_steps=2"}, "governed by --accumulate_steps"),
        ({"optimizer": "sgd", "optimizer_args": "momentum=7"}, "sgd refuses it"),
        ({"optimizer": "lars", "optimizer_args": "momentum=1"}, "lars refuses it"),
    ],
)
def test_build_names_flag_value_and_way_out(options, message):
    with pytest.raises(ConfigError, match=message):
        optimizers.build(OptimizerConfig(**options), global_batch_size=8)


def test_arguments_reach_the_optimizer():
    config = OptimizerConfig(optimizer="sgd", optimizer_args="momentum=0,nesterov=true,clipvalue=2")
    optimizer = optimizers.build(config, global_batch_size=8)
    assert (optimizer.momentum, optimizer.nesterov, optimizer.clipvalue) == (0.0, True, 2)
    assert optimizers.build(OptimizerConfig(optimizer="sgd"), global_batch_size=8).momentum == 0.9


# --- LARS ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nesterov", [False, True])
def test_lars_follows_algorithm_1(nesterov):
    """You et al. 2017 in plain numpy; the bias takes momentum SGD."""
    generator = np.random.default_rng(3)
    kernel, bias = generator.normal(size=(3, 4)).astype("float32"), generator.normal(size=4).astype("float32")
    variables = [keras.Variable(kernel, name="kernel"), keras.Variable(bias, name="bias")]
    optimizer = LARS(2.0, momentum=0.8, nesterov=nesterov, trust_coefficient=0.01, epsilon=0.0, weight_decay=0.05)
    optimizer.build(variables)
    gradients = _gradients(variables)
    params, _ = _run_pure(optimizer, _values(variables), gradients)

    expected = []
    for index, (weight, decay) in enumerate([(kernel, 0.05), (bias, 0.0)]):
        velocity = np.zeros_like(weight)
        for step in gradients:
            gradient, norm = step[index].numpy(), np.linalg.norm
            trust = 0.01 * norm(weight) / (norm(gradient) + decay * norm(weight)) if decay else 1.0
            direction = 2.0 * trust * (gradient + decay * weight)
            velocity = 0.8 * velocity + direction
            weight = weight - (0.8 * velocity + direction if nesterov else velocity)
        expected.append(tf.constant(weight))
    _assert_close(params, expected, rtol=1e-5)


def test_lars_step_does_not_depend_on_the_gradients_length():
    """What the trust ratio is for: the first step's length is rate x trust_coefficient x |w|."""
    value = np.random.default_rng(0).normal(size=(6, 5)).astype("float32")
    lengths = []
    for scale in (1e-3, 1.0, 1e3):
        variable = keras.Variable(value, name="kernel")
        optimizer = LARS(1.0, trust_coefficient=0.01)
        optimizer.build([variable])
        (new,), _ = _run_pure(optimizer, _values([variable]), [[tf.constant(scale * value[::-1].copy())]])
        lengths.append(np.linalg.norm(new - value))
    np.testing.assert_allclose(lengths, 0.01 * np.linalg.norm(value), rtol=1e-5)


def test_lars_starts_from_zero_weights():
    variable = keras.Variable(np.zeros((2, 2), "float32"), name="kernel")
    optimizer = LARS(0.1, momentum=0.0)
    optimizer.build([variable])
    (new,), _ = _run_pure(optimizer, _values([variable]), [[tf.ones([2, 2])]])
    np.testing.assert_allclose(new, -0.1 * np.ones((2, 2)), rtol=1e-6)

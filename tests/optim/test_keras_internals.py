"""A canary for every private name of Keras that tfpar relies on, and a search for names that are used elsewhere."""

from __future__ import annotations

import ast
import functools
import inspect
import pathlib

from tfpar.optim import keras_calls, keras_compile, keras_deferred, keras_internals, keras_rates
from tfpar.optim.keras_internals import INTERNALS, OptimizerView, view_of

import keras
import numpy as np
import pytest
import tensorflow as tf

MODULES = (keras_internals, keras_compile, keras_calls, keras_deferred, keras_rates)
ALL = [internal for module in MODULES for internal in module.INTERNALS]
ROOT = pathlib.Path(__file__).parents[2]


def two_variables() -> list[keras.Variable]:
    return [
        keras.Variable(np.ones((2, 2), np.float32), name="kernel"),
        keras.Variable(np.ones(2, np.float32), name="bias"),
    ]


def built(variables, kind=keras.optimizers.SGD, **options) -> keras.optimizers.Optimizer:
    optimizer = kind(0.5, **options)
    optimizer.build(variables)
    return optimizer


def ones(variables):
    return [tf.ones(variable.shape, variable.dtype) for variable in variables]


def recorder(*names):
    """An SGD class that notes calls of these methods, with their arguments, and then does what Keras does."""
    calls = []

    def noting(name):
        def method(self, *arguments):
            calls.append((name, arguments))
            return getattr(super(kind, self), name)(*arguments)

        return method

    kind = type("Noting", (keras.optimizers.SGD,), {name: noting(name) for name in names})
    return kind, calls


# Canaries: one function for each (owner, name)


def optimizer_trainable_variables():
    variables = two_variables()
    assert [id(each) for each in built(variables)._trainable_variables] == [id(each) for each in variables]


def get_variable_index():
    optimizer = built(variables := two_variables())
    assert [optimizer._get_variable_index(each) for each in variables] == [0, 1]
    assert [optimizer._get_variable_index(each.value) for each in variables] == [0, 1]


def distribution_strategy():
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    with strategy.scope():
        assert keras.optimizers.SGD()._distribution_strategy is strategy
    assert keras.optimizers.SGD()._distribution_strategy is not strategy


def moving_averages():
    optimizer = built(variables := two_variables(), use_ema=True)
    averages = optimizer._model_variables_moving_average
    assert [tuple(each.shape) for each in averages] == [tuple(each.shape) for each in variables]
    assert all(any(each is other for other in optimizer.variables) for each in averages)


def update_moving_averages():
    optimizer = built(variables := two_variables(), use_ema=True, ema_momentum=0.9)
    optimizer._update_model_variables_moving_average(optimizer._trainable_variables)
    for variable, average in zip(variables, optimizer._model_variables_moving_average, strict=True):
        np.testing.assert_array_equal(average.numpy(), variable.numpy())  # the first weights are the first average


def use_weight_decay():
    optimizer = keras.optimizers.SGD(weight_decay=0.1)
    variables = two_variables()
    optimizer.exclude_from_weight_decay(var_list=variables[1:])
    optimizer.build(variables)
    assert [optimizer._use_weight_decay(each) for each in variables] == [True, False]
    assert [optimizer._use_weight_decay(each.value) for each in variables] == [True, False]


def exclude_from_weight_decay():
    optimizer = keras.optimizers.SGD(weight_decay=0.1)
    assert not getattr(optimizer, "_exclude_from_weight_decay", None)
    optimizer.exclude_from_weight_decay(var_list=two_variables()[1:])
    assert optimizer._exclude_from_weight_decay


def exclude_from_weight_decay_pattern():
    optimizer = keras.optimizers.SGD(weight_decay=0.1)
    assert getattr(optimizer, "_exclude_from_weight_decay_pattern", None) is None
    optimizer.exclude_from_weight_decay(var_names=["bias", "gamma"])
    assert sorted(optimizer._exclude_from_weight_decay_pattern.pattern.split("|")) == ["bias", "gamma"]


def distributed_tf_update_step():
    optimizer = built(variables := two_variables())
    pairs = [(gradient, each.value) for gradient, each in zip(ones(variables), variables, strict=True)]
    optimizer._distributed_tf_update_step(tf.distribute.get_strategy(), pairs, 0.25)
    np.testing.assert_array_equal(variables[0].numpy(), np.full((2, 2), 0.75))
    np.testing.assert_array_equal(variables[1].numpy(), np.full(2, 0.75))


class Block(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential([keras.layers.Dense(2, name="inside")])

    def call(self, x):
        return self.inner(x)


def flatten_layers():
    wrapped = keras.layers.TimeDistributed(keras.layers.Dense(2, name="wrapped"))
    model = keras.Sequential([keras.Input((3, 4)), wrapped, Block()])
    names = [layer.name for layer in model._flatten_layers()]
    assert {"wrapped", "inside", model.name} <= set(names)
    assert model.name not in [layer.name for layer in model._flatten_layers(include_self=False)]


def layer_trainable_variables():
    layer = keras.layers.BatchNormalization()
    layer.build((None, 3))
    layer.trainable = False
    assert layer.trainable_variables == []
    assert [variable.name for variable in layer._trainable_variables] == ["gamma", "beta"]


def own_metrics():
    layer, model = keras.layers.Layer(), keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    layer.count = keras.metrics.Sum()
    assert layer._metrics == [layer.count]
    model.compile("sgd", "mse", metrics=["mae"])
    model.mean = keras.metrics.Mean()
    assert model._metrics == [model.mean]


def call_has_training_arg():
    class Without(keras.layers.Layer):
        def call(self, x):
            return x

    assert keras.layers.Dropout(0.5)._call_has_training_arg is True
    assert not Without()._call_has_training_arg


def replaced_value():
    """A variable whose value is made anew, of another shape, is what its layer reads and what optimizers look at."""
    layer = keras.layers.Dense(4, use_bias=False)
    layer.build((None, 2))
    assert layer.kernel._ndim == 2
    keras_internals.replace_value(layer.kernel, np.full((2, 3), 2.0, np.float32))
    assert isinstance(layer.kernel._value, tf.Variable)
    assert tuple(layer.kernel.shape) == tuple(layer.kernel._shape) == (2, 3)
    assert layer.call(tf.ones([1, 2])).numpy().tolist() == [[4.0, 4.0, 4.0]]
    optimizer = built([layer.kernel], keras.optimizers.Adam)
    assert [tuple(slot.shape) for slot in optimizer.variables if len(slot.shape)] == [(2, 3), (2, 3)]


def remat_mode():
    assert keras.layers.Dense(1)._remat_mode is None
    with keras.RematScope(mode="full"):
        assert keras.layers.Dense(1)._remat_mode.mode == "full"


def metric_direction():
    """What Keras' own callbacks go by."""
    assert keras.metrics.SparseCategoricalAccuracy()._direction == "up"
    assert keras.metrics.MeanAbsoluteError()._direction == "down"
    assert not hasattr(keras.metrics.Mean(), "_direction")
    source = inspect.getsource(keras.callbacks.EarlyStopping._set_monitor_op)
    assert '_direction == "up"' in source


def keras_mask():
    model = keras.Sequential([keras.Input((3,), dtype="int32"), keras.layers.Embedding(5, 2, mask_zero=True)])
    assert model(tf.constant([[1, 0, 2]]))._keras_mask is not None
    plain = keras.Sequential([keras.Input((3,), dtype="int32"), keras.layers.Embedding(5, 2)])
    assert getattr(plain(tf.constant([[1, 0, 2]])), "_keras_mask", None) is None


def same_rank():
    y, outputs = keras_internals.squeeze_or_expand_to_same_rank(tf.zeros([5]), tf.zeros([5, 1]))
    assert y.shape.rank == outputs.shape.rank
    y, outputs = keras_internals.squeeze_or_expand_to_same_rank(tf.zeros([5, 1]), tf.zeros([5]))
    assert y.shape.rank == outputs.shape.rank
    y, outputs = keras_internals.squeeze_or_expand_to_same_rank(tf.zeros([5]), tf.zeros([5, 3]))
    assert (y.shape.rank, outputs.shape.rank) == (1, 2)


def seed_generator_state():
    state = keras.layers.Dropout(0.5, seed=3).seed_generator.state
    assert (state.name, tuple(state.shape)) == ("seed_generator_state", (2,))


def on_two_replicas(function):
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=tf.distribute.ReductionToOneDevice())
    return float(strategy.experimental_local_results(strategy.run(function))[0])


def scale_for_distribution():
    loss = keras.losses.MeanSquaredError()

    def unscaled():
        with keras_internals.unscaled_losses():
            return loss(tf.zeros([2, 1]), tf.ones([2, 1]))

    assert on_two_replicas(lambda: loss(tf.zeros([2, 1]), tf.ones([2, 1]))) == 0.5
    assert on_two_replicas(unscaled) == 1.0


def unscale_for_distribution():
    def unscaled():
        with keras_internals.unscaled_losses():
            return keras_internals.keras_loss.unscale_loss_for_distribution(tf.ones([]))

    assert on_two_replicas(lambda: keras_internals.keras_loss.unscale_loss_for_distribution(tf.ones([]))) == 2.0
    assert on_two_replicas(unscaled) == 1.0


ORDER = ("_backend_apply_gradients", "_clip_gradients", "_apply_weight_decay", "_backend_update_step")


@functools.cache
def calls_of_apply():
    kind, calls = recorder(*ORDER)
    optimizer = built(variables := two_variables(), kind, weight_decay=0.1)
    optimizer.apply(ones(variables), variables)
    return calls, variables


def in_order(name, arguments):
    calls, variables = calls_of_apply()
    assert [call for call, _ in calls] == list(ORDER)
    found = dict(calls)[name]
    assert len(found) == arguments
    assert any(
        [id(each) for each in part] == [id(each) for each in variables] for part in found if isinstance(part, list)
    )


def clip_gradients():
    calls, _ = calls_of_apply()
    assert [call for call, _ in calls] == list(ORDER)
    # Where gradients accumulate, it is called where the optimizer updates, on their mean.
    kind, calls = recorder("_clip_gradients")
    variable = keras.Variable(np.zeros(1, np.float32))
    optimizer = built([variable], kind, gradient_accumulation_steps=2)
    seen = []
    for gradient in (1.0, 3.0):
        optimizer.apply([tf.constant([gradient])], [variable])
        seen.append(len(calls))
    assert seen == [0, 1]
    np.testing.assert_array_equal(calls[0][1][0][0], [2.0])


def backend_update_step():
    in_order("_backend_update_step", 3)
    assert float(dict(calls_of_apply()[0])["_backend_update_step"][2]) == 0.5


def current_learning_rate():
    kind = type("Rate", (keras.optimizers.SGD,), {"_get_current_learning_rate": lambda self: 0.125})
    optimizer = built(variables := two_variables(), kind)
    assert optimizer.learning_rate == 0.125
    optimizer.apply(ones(variables), variables)
    np.testing.assert_array_equal(variables[1].numpy(), np.full(2, 0.875))


def var_key():
    optimizer = built(variables := two_variables())
    keys = [optimizer._var_key(each) for each in variables]
    assert len(set(keys)) == 2
    assert keys == [optimizer._var_key(each.value) for each in variables]
    with pytest.raises(AttributeError):  # why the pure update looks keys up outside its scope
        optimizer._var_key(tf.zeros([2]))


def state_is_in_dict():
    optimizer = built(variables := two_variables(), keras.optimizers.Adam)
    twin = object.__new__(keras.optimizers.Adam)
    vars(twin).update(vars(optimizer))
    twin.apply(ones(variables), variables)
    assert int(optimizer.iterations.numpy()) == 1
    assert all(one is other for one, other in zip(twin.variables, optimizer.variables, strict=True))


def class_is_what_is_saved():
    kind = type("Disguised", (keras.optimizers.SGD,), {"__class__": property(lambda self: keras.optimizers.SGD)})
    optimizer = keras.optimizers.SGD(0.5)
    object.__setattr__(optimizer, "__class__", kind)
    assert type(optimizer) is kind
    assert keras.optimizers.serialize(optimizer) == keras.optimizers.serialize(
        keras.optimizers.SGD(0.5, name=optimizer.name)
    )


CANARIES = {
    ("Optimizer", "_trainable_variables"): optimizer_trainable_variables,
    ("Optimizer", "_get_variable_index"): get_variable_index,
    ("Optimizer", "_distribution_strategy"): distribution_strategy,
    ("Optimizer", "_model_variables_moving_average"): moving_averages,
    ("Optimizer", "_update_model_variables_moving_average"): update_moving_averages,
    ("Optimizer", "_use_weight_decay"): use_weight_decay,
    ("Optimizer", "_exclude_from_weight_decay"): exclude_from_weight_decay,
    ("Optimizer", "_exclude_from_weight_decay_pattern"): exclude_from_weight_decay_pattern,
    ("Optimizer", "_distributed_tf_update_step"): distributed_tf_update_step,
    ("Layer", "_flatten_layers"): flatten_layers,
    ("Layer", "_trainable_variables"): layer_trainable_variables,
    ("Layer", "_metrics"): own_metrics,
    ("Layer", "_call_has_training_arg"): call_has_training_arg,
    **{("Variable", name): replaced_value for name in ("_value", "_shape", "_ndim", "_initialize")},
    ("Layer", "_remat_mode"): remat_mode,
    ("Metric", "_direction"): metric_direction,
    ("tensor", "_keras_mask"): keras_mask,
    ("keras.src.losses.loss", "squeeze_or_expand_to_same_rank"): same_rank,
    ("keras.src.losses.loss", "scale_loss_for_distribution"): scale_for_distribution,
    ("keras.src.losses.loss", "unscale_loss_for_distribution"): unscale_for_distribution,
    ("SeedGenerator", "seed_generator_state"): seed_generator_state,
    ("Optimizer", "_backend_apply_gradients"): lambda: in_order("_backend_apply_gradients", 2),
    ("Optimizer", "_clip_gradients"): clip_gradients,
    ("Optimizer", "_apply_weight_decay"): lambda: in_order("_apply_weight_decay", 1),
    ("Optimizer", "_backend_update_step"): backend_update_step,
    ("Optimizer", "_get_current_learning_rate"): current_learning_rate,
    ("Optimizer", "_var_key"): var_key,
    ("Optimizer", "__dict__"): state_is_in_dict,
    ("Optimizer", "__class__"): class_is_what_is_saved,
}


@pytest.mark.parametrize("internal", INTERNALS, ids=lambda internal: f"{internal.owner}.{internal.name}")
def test_keras_still_does_what_is_relied_on(internal):
    try:
        CANARIES[internal.owner, internal.name]()
    except (AssertionError, AttributeError, TypeError, ValueError, KeyError) as error:
        pytest.fail(
            f"Keras {keras.__version__} is not Keras {keras_internals.KERAS} in {internal.name} of {internal.owner}: "
            f"{internal.why}. Needed by: {internal.user}. Change tfpar/optim/keras_internals.py. ({error!r})"
        )


def test_every_row_of_the_table_has_a_canary():
    assert [(row.owner, row.name) for row in INTERNALS] == list(CANARIES)


# Nothing private of Keras is used elsewhere


@functools.cache
def private_names_of_keras() -> frozenset[str]:
    """Private attributes of what Keras lets one make and derive from."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1), keras.layers.BatchNormalization()])
    objects = [
        model,
        *model.layers,
        *model.variables,
        built(two_variables(), keras.optimizers.Adam, use_ema=True, weight_decay=0.1),
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
        keras.losses.MeanSquaredError(),
        keras.metrics.MeanSquaredError(),
        keras.callbacks.Callback(),
    ]
    return frozenset(
        name for each in objects for name in dir(each) if name.startswith("_") and not name.startswith("__")
    )


def private_uses(tree: ast.AST) -> set[str]:
    """Private names of Keras that a module reads from another object, or uses in a class that derives from Keras'."""
    listed = {row.name for row in ALL if not row.name.startswith("__")}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not is_self(node.value) and node.attr in private_names_of_keras():
            found.add(node.attr)
        if isinstance(node, (ast.Attribute, ast.FunctionDef)) and name_of(node) in listed:
            found.add(name_of(node))
        if isinstance(node, ast.Constant) and node.value in listed:
            found.add(node.value)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("keras.src"):
            found.add(node.module)
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).startswith("keras.") for base in node.bases):
            own = {
                part.attr
                for part in ast.walk(node)
                if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and is_self(part.value)
            }
            inside = {name_of(part) for part in ast.walk(node) if isinstance(part, (ast.Attribute, ast.FunctionDef))}
            found |= (inside - own) & private_names_of_keras()
    return found


def name_of(node: ast.Attribute | ast.FunctionDef) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.name


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def test_no_other_module_uses_a_private_name_of_keras():
    own = [pathlib.Path(module.__file__) for module in MODULES]
    paths = [path for path in (ROOT / "tfpar").rglob("*.py") if path not in own]
    found = {str(path.relative_to(ROOT)): private_uses(ast.parse(path.read_text())) for path in paths}
    assert {path: names for path, names in found.items() if names} == {}
    listed = {row.name for row in ALL if not row.name.startswith("__") and not row.owner.startswith("keras.src")}
    assert listed <= set().union(*(private_uses(ast.parse(path.read_text())) for path in own))


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("model._flatten_layers()", {"_flatten_layers"}),
        ("getattr(output, '_keras_mask', None)", {"_keras_mask"}),
        ("optimizer._iterations.assign(3)", {"_iterations"}),  # not in the table
        ("from keras.src.losses.loss import anything", {"keras.src.losses.loss"}),
        ("class A(keras.optimizers.SGD):\n  def _clip_gradients(self): pass", {"_clip_gradients"}),
        ("class A(keras.layers.Layer):\n  def f(self): self._post_build()", {"_post_build"}),
        ("class A(keras.layers.Layer):\n  def f(self): self._mine = 1; return self._mine", set()),
        ("class A:\n  def f(self): return self._losses", set()),
    ],
)
def test_the_search_finds_what_it_is_for(code, found):
    assert private_uses(ast.parse(code)) == found


# Views


class Halving(OptimizerView):
    """Halves gradients before Keras' update."""

    def view_update(self, gradients, variables, rate):
        super().view_update([self.share * gradient for gradient in gradients], variables, rate)


@pytest.mark.parametrize("kind", [keras.optimizers.SGD, keras.optimizers.Nadam, keras.optimizers.Muon])
def test_a_view_without_changes_updates_as_its_optimizer(kind):
    plain, viewed = two_variables(), two_variables()
    options = {"weight_decay": 0.1, "global_clipnorm": 1.0, "use_ema": True}
    one, other = built(plain, kind, **options), built(viewed, kind, **options)
    for _ in range(2):
        one.apply(ones(plain), plain)
        view_of(other, OptimizerView).apply(ones(viewed), viewed)
    for left, right in zip([*plain, *one.variables], [*viewed, *other.variables], strict=True):
        np.testing.assert_array_equal(left.numpy(), right.numpy())


def test_a_view_shares_the_variables_and_leaves_the_optimizer_alone():
    optimizer = built(variables := two_variables(), momentum=0.9)
    before = dict(vars(optimizer))
    view = view_of(optimizer, Halving, learning_rate=0.25, share=0.5)
    view.apply(ones(variables), variables)
    np.testing.assert_array_equal(variables[1].numpy(), np.full(2, 1 - 0.25 * 0.5))
    assert vars(optimizer) == before
    assert type(optimizer) is keras.optimizers.SGD
    assert int(optimizer.iterations.numpy()) == 1
    assert float(tf.convert_to_tensor(optimizer.learning_rate)) == 0.5

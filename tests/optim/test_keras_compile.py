"""A canary for every private name of Keras that `keras_compile` relies on, and what it reads from them."""

from __future__ import annotations

from tfpar.optim import keras_compile
from tfpar.optim.keras_compile import INTERNALS

import keras
import pytest
import tensorflow as tf
from keras.src.models.functional import Functional
from keras.src.trainers.compile_utils import CompileLoss, CompileMetrics


def two_outputs() -> keras.Model:
    inputs = keras.Input((4,))
    return keras.Model(inputs, {name: keras.layers.Dense(2, name=name)(inputs) for name in ("b", "a")})


def specs(*shapes: tuple[int, ...]) -> dict[str, tf.TensorSpec]:
    return {name: tf.TensorSpec(shape) for name, shape in zip("ab", shapes, strict=False)}


OUTPUTS = specs((5, 2), (5, 3))


def functional():
    assert isinstance(two_outputs(), Functional)
    assert not isinstance(keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]), Functional)


def outputs_struct():
    assert {name: tensor.shape for name, tensor in two_outputs()._outputs_struct.items()} == dict.fromkeys(
        "ab", (None, 2)
    )


def losses() -> CompileLoss:
    compiled = CompileLoss({"a": "mse", "b": "mae"}, {"a": 1.0, "b": 2.0}, output_names=["a", "b"])
    compiled.build(OUTPUTS, OUTPUTS)
    return compiled


def flat_losses():
    compiled = losses()
    assert [(entry.path, entry.name, entry.loss_weights) for entry in compiled._flat_losses] == [
        (("a",), "a", 1.0),
        (("b",), "b", 2.0),
    ]
    calls = []

    def record(*arguments):
        calls.append(arguments)
        return keras.ops.zeros(())

    compiled._flat_losses = [entry._replace(loss=record) for entry in compiled._flat_losses]
    compiled.metrics[:] = [None, None]
    y = specs((5, 2), (5, 3))
    compiled.call(y, OUTPUTS)
    assert all(one is y[name] and other is OUTPUTS[name] for (one, other, _), name in zip(calls, "ab", strict=True))


def metrics() -> CompileMetrics:
    compiled = CompileMetrics({"a": ["mae"]}, {"b": ["mse"]}, output_names=["a", "b"])
    compiled.build(OUTPUTS, OUTPUTS)
    return compiled


def flat_metrics():
    group, nothing = metrics()._flat_metrics
    assert nothing is None
    assert (group.output_name, [metric.name for metric in group.metrics]) == ("a", ["mae"])


def flat_weighted_metrics():
    nothing, group = metrics()._flat_weighted_metrics
    assert nothing is None
    assert (group.output_name, [metric.name for metric in group.metrics]) == ("b", ["mse"])


def flatten_y():
    assert [id(leaf) for leaf in metrics()._flatten_y(OUTPUTS)] == [id(OUTPUTS[name]) for name in "ab"]


def compiled_model():
    model = two_outputs()
    options = {"loss": {"a": "mse", "b": "mae"}, "loss_weights": {"a": 1.0, "b": 2.0}}
    model.compile("sgd", **options, metrics={"a": ["mae"]}, weighted_metrics={"b": ["mse"]})
    found = keras_compile.compile_arguments(model)
    assert isinstance(found.pop("optimizer"), keras.optimizers.SGD)
    assert found == {**options, "metrics": {"a": ["mae"]}, "weighted_metrics": {"b": ["mse"]}}
    model = two_outputs()
    model.compile("sgd")
    assert list(keras_compile.compile_arguments(model)) == ["optimizer"]


CANARIES = {
    ("keras.src.models.functional", "Functional"): functional,
    ("Functional", "_outputs_struct"): outputs_struct,
    ("keras.src.trainers.compile_utils", "CompileLoss"): losses,
    ("CompileLoss", "_flat_losses"): flat_losses,
    ("keras.src.trainers.compile_utils", "CompileMetrics"): metrics,
    ("CompileMetrics", "_flat_metrics"): flat_metrics,
    ("CompileMetrics", "_flat_weighted_metrics"): flat_weighted_metrics,
    ("CompileMetrics", "_flatten_y"): flatten_y,
    ("Model", "_compile_loss"): compiled_model,
    ("CompileLoss", "_user_loss_weights"): compiled_model,
    ("Model", "_compile_metrics"): compiled_model,
    ("CompileMetrics", "_user_metrics"): compiled_model,
    ("CompileMetrics", "_user_weighted_metrics"): compiled_model,
}


@pytest.mark.parametrize("internal", INTERNALS, ids=lambda internal: f"{internal.owner}.{internal.name}")
def test_keras_still_does_what_is_relied_on(internal):
    try:
        CANARIES[internal.owner, internal.name]()
    except (AssertionError, AttributeError, TypeError, ValueError, KeyError) as error:
        pytest.fail(
            f"Keras {keras.__version__} differs in {internal.name} of {internal.owner}: {internal.why}. Needed by: "
            f"{internal.user}. Change tfpar/optim/keras_compile.py. ({error!r})"
        )


def test_every_row_of_the_table_has_a_canary():
    assert [(row.owner, row.name) for row in INTERNALS] == list(CANARIES)


def test_labels_in_a_tuple_belong_to_outputs_by_name():
    outputs = [tf.TensorSpec((5, 2)), tf.TensorSpec((5, 3))]
    y = {"a": tf.TensorSpec((5, 2)), "b": tf.TensorSpec((5, 1))}
    found = keras_compile.resolve_losses({"b": "mae", "a": "mse"}, None, ["b", "a"], y, outputs)
    assert [(term.name, term.y, term.outputs, term.loss.name) for term in found] == [
        ("b", 1, 0, "mae"),
        ("a", 0, 1, "mse"),
    ]

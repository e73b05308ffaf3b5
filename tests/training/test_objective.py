"""Losses: how they are assigned and weighted; what is refused before the first step."""

from __future__ import annotations

import re

from tests.training.test_core import SPARSE, batch, classifier, core_of, run
from tfpar.config import ConfigError
from tfpar.training.objective import Goal, SupervisedObjective
from tfpar.training.objective.losses import uses_integer_labels

import keras
import numpy as np
import pytest
import tensorflow as tf


def bound(model: keras.Model, label_spec, **goal) -> SupervisedObjective:
    objective = SupervisedObjective(model, Goal(**goal))
    objective.bind(tf.TensorSpec(model.inputs[0].shape[1:]), label_spec)
    return objective


def classes(*shape: int) -> tf.TensorSpec:
    return tf.TensorSpec(shape, tf.int32)


def two_outputs() -> keras.Model:
    inputs = keras.Input((4,))
    return keras.Model(inputs, [keras.layers.Dense(3, name=name)(inputs) for name in ("a", "b")])


def test_unknown_names_are_refused_before_there_are_data():
    with pytest.raises(ConfigError, match="no_such_loss"):
        Goal({"a": "mse", "b": "no_such_loss"}).check_names()
    with pytest.raises(ConfigError, match="no_such_metric"):
        Goal("mse", metrics={"a": ["mae", "no_such_metric"]}).check_names()
    with pytest.raises(ConfigError, match="loss=3 is not"):
        Goal(3).check_names()


@pytest.mark.parametrize(
    ("goal", "text"),
    [
        (Goal("mse", metrics=["acurracy"]), "metrics='acurracy' is not known. Did you mean 'accuracy'"),
        (Goal("mse", weighted_metrics={"a": ["F1Scor"]}), "metrics='F1Scor' is not known. Did you mean 'f1_score'"),
        (Goal(["categorical_crosentropy"]), "loss='categorical_crosentropy' is not known. Did you mean 'categor"),
        (Goal("qqqq"), "loss='qqqq' is not known. Known: binary_crossentropy, "),
    ],
)
def test_the_nearest_names_are_given_for_an_unknown_one(goal, text):
    with pytest.raises(ConfigError, match=re.escape(text)) as caught:
        goal.check_names()
    names = str(caught.value).partition("Known: ")[2].rstrip(".").split(", ")
    assert len(names) > 20
    for name in names:  # all of them work
        (Goal(name) if goal.metrics is goal.weighted_metrics else Goal("mse", metrics=[name])).check_names()


@pytest.mark.parametrize(
    "loss", ["hinge", "squared_hinge", "poisson", "binary_crossentropy", "kl_divergence", "square"]
)
@pytest.mark.parametrize("labels", [(5,), (5, 1)])
def test_labels_and_outputs_of_another_rank_are_aligned_as_in_compile(loss, labels):
    generator = np.random.default_rng(2)
    y, outputs = generator.integers(0, 2, labels).astype(np.float32), generator.uniform(0.1, 0.9, (5, 1))
    given = (lambda y, outputs: tf.square(outputs - y)) if loss == "square" else loss
    outputs = outputs.astype(np.float32)
    plain = keras.Sequential([keras.Input((1,)), keras.layers.Identity()])
    plain.compile(loss=given)
    objective = bound(plain, tf.TensorSpec(labels[1:]), loss=given)
    sums = objective([], [], (tf.constant(outputs), tf.constant(y), tf.ones([5])), training=False)
    np.testing.assert_allclose(sums.loss / sums.count, plain.evaluate(outputs, y, verbose=0), rtol=1e-5)


def test_a_loss_with_another_number_of_values_is_refused():
    core = core_of(classifier(), lambda y, outputs: tf.zeros([3]))
    with pytest.raises(ConfigError, match="returned 3 values for 7 examples"):
        run(core, batch(1, 8))


@pytest.mark.parametrize(
    ("goal", "labels", "message"),
    [
        ({"loss": SPARSE}, classes(3), r"int32\[3\] and outputs float32\[3\].*'categorical_crossentropy'"),
        ({"loss": "categorical_crossentropy"}, classes(), r"int32\[\] and.*'sparse_categorical_crossentropy'"),
        ({"loss": "mse"}, (), "the data have none"),
        ({"loss": None}, classes(), "loss is missing"),
        ({"loss": ["mse", "mae"]}, tf.TensorSpec([3]), "2 losses for one output"),
        ({"loss": {"a": "mse", "b": "mae"}}, tf.TensorSpec([3]), "the model has one output without a name"),
        ({"loss": "mse", "loss_weights": ["mse"]}, tf.TensorSpec([3]), "'mse' is not a number. Give a number for"),
        ({"loss": "mse", "loss_weights": [1.0, 2.0]}, tf.TensorSpec([3]), "does not fit the model's outputs"),
    ],
)
def test_losses_that_do_not_suit_the_labels_are_refused_by_name(goal, labels, message):
    with pytest.raises(ConfigError, match=message):
        bound(classifier(), labels, **goal)


def test_a_loss_for_an_output_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match=r"'c' is not an output of the model\. Its outputs are: 'a', 'b'"):
        bound(two_outputs(), (classes(), classes()), loss={"a": "mse", "c": "mse"})


@pytest.mark.parametrize("names", [["a", "z"], ["a"]])
def test_a_loss_without_labels_of_its_name_is_refused(names):
    named = ", ".join(map(repr, names))
    with pytest.raises(ConfigError, match=rf"there are no labels for the output 'b'\. Labels are named: {named}\."):
        bound(two_outputs(), dict.fromkeys(names, classes()), loss={"a": "mse", "b": "mse"})


def test_labels_of_another_structure_need_another_objective():
    objective = bound(classifier(), classes(), loss=SPARSE)
    objective.bind(tf.TensorSpec([5]), classes())
    with pytest.raises(ConfigError, match=r"labels .* have a different structure"):
        objective.bind(tf.TensorSpec([5]), (classes(), classes()))


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (SPARSE, True),
        ("sparse_categorical_crossentropy", True),
        (keras.losses.SparseCategoricalCrossentropy(ignore_class=-1), False),
        ("categorical_crossentropy", False),
        (lambda y, outputs: outputs, False),
        (None, False),
        (["mse", SPARSE], False),
    ],
)
def test_which_losses_use_integer_labels(loss, expected):
    assert uses_integer_labels(loss) is expected

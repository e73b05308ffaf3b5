"""A canary for every private name of Keras that `keras_calls` relies on."""

from __future__ import annotations

from tfpar.optim import keras_calls, keras_internals
from tfpar.optim.keras_calls import INTERNALS

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.models.functional import Functional


def functional() -> keras.Model:
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(3, name="first")(inputs)
    return keras.Model(inputs, keras.layers.Add(name="last")([hidden, keras.layers.Dense(3, name="second")(hidden)]))


def thread_state():
    with keras.StatelessScope() as scope, keras.name_scope("here"):
        state = keras_calls.thread_state()
    assert any(value is scope for value in state.values())
    assert keras_calls.innermost_scope() is None
    with keras_calls.in_thread_state(state):
        assert keras_calls.innermost_scope() is scope
    assert keras_calls.innermost_scope() is None
    before = global_state.GLOBAL_STATE_TRACKER
    keras.utils.clear_session(free_memory=False)
    assert global_state.GLOBAL_STATE_TRACKER is not before  # so it is looked up every time


def innermost_scope():
    assert keras_calls.innermost_scope() is None
    with keras.StatelessScope(), keras.StatelessScope() as inner:
        assert keras_calls.innermost_scope() is inner


def graph_of_sequential():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    assert isinstance(keras_calls.graph_of(model), Functional)
    assert keras_calls.graph_of(keras.Sequential([keras.layers.Dense(3)])) is None


def nodes_by_depth():
    nodes = keras_calls.graph_nodes(functional())
    assert [node.operation.name for node in nodes] == ["first", "second", "last"]
    assert all(node.arguments.fill_in and node.input_tensors and node.outputs for node in nodes)


def run_through_graph():
    model, calls = functional(), []

    def run(graph, plain, inputs, **options):
        calls.append(sorted(options))
        return plain(inputs, **options)

    keras_calls.replace_graph_run(model, run)
    model(tf.zeros([2, 4]))
    assert calls == [["operation_fn"]]
    keras_calls.restore_calls(model, [])
    model(tf.zeros([2, 4]))
    assert len(calls) == 1


def loss_ids():
    model = functional()
    with keras.StatelessScope(collect_losses=True) as scope:
        keras_calls.add_loss(model, scope, loss := tf.ones([]))
        scope.add_loss(tf.zeros([]))
        assert len(model.losses) == 1
        assert model.losses[0] is loss
    with pytest.raises(NotImplementedError):
        model.add_loss(loss)


def call_is_looked_up():
    layer, calls = keras.layers.Dense(3), []

    def call(layer, plain, *args, **kwargs):
        calls.append(layer.compute_dtype)
        return plain(*args, **kwargs)

    layer.build((None, 4))
    keras_calls.replace_call(layer, call)
    assert layer(tf.zeros([2, 4], tf.float64)).dtype == tf.float32  # converted before
    assert calls == ["float32"]


def call_context_args():
    """Which layers get an option is a set that they have, and one of a call is handed on only if it was given."""
    model, found = functional(), []

    def run(graph, plain, inputs, **options):
        found.append(keras_calls.options_of_call(options["operation_fn"]))
        return plain(inputs, **options)

    keras_calls.replace_graph_run(model, run)
    for options in ({}, {"training": True}, {"training": False}):
        model(tf.zeros([2, 4]), **options)
    assert found == [(), (("training", id(True)),), (("training", id(False)),)]


def standardize_inputs():
    """A dict comes in the order of the inputs, not of its keys."""
    first, second = keras.Input((2,), name="zebra"), keras.Input((3,), name="ant")
    model = keras.Model([first, second], keras.layers.Concatenate()([first, second]))
    given = {"ant": np.zeros((1, 3), np.float32), "zebra": np.ones((1, 2), np.float32)}
    assert [tuple(each.shape) for each in keras_calls.standard_inputs(model, given)] == [(1, 2), (1, 3)]


CANARIES = {
    "GLOBAL_STATE_TRACKER": thread_state,
    "get_stateless_scope": innermost_scope,
    "_functional": graph_of_sequential,
    "_nodes_by_depth": nodes_by_depth,
    "_run_through_graph": run_through_graph,
    "_call_context_args": call_context_args,
    "_standardize_inputs": standardize_inputs,
    "_loss_ids": loss_ids,
    "__call__": call_is_looked_up,
}


@pytest.mark.parametrize("internal", INTERNALS, ids=lambda internal: f"{internal.owner}.{internal.name}")
def test_keras_still_does_what_is_relied_on(internal):
    CANARIES[internal.name]()


def test_every_row_of_the_table_has_a_canary():
    assert [row.name for row in INTERNALS] == list(CANARIES)


# What layers prepare for a call


def normalizing() -> keras.Model:
    return keras.Sequential([keras.Input((2,)), keras.layers.Normalization(name="norm")])


def test_normalization_computes_with_the_values_that_were_assigned():
    model = normalizing()
    model.get_layer("norm").adapt_mean.assign([10.0, 20.0])
    model.get_layer("norm").adapt_variance.assign([4.0, 9.0])
    keras_calls.finalize_states(model)
    np.testing.assert_allclose(model(np.float32([[12.0, 23.0]])), [[1.0, 1.0]])


def test_a_layer_whose_variables_are_elsewhere_is_left_alone():
    model = normalizing()
    for variable in model.weights:
        keras_internals.replace_value(variable, np.zeros((0,), np.float32))
    keras_calls.finalize_states(model)
    assert tuple(model.get_layer("norm").mean.shape) == (1, 2)


def test_bins_that_are_in_the_configuration_are_not_forgotten():
    bins = keras.layers.Discretization(num_bins=2)
    bins.adapt(np.arange(8.0))
    model = keras.Sequential([keras.Input((1,)), keras.layers.Discretization.from_config(bins.get_config())])
    keras_calls.finalize_states(model)
    assert model.layers[0].bin_boundaries == bins.bin_boundaries


@pytest.mark.parametrize(
    ("make", "data"),
    [
        (keras.layers.StringLookup, ["a", "b", "a"]),
        (keras.layers.IntegerLookup, [7, 9, 7]),
        (lambda: keras.layers.StringLookup(output_mode="tf_idf"), ["a", "b", "a"]),
        (lambda: keras.layers.TextVectorization(output_sequence_length=2), ["a b", "a c"]),
    ],
)
def test_a_learned_vocabulary_is_copied(make, data):
    layer = make()
    layer.adapt(np.array(data))
    copy = type(layer).from_config(layer.get_config())
    keras_calls.copy_vocabulary(layer, copy)
    asked = tf.constant(data)[:, None]
    np.testing.assert_array_equal(copy(asked), layer(asked))


def test_a_layer_that_has_learned_no_vocabulary_stays_so():
    layer, copy = keras.layers.StringLookup(), keras.layers.StringLookup()
    keras_calls.copy_vocabulary(layer, copy)
    copy.adapt(np.array(["a"]))
    assert copy.get_vocabulary() == ["[UNK]", "a"]


def test_a_vocabulary_that_keras_files_cannot_hold_is_refused():
    layer = keras.layers.StringLookup(name="words")
    layer.adapt(np.array(["a\nb", "c"]))
    with pytest.raises(ValueError, match="vocabulary of words"):
        keras_calls.copy_vocabulary(layer, keras.layers.StringLookup())

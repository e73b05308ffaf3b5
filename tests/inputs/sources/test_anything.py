"""`as_source`: it takes whatever `fit` takes, and refuses anything else with a list of what is accepted."""

from __future__ import annotations

from tests.inputs import helpers
from tfpar import inputs
from tfpar.config import ConfigError

import numpy as np
import pytest
import tensorflow as tf
from scipy import sparse


class Frame:
    """By the protocol of pandas' frames and series."""

    def __init__(self, values: np.ndarray):
        self._values = values

    def to_numpy(self) -> np.ndarray:
        return self._values

    def __getitem__(self, key: str) -> Frame:
        raise KeyError(key)


X, Y, W = np.arange(12.0).reshape(6, 2), np.arange(6) % 3, np.arange(6.0)


@pytest.mark.parametrize(
    ("arguments", "x", "y", "weight"),
    [
        ((X, Y), X, Y, None),
        ((X,), X, (), None),
        (((X, Y),), X, Y, None),
        (((X, Y, W),), X, Y, W),
        ((X, Y, W), X, Y, W),
        ((Frame(X), Frame(Y)), X, Y, None),
        ((tf.constant(X), tf.constant(Y)), X, Y, None),
        ((X.tolist(), Y.tolist()), X, Y, None),
        (({"a": X, "b": X},), {"a": X, "b": X}, (), None),
        (([X, X], Y), (X, X), Y, None),
        (([X, X],), (X, X), (), None),
        ((list(zip(X, Y, strict=True)),), X, Y, None),
        (([{"a": row} for row in X],), {"a": X}, (), None),
        ((helpers.MapStyle(6),), np.repeat(np.arange(6.0), 6).reshape(6, 3, 2), np.arange(6) % 5, None),
        ((helpers.Batches(),), {"n": np.arange(20.0)}, np.arange(20) % 4, np.arange(20) / 2),
        ((inputs.from_arrays(X, Y),), X, Y, None),
    ],
)
def test_as_source_takes_what_fit_takes(arguments, x, y, weight):
    source = inputs.as_source(*arguments)
    got_x, got_y = source.fetch(tf.range(source.info.num_examples, dtype=tf.int64))
    tf.nest.map_structure(np.testing.assert_array_equal, got_x, x)
    if weight is not None:
        np.testing.assert_array_equal(got_y.sample_weight, weight)
        got_y = got_y.y
    tf.nest.map_structure(np.testing.assert_array_equal, got_y, y)


def test_as_source_passes_options_on():
    source = inputs.as_source(X, Y, name="mine", split="validation", num_classes=7)
    assert (source.info.name, source.info.split, source.info.num_classes) == ("mine", "validation", 7)
    assert inputs.as_source(helpers.MapStyle(), num_classes=5, name="other").info.num_classes == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("digits",), r"str is not a source of examples. For a data set by name, give tfpar.inputs.load\('digits'\)"),
        (
            (None,),
            "NoneType is not a source of examples. Accepted are: a tfpar.inputs.Source; a tf.data.Dataset or a",
        ),
        ((iter([1]),), "list_iterator is not a source"),
        ((3.0, Y), "float is not a source"),
        (({"a": None},), "dict is not a source"),
        ((helpers.MapStyle(), Y), "MapStyle with y=: such data hold their labels"),
        ((helpers.Batches(), None, W), "Batches with sample_weight=: such data hold their labels"),
        ((inputs.from_arrays(X, Y), Y), "Source with y="),
        ((X, Y[:3]), "6 inputs and 3 labels"),
    ],
)
def test_as_source_refuses_everything_else_with_a_list_of_what_is_accepted(arguments, message):
    with pytest.raises(ConfigError, match=message):
        inputs.as_source(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((tf.ragged.constant([[1], [2, 3]]), [0, 1]), "the inputs are ragged. Pad them to one length"),
        ((X[:2], tf.ragged.constant([[1], [2, 3]])), "the labels are ragged. Pad them"),
        (({"a": tf.sparse.from_dense(X)}, Y), r"the inputs are sparse \(SparseTensor\). Make them dense"),
        (([sparse.csr_matrix(X), X], Y), r"the inputs are sparse \(csr_matrix\). Make them dense"),
        ((tf.data.Dataset.from_tensors(tf.ragged.constant([[1], [2, 3]])),), "is a RaggedTensor, but .* Pad them"),
        ((tf.data.Dataset.from_tensors(tf.sparse.from_dense(X)),), "is a SparseTensor, but .* Make them dense"),
    ],
)
def test_ragged_and_sparse_tensors_are_refused_with_what_to_do(arguments, message):
    with pytest.raises(ConfigError, match=message):
        _ = inputs.as_source(*arguments).info


def test_a_stream_has_no_use_for_checks_of_examples():
    checks = {"ignore_class": -1, "on_bad_record": "skip"}
    for data in (tf.data.Dataset.from_tensors((X, Y)), lambda context: tf.data.Dataset.from_tensors((X, Y))):
        assert inputs.as_source(data, **checks).info.input_spec.shape == (2,)

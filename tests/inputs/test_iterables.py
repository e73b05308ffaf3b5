"""Iterables as streams: what loaders of other libraries give."""

from __future__ import annotations

import itertools

from tfpar import inputs
from tfpar.config import ConfigError, TrainingError

import numpy as np
import pytest
import tensorflow as tf

X = np.arange(21, dtype=np.float32).reshape(7, 3)
Y = np.arange(7, dtype=np.int64)


class Tensor:
    """A tensor of another library, such as PyTorch's."""

    def __init__(self, array):
        self._array = array

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self._array, dtype)


class Loader:
    """Batches as lists, as PyTorch's DataLoader collates them; the last one is smaller."""

    def __init__(self, size=3):
        self.size, self.passes = size, 0

    def __iter__(self):
        self.passes += 1
        return iter([[Tensor(X[at : at + self.size]), Tensor(Y[at : at + self.size])] for at in range(0, 7, self.size)])

    def __len__(self):
        return -(-7 // self.size)


class Items:
    """Examples one by one, without a length."""

    def __init__(self, *columns):
        self._columns = columns

    def __iter__(self):
        return zip(*self._columns, strict=True)


def read(source: inputs.StreamSource) -> list[np.ndarray]:
    """All examples, as flat arrays."""
    batches = list(source.batches(tf.distribute.InputContext()).as_numpy_iterator())
    return [np.concatenate(parts) for parts in zip(*map(tf.nest.flatten, batches), strict=True)]


@pytest.mark.parametrize("data", [Loader(), Items(X, Y)], ids=["batches", "items"])
def test_all_examples_in_order_again_and_again(data):
    source = inputs.as_source(data, split="validation", ignore_class=-1)
    assert (source.name, source.split, source.sharding) == (type(data).__name__, "validation", "example")
    assert source.info.input_spec == tf.TensorSpec([3], tf.float32)
    assert source.info.label_spec == tf.TensorSpec([], tf.int64)
    for _ in range(2):
        x, y = read(source)
        np.testing.assert_array_equal(x, X)
        np.testing.assert_array_equal(y, Y)
    assert source.counted(told=False).examples == 7


def test_structures_weights_and_text():
    words = [f"word {number}" for number in range(7)]
    data = Items([{"a": row, "word": word} for row, word in zip(X, words, strict=True)], Y, np.full(7, 0.5))
    a, word, y, weight = read(inputs.from_iterable(data))
    np.testing.assert_array_equal(a, X)
    assert [one.decode() for one in word] == words
    np.testing.assert_array_equal(y, Y)
    assert weight.tolist() == [0.5] * 7
    assert weight.dtype == np.float32


@pytest.mark.parametrize(
    ("later", "message"),
    [
        ({"y": 1.7}, "an element's part 1 is float64, but that of the first element is int64. Convert it"),
        ({"pixels": np.array([300, -5])}, "part 0/pixels does not fit .* range from -5 to 300, but uint8 holds"),
        ({"id": 2**33}, "part 0/id does not fit .* but int32 holds"),
        ({"y": None}, "part 1 is object, but that of the first element is int64"),
        ({"word": 7}, "part 0/word is int64, but that of the first element is text"),
        ({"value": "7"}, "part 0/value is <U1, but that of the first element is float32"),
    ],
)
def test_values_that_the_first_dtypes_do_not_hold_are_refused(later, message):
    first = {"pixels": np.uint8([1, 2]), "id": np.int32(3), "word": "a", "value": np.float32(0.5)}
    y = later.pop("y", 2)
    data = Items([first, first | later], [1, y])
    with pytest.raises(TrainingError, match=message):
        inputs.from_iterable(data).counted(told=False)


def test_values_of_other_dtypes_that_fit_are_kept():
    data = Items([np.uint8([1]), np.array([255])], np.array([1, True], object), [np.float32(0.5), np.float64(2)])
    x, y, weight = read(inputs.from_iterable(data))
    np.testing.assert_array_equal(x, [[1], [255]])
    assert (x.dtype, y.tolist(), weight.tolist()) == (np.uint8, [1, 1], [0.5, 2])


def test_elements_of_one_length_are_batches_unless_told_otherwise():
    pairs = Items(X, X)
    assert inputs.from_iterable(pairs).info.input_spec.shape == []
    assert inputs.from_iterable(pairs, batched=False).info.input_spec.shape == [3]


def test_a_digest_tells_the_first_elements_of_workers_apart():
    same, other = inputs.from_iterable(Items(X, Y)), inputs.from_iterable(Items(X[::-1], Y))
    assert same.first() == inputs.from_iterable(Items(X, Y)).first() != other.first()
    assert inputs.from_dataset(tf.data.Dataset.range(3)).first is None


def test_what_cannot_be_a_stream():
    with pytest.raises(
        ConfigError, match=r"a count can be read only once\. Give an object whose __iter__ starts again"
    ):
        inputs.from_iterable(itertools.count(), name="generator")
    with pytest.raises(ConfigError, match="Items: the iterable has no elements"):
        _ = inputs.from_iterable(Items([], [])).info
    with pytest.raises(ConfigError, match=r"part 1 is not an array of numbers or text\. Convert it"):
        _ = inputs.from_iterable(Items(X, [object()] * 7)).info
    with pytest.raises(ConfigError, match="Loader with y="):
        inputs.as_source(Loader(), Y)
    with pytest.raises(ConfigError, match="set is not a source of examples"):
        inputs.as_source({1, 2})

"""`as_source`: turns the examples that a Keras user passes to `fit` into a source."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping, Set
from typing import Any

from tfpar.config import ConfigError
from tfpar.inputs.source import Source
from tfpar.inputs.sources.arrays import from_arrays
from tfpar.inputs.sources.random_access import from_random_access
from tfpar.inputs.streams.iterables import from_iterable
from tfpar.inputs.streams.source import StreamSource, from_dataset
from tfpar.inputs.structures import GAPS, Structure

import keras
import numpy as np
import tensorflow as tf

_CHECKS = ("ignore_class", "num_classes", "on_bad_record")
_SCALARS = (int, float, str, bytes, np.generic)
_ACCEPTED = (
    "Accepted are: a tfpar.inputs.Source; a tf.data.Dataset or a function of a tf.distribute.InputContext; arrays, "
    "tensors and data frames, or dicts and lists of them for several inputs, with labels in y; (x, y) and (x, y, "
    "sample_weight) tuples of arrays; a keras.utils.PyDataset; a list of (x, y) tuples or of dicts, and any other "
    "object with __len__ and __getitem__; a data loader, and any other object that can be iterated again and again"
)


def as_source(
    data: Any, y: Structure | None = None, sample_weight: Structure | None = None, **options: Any
) -> Source | StreamSource:
    """Returns a source for the examples that a Keras user passes to `fit`.

    | `data` | becomes |
    |---|---|
    | a `Source`, a `StreamSource` | itself |
    | a `tf.data.Dataset`, a function of a `tf.distribute.InputContext` that returns one | `from_dataset(data)` |
    | an array, a tensor, a data frame, a dict or list of them (with labels in `y`) | `from_arrays(data, y)` |
    | a tuple `(x,)`, `(x, y)` or `(x, y, sample_weight)` of arrays, without `y` | `from_arrays(*data)` |
    | a `keras.utils.PyDataset`, a list of tuples or dicts, another object with `__len__` and `__getitem__` |
      `from_random_access(data)` |
    | a data loader of PyTorch or Grain, another object that can be iterated again and again | `from_iterable(data)` |

    Args:
      data: The examples.
      y: Labels, if `data` are arrays.
      sample_weight: Sample weights, if `data` are arrays with labels in `y`.
      **options: Further arguments of the function in the table, e.g. `split` or `name`; not used for a `Source`. A
        stream takes no `ignore_class`, `num_classes` and `on_bad_record`, which say how examples are checked.

    Raises:
      ConfigError: The data are none of these, labels are given for data that have their own, or the function refuses
        the examples.
    """
    alone = y is None and sample_weight is None
    if isinstance(data, tf.data.Dataset | StreamSource) or _is_input_function(data):
        if not alone:
            raise ConfigError(
                f"{type(data).__name__} with y= or sample_weight=: a dataset holds its labels and weights itself. "
                "Let its elements be (x, y) or (x, y, sample_weight)."
            )
        return data if isinstance(data, StreamSource) else from_dataset(data, **_of_stream(options))
    if isinstance(data, tuple) and alone and 1 <= len(data) <= 3:
        data, y, sample_weight = (*data, None, None)[:3]
    _refuse_gaps("inputs", data)
    _refuse_gaps("labels", y)
    if not (alone and _is_list_of_items(data)) and _are_arrays(data):
        return from_arrays(data, y, sample_weight=sample_weight, **options)
    by_index, again = _can_be_read(data)
    if not (by_index or again):
        raise _no_source(data)
    if not alone:
        what = "y" if y is not None else "sample_weight"
        raise ConfigError(
            f"{type(data).__name__} with {what}=: such data hold their labels and weights themselves. Leave out "
            f"{what}; let the items be (x, y) or (x, y, sample_weight)."
        )
    if isinstance(data, Source):
        return data
    if by_index:
        return from_random_access(data, **options)
    return from_iterable(data, **_of_stream(options))


def _of_stream(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options for a stream, whose examples and labels are not checked."""
    return {name: value for name, value in options.items() if name not in _CHECKS}


def _refuse_gaps(what: str, data: Any) -> None:
    """Refuses ragged and sparse tensors, and SciPy's sparse matrices, which would otherwise count as lists of rows."""
    values = data.values() if isinstance(data, Mapping) else data if isinstance(data, (list, tuple)) else (data,)
    for value in itertools.islice(values, 100):  # no model has more inputs; a list of rows may be long
        if isinstance(value, tf.RaggedTensor):
            raise ConfigError(f"the {what} are ragged. {GAPS['RaggedTensor']}")
        if isinstance(value, tf.SparseTensor) or type(value).__module__.startswith("scipy.sparse"):
            raise ConfigError(f"the {what} are sparse ({type(value).__name__}). {GAPS['SparseTensor']}")


def _is_input_function(data: Any) -> bool:
    """Whether data is a function of one argument, which must be a `tf.distribute.InputContext`."""
    if not (inspect.isfunction(data) or inspect.ismethod(data)):
        return False
    arguments = inspect.signature(data)
    try:
        arguments.bind(None)
    except TypeError:
        return False
    return not inspect.isgeneratorfunction(data)


def _can_be_read(data: Any) -> tuple[bool, bool]:
    """Whether data can be read by index, and whether they can be iterated again and again."""
    if isinstance(data, (str, bytes, tuple, Mapping, Set)):
        return False, False
    again = hasattr(data, "__iter__") and not hasattr(data, "__next__")
    # PyTorch's IterableDataset inherits a __getitem__ that does nothing, and has no length.
    by_index = hasattr(data, "__getitem__") and (hasattr(data, "__len__") or not again)
    return by_index or isinstance(data, (Source, keras.utils.PyDataset)), again


def _no_source(data: Any) -> ConfigError:
    hint = f" For a data set by name, give tfpar.inputs.load({data!r})." if isinstance(data, str) else ""
    if callable(data) or hasattr(data, "__next__"):
        hint = (
            " A function must take one argument, a tf.distribute.InputContext, and return a tf.data.Dataset. A "
            "generator can be read only once: give an object whose __iter__ starts again from the beginning, or "
            "tf.data.Dataset.from_generator."
        )
    return ConfigError(f"{type(data).__name__} is not a source of examples.{hint} {_ACCEPTED}.")


def _is_list_of_items(data: Any) -> bool:
    """Whether `data` is a list of (x, y) tuples or of dicts: one per example."""
    return isinstance(data, list) and bool(data) and isinstance(data[0], (tuple, Mapping))


def _are_arrays(data: Any) -> bool:
    """Whether `data` is an array with one row per example, or a structure of arrays."""
    if isinstance(data, Mapping):
        return bool(data) and all(map(_are_arrays, data.values()))
    if isinstance(data, (list, tuple)):
        return bool(data) and all(isinstance(value, _SCALARS) or _are_arrays(value) for value in data)
    return hasattr(data, "to_numpy") or (hasattr(data, "__array__") and hasattr(data, "shape"))

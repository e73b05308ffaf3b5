"""Items of a data set in Python: splits them into inputs, labels and weights, and joins many items to arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfpar.config import ConfigError
from tfpar.inputs import structures
from tfpar.inputs.source import Weighted
from tfpar.inputs.sources.columns import dtypes
from tfpar.inputs.structures import Structure

import numpy as np
import tensorflow as tf

# Returns the inputs and the labels of an item; `()` without labels, `Weighted` labels with sample weights.
SplitItem = Callable[[Any], tuple[Structure, Structure]]


class ItemError(ValueError):
    """An item differs from the first one, or cannot be read."""


def splitter(
    name: str,
    inputs: str | Sequence[str] | None,
    labels: str | Sequence[str] | None,
    sample_weight: str | None,
    transform: Callable[[Any], Any] | None,
) -> SplitItem:
    """Returns the function that takes items apart.

    Args:
      name: The data set, for errors.
      inputs: Key or keys of the inputs; None if items are `x`, `(x, y)` or `(x, y, sample_weight)`.
      labels: Key or keys of the labels, or None.
      sample_weight: Key of the sample weights, or None.
      transform: Applied to each item first, or None.

    Raises:
      ConfigError: Keys of labels without keys of inputs, or a key of weights without one of labels.
    """
    if inputs is None and (labels is not None or sample_weight is not None):
        raise ConfigError(f"{name}: labels={labels!r} and sample_weight={sample_weight!r} need inputs=, a key too.")
    if labels is None and sample_weight is not None:
        raise ConfigError(f"{name}: sample_weight={sample_weight!r} needs labels=, a key too.")

    def split_item(item: Any) -> tuple[Structure, Structure]:
        if transform is not None:
            item = transform(item)
        if inputs is None:
            return _unpack(item)
        x = _pick(item, inputs)
        if labels is None:
            return x, ()
        y = _pick(item, labels)
        return x, y if sample_weight is None else Weighted(y, _pick(item, sample_weight))

    return split_item


def _unpack(item: Any) -> tuple[Structure, Structure]:
    """Takes an item apart as Keras does: `x`, `(x,)`, `(x, y)` or `(x, y, sample_weight)`."""
    if isinstance(item, list) and not all(isinstance(value, (int, float)) for value in item):
        item = tuple(item)
    if not isinstance(item, tuple):
        return _leaf_lists_as_arrays(item), ()
    if not 1 <= len(item) <= 3:
        raise ItemError(
            f"an item is a tuple of {len(item)} parts, but must be x, (x, y) or (x, y, sample_weight). Give "
            "transform=, a function that returns one of these."
        )
    x, y, weight = (*item, None, None)[:3]
    if y is None:
        return _leaf_lists_as_arrays(x), ()
    y = _leaf_lists_as_arrays(y)
    return _leaf_lists_as_arrays(x), y if weight is None else Weighted(y, _leaf_lists_as_arrays(weight))


def _leaf_lists_as_arrays(part: Structure) -> Structure:
    """Returns a structure in which lists of numbers are arrays, and lists and tuples of arrays are tuples."""
    if isinstance(part, Mapping):
        return {str(key): _leaf_lists_as_arrays(value) for key, value in part.items()}
    if isinstance(part, (list, tuple)):
        if any(isinstance(value, Mapping) or getattr(value, "ndim", 0) for value in part):
            return tuple(map(_leaf_lists_as_arrays, part))
        try:
            return np.asarray(part)
        except ValueError as error:
            raise ItemError(f"a list is no array ({error}). Pad or crop its parts to one length") from error
    return part


def _pick(item: Any, keys: str | Sequence[str]) -> Structure:
    if not isinstance(item, Mapping):
        raise ItemError(f"an item is {type(item).__name__}, not a dict, so it has no key {keys!r}")
    missing = [key for key in ([keys] if isinstance(keys, str) else keys) if key not in item]
    if missing:
        raise ItemError(f"an item has no key {missing[0]!r}; its keys are: {', '.join(map(str, item))}")
    if isinstance(keys, str):
        return _leaf_lists_as_arrays(item[keys])
    return {key: _leaf_lists_as_arrays(item[key]) for key in keys}


@dataclasses.dataclass(frozen=True)
class Layout:
    """Shapes and dtypes of the leaves of items, and their structure.

    Attributes:
      leaves: Shape of one example and NumPy dtype as stored, of the inputs' leaves and then the labels'.
      template: The inputs and labels of the first item.
      input_spec: As in `SourceInfo`.
      label_spec: As in `SourceInfo`.
      weight_spec: As in `SourceInfo`.
      rows: Examples of the first item, if items are batches; otherwise 1.
    """

    leaves: list[tuple[tuple[int, ...], np.dtype]]
    template: tuple[Structure, Structure]
    input_spec: Structure
    label_spec: Structure
    weight_spec: Structure
    rows: int

    @property
    def dtypes(self) -> list[np.dtype]:
        """The stored dtypes of the leaves."""
        return [dtype for _, dtype in self.leaves]

    @property
    def bytes_per_example(self) -> int:
        """Size of one example as stored, in bytes; a pointer for text."""
        return sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in self.leaves)

    def join(self, items: Sequence[tuple[Structure, Structure]], numbers: Sequence[int]) -> list[np.ndarray]:
        """Joins items to arrays.

        Args:
          items: The inputs and labels of n items.
          numbers: Their indices, for errors.

        Returns:
          The leaves, [n, ...] each, in the stored dtypes.

        Raises:
          ItemError: An item has another structure, shape or kind than the first one.
        """
        rows = [self._flatten(item, number) for item, number in zip(items, numbers, strict=True)]
        columns = []
        for position, (shape, dtype) in enumerate(self.leaves):
            values = [row[position] for row in rows]
            for value, number in zip(values, numbers, strict=True):
                self._check(value, value.shape, position, number)
            columns.append(self._store(np.stack(values), dtype, position, numbers[0]).reshape(len(values), *shape))
        return columns

    def join_batch(self, item: tuple[Structure, Structure], number: int) -> list[np.ndarray]:
        """Returns the leaves of an item that is a batch, [b, ...] each, in the stored dtypes; raises as `join`."""
        columns = []
        for position, value in enumerate(self._flatten(item, number)):
            self._check(value, value.shape[1:], position, number)
            columns.append(self._store(value, self.leaves[position][1], position, number))
        if len({len(column) for column in columns}) > 1:
            raise ItemError(f"item {number} has arrays of different lengths: {[len(column) for column in columns]}")
        if len(columns[0]) > self.rows:  # examples are numbered by the rows of the first item
            raise ItemError(
                f"its batch, item {number}, has {len(columns[0])} rows, but the first item has {self.rows}; all "
                "batches have the size of the first one, and only the last may be smaller"
            )
        return columns

    def _flatten(self, item: tuple[Structure, Structure], number: int) -> list[np.ndarray]:
        leaves = tf.nest.flatten(item)
        same = len(leaves) == len(self.leaves)
        if same and any(map(tf.nest.is_nested, self.template)):
            try:
                tf.nest.assert_same_structure(item, self.template, check_types=False)
            except (ValueError, TypeError):
                same = False
        if not same:
            found = [path for path, _ in structures.named_leaves(item)]
            expected = [path for path, _ in structures.named_leaves(self.template)]
            raise ItemError(f"item {number} has the parts {found}, but the first item has {expected}")
        return [_as_array(leaf) for leaf in leaves]

    def _check(self, value: np.ndarray, shape: tuple[int, ...], position: int, number: int) -> None:
        expected, dtype = self.leaves[position]
        if shape != expected:
            raise ItemError(
                f"its {self._part(position)} (item {number}) has shape {shape}, but that of the first item has "
                f"{expected}; all items must have one shape, e.g. by transform="
            )
        if np.issubdtype(dtype, np.integer) and value.dtype.kind not in "iub":
            raise ItemError(
                f"its {self._part(position)} (item {number}) is {value.dtype}, but that of the first item is an integer"
            )

    def _store(self, values: np.ndarray, dtype: np.dtype, position: int, number: int) -> np.ndarray:
        try:
            return dtypes.as_stored(values, dtype)
        except ValueError as error:
            way_out = ""  # that of text is part of the error
            if np.issubdtype(dtype, np.integer):
                wider = position < len(tf.nest.flatten(self.template[0])) and dtype != np.int64
                way_out = "; give all items one dtype, e.g. int64" if wider else "; map them to smaller ones"
                way_out += ", by transform="
            raise ItemError(f"its {self._part(position)} (items from {number}): {error}{way_out}") from error

    def _part(self, position: int) -> str:
        x, y = self.template
        labels, weights = (y.y, y.sample_weight) if isinstance(y, Weighted) else (y, ())
        names = [
            f"{what} {path!r}" if path else what
            for what, part in (("input", x), ("label", labels), ("sample weight", weights))
            for path, _ in structures.named_leaves(part)
        ]
        return names[position]


def _as_array(value: Any) -> np.ndarray:
    # NumPy's own dtype for bytes loses zeros at the end.
    return np.array(value, object) if isinstance(value, (str, bytes)) else np.asarray(value)


def infer(item: tuple[Structure, Structure], batched: bool) -> Layout:
    """Returns the layout of a data set from its first item.

    Args:
      item: Inputs and labels.
      batched: Whether an item is a batch of examples.

    Raises:
      ItemError: A part is not an array of real numbers or text, or is not a batch.
    """
    x, y = item
    leaves: list[tuple[tuple[int, ...], np.dtype]] = []
    rows: set[int] = set()

    def describe(value: Any, what: str) -> tf.TensorSpec:
        array = _as_array(value)
        try:
            dtype = dtypes.stored_dtype(array, what, rank=array.ndim - batched, complete=False)
        except ValueError as error:
            raise ItemError(f"the {what} of the first item {error}") from error
        if batched:
            if not array.ndim:
                raise ItemError(
                    f"the {what} of the first item is a single number, but an item must be a batch [b, ...]"
                )
            rows.add(len(array))
        shape = array.shape[1:] if batched else array.shape
        leaves.append((shape, dtype))
        return tf.TensorSpec(shape, dtypes.fetched_dtype(dtype))

    labels, weights = (y.y, y.sample_weight) if isinstance(y, Weighted) else (y, ())
    input_spec, label_spec, weight_spec = (
        tf.nest.map_structure(lambda value, what=what: describe(value, what), part)
        for what, part in (("inputs", x), ("labels", labels), ("weights", weights))
    )
    if len(rows) > 1:
        raise ItemError(f"the first item has arrays of different lengths: {sorted(rows)}")
    if not structures.is_single(input_spec) and structures.is_empty(input_spec):
        raise ItemError("the first item has no inputs")
    if rows == {0}:
        raise ItemError("the first item is an empty batch")
    return Layout(leaves, item, input_spec, label_spec, weight_spec, next(iter(rows), 1))

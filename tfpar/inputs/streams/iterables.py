"""Streams of Python objects that can be iterated again and again: data loaders, `IterDataset`s, your own classes."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tfpar.config import ConfigError
from tfpar.inputs import structures
from tfpar.inputs.sources.columns import dtypes
from tfpar.inputs.streams.source import StreamSource, from_dataset, is_batched
from tfpar.inputs.structures import Structure

import numpy as np
import tensorflow as tf


def from_iterable(
    data: Iterable[Any],
    *,
    sharding: str = "example",
    batched: bool | None = None,
    examples: int | None = None,
    split: str = "train",
    name: str = "",
) -> StreamSource:
    """Returns a source over an iterable: a `DataLoader` of PyTorch or Grain, an `IterDataset`, or your own object.

    Each pass is one `iter(data)`, read in a separate thread, and batched again to `global_batch_size`. A resumed run
    starts the stream again, because the position of a Python iterator cannot be saved: for data that can be read by
    index, prefer `from_random_access`.

    Args:
      data: An iterable of `x`, `(x, y)` or `(x, y, sample_weight)`, as tuples or lists; each part is an array, a tensor
        or a structure of these. All elements have the shapes and kinds of the first one: an error ends the run if it
        has integers and a later one has other numbers, or integers that its dtype does not hold.
      sharding: As for `from_dataset`: with `"example"` the iterable must be the same on every worker (if it shuffles,
        it needs the same seed); with `"worker"` it is this worker's own share.
      batched: Whether elements are batches, of any size. By default they are if all their arrays have a first dim of
        the same length.
      examples: Number of examples in one pass, of all workers; if None, an extra pass counts them when the number is
        needed.
      split: `"train"` or `"validation"`, for reports.
      name: Name for reports and errors; by default the type of the object.

    Raises:
      ConfigError: The data can be iterated only once; or, when the source is used, an element does not consist of
        numbers and text.
    """
    name = name or type(data).__name__
    if not hasattr(data, "__iter__") or hasattr(data, "__next__"):
        raise ConfigError(
            f"{name}: every epoch and every evaluation iterates over the data from the beginning, and a "
            f"{type(data).__name__} can be read only once. Give an object whose __iter__ starts again from the "
            "beginning, such as a data loader, or tf.data.Dataset.from_generator(function, ...)."
        )
    first = functools.cache(lambda: _first(name, data))

    def make(context: tf.distribute.InputContext) -> tf.data.Dataset:
        del context
        whole = is_batched(first()[1]) if batched is None else batched
        signature = tf.nest.map_structure(
            lambda spec: tf.TensorSpec([None, *spec.shape[1:]], spec.dtype) if whole else spec, first()[1]
        )
        # tf.data casts arrays as NumPy does: it would cut off fractions, and wrap integers.
        elements = functools.partial(_checked_elements, data, tf.nest.flatten(signature))
        return tf.data.Dataset.from_generator(elements, output_signature=signature)

    return from_dataset(
        make,
        sharding=sharding,
        batched=batched,
        examples=examples,
        split=split,
        name=name,
        first=lambda: first()[0],
    )


def _first(name: str, data: Iterable[Any]) -> tuple[str, Structure]:
    """Returns a digest of the first element, and its specs."""
    element = next(_elements(data), None)
    if element is None:
        raise ConfigError(f"{name}: the iterable has no elements. Give it at least one example.")
    for path, leaf in structures.named_leaves(element):
        if leaf.dtype.hasobject:
            raise ConfigError(
                f"{name}: the element's part {path or 'x'} is not an array of numbers or text. Convert it in the "
                "iterable."
            )
    leaves = tf.nest.flatten(element)
    parts = [str((leaf.shape, leaf.dtype)).encode() + leaf.tobytes() for leaf in leaves]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16], tf.nest.map_structure(_spec, element)


def _checked_elements(data: Iterable[Any], specs: Sequence[tf.TensorSpec]) -> Iterator[tuple[Structure, ...]]:
    """Yields the elements of one pass; refuses values that the dtypes of the first element do not hold."""
    expected = [np.dtype(spec.dtype.as_numpy_dtype) for spec in specs]
    for element in _elements(data):
        for place, (value, dtype) in enumerate(zip(tf.nest.flatten(element), expected, strict=False)):
            if value.dtype != dtype and (error := _misfit(value, dtype)):
                path = structures.named_leaves(element)[place][0] or "x"
                raise ConfigError(f"an element's part {path} {error}. Convert it in the iterable")
        yield element


def _misfit(values: np.ndarray, dtype: np.dtype) -> str:
    """Says why a dtype does not hold some values, in words whose subject is the values; empty if it does."""
    if dtype.hasobject:
        fits = dtypes.is_text(values)
    elif dtype.kind in "iu" and values.dtype.kind in "iu":
        try:
            dtypes.as_stored(values, dtype)
        except ValueError as error:
            return f"does not fit the first element's dtype: {error}"
        return ""
    else:
        fits = values.dtype.kind not in "SU" and np.can_cast(values.dtype, dtype, "same_kind")
    kind = "text" if dtype.hasobject else dtype
    return "" if fits else f"is {values.dtype}, but that of the first element is {kind}"


def _elements(data: Iterable[Any]) -> Iterator[tuple[Structure, ...]]:
    """Yields the elements of one pass, as tuples of structures of arrays."""
    for element in data:
        parts = tuple(element) if isinstance(element, (tuple, list)) else (element,)
        yield tuple(_arrays(part) for part in parts)


def _arrays(part: Any) -> Structure:
    """Returns a structure of arrays; lists become tuples, because loaders collate the fields of an item to a list."""
    if isinstance(part, Mapping):
        return {name: _arrays(value) for name, value in part.items()}
    if isinstance(part, (tuple, list)):
        return tuple(_arrays(value) for value in part)
    return np.asarray(part)


def _spec(array: np.ndarray) -> tf.TensorSpec:
    return tf.TensorSpec(array.shape, tf.string if array.dtype.kind in "US" else array.dtype)

"""Nested structures of inputs and labels: tensors in tuples and dicts, as Keras models take and return them.

A structure is a tensor (or an array, or a `tf.TensorSpec`), or a tuple or dict of structures; `()` is the empty
structure. Structures contain no lists: tf.data would join the tensors of a list into one, so `without_lists` turns
lists into tuples, as Keras does. The order of the leaves is that of `tf.nest`: dicts by sorted key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

# A tensor, array or spec, or a nested structure of them.
Structure = Any

# Tensors that are not whole arrays, and what to give instead: the step is one program, with shapes that do not change.
GAPS = {
    "RaggedTensor": "Pad them to one length, e.g. ragged.to_tensor(shape=...), and mask the padding (mask_zero=True).",
    "SparseTensor": "Make them dense: tf.sparse.to_dense(tensor), or matrix.toarray(). If few values are not zero, "
    "give their positions to a keras.layers.Embedding.",
}


def is_empty(structure: Structure) -> bool:
    """Whether a structure has no leaves."""
    return isinstance(structure, (tuple, list, Mapping)) and not tf.nest.flatten(structure)


def is_single(structure: Structure) -> bool:
    """Whether a structure is one leaf, not in a tuple or dict."""
    return not tf.nest.is_nested(structure)


def without_lists(structure: Structure) -> Structure:
    """Returns the structure with tuples in place of lists, and plain dicts in place of other mappings."""
    if isinstance(structure, Mapping):
        return {key: without_lists(value) for key, value in structure.items()}
    if isinstance(structure, tuple) and hasattr(structure, "_fields"):
        return type(structure)(*map(without_lists, structure))
    if isinstance(structure, (tuple, list)):
        return tuple(map(without_lists, structure))
    return structure


def named_leaves(structure: Structure) -> list[tuple[str, Any]]:
    """Returns the leaves in the order of `tf.nest.flatten`, each with its path: `""` for a lone leaf, else `"a/0"`."""
    if isinstance(structure, Mapping):
        items = [(str(key), structure[key]) for key in sorted(structure)]
    elif isinstance(structure, tuple) and hasattr(structure, "_fields"):
        items = list(zip(structure._fields, structure, strict=True))
    elif isinstance(structure, (tuple, list)):
        items = [(str(number), value) for number, value in enumerate(structure)]
    else:
        return [("", structure)]
    return [("/".join(filter(None, (key, path))), leaf) for key, value in items for path, leaf in named_leaves(value)]


def describe_specs(specs: Structure) -> Any:
    """Returns the shapes and dtypes of specs as JSON: `str(shape)` for a lone spec, otherwise by path with dtypes."""
    if is_single(specs):
        return str(specs.shape)
    return {path: [str(spec.shape), spec.dtype.name] for path, spec in named_leaves(specs)}


def batch_specs(rows: Sequence[int | None] | tf.TensorShape, specs: Structure) -> Structure:
    """Returns the specs of a batch of shape `rows`, from the specs of one example."""
    return tf.nest.map_structure(lambda spec: tf.TensorSpec(tf.TensorShape(rows) + spec.shape, spec.dtype), specs)


def ensure_rows(values: Structure, indices: tf.Tensor, specs: Structure) -> Structure:
    """Returns the same values, with the static shapes `indices.shape + spec.shape`, which are checked when run."""
    return tf.nest.map_structure(lambda spec, value: tf.ensure_shape(value, indices.shape + spec.shape), specs, values)


def first_leaf(structure: Structure) -> Any:
    """Returns the first leaf."""
    return tf.nest.flatten(structure)[0]


def map_arrays(function: Callable[..., Any], *structures: Structure) -> Structure:
    """Maps a function over the leaves of structures of the same form, as `tf.nest.map_structure`."""
    return tf.nest.map_structure(function, *structures)


def is_number(dtype: Any) -> bool:
    """Whether values of a NumPy or TensorFlow dtype are real numbers or booleans."""
    dtype = tf.as_dtype(dtype)
    return bool(dtype.is_floating or dtype.is_integer or dtype.is_bool)


def is_integer(dtype: Any) -> bool:
    """Whether values of a NumPy dtype are integers; False for bfloat16, text and booleans."""
    return np.issubdtype(dtype, np.integer)

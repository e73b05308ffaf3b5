"""Features of TFRecord shards: the arrays and texts of an example, and their structure as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tfpar.inputs.source import Weighted
from tfpar.inputs.structures import Structure

import numpy as np
import tensorflow as tf

_BYTES_OF_TEXT = 64  # an estimate, to decide on caching


@dataclasses.dataclass(frozen=True)
class Column:
    """One feature of the records: the raw bytes of an array of numbers, or texts.

    Attributes:
      name: `"x"` or `"y"`, with the path of one of several after a slash.
      dtype: The stored dtype.
      shape: Shape of one example.
      fetched: The dtype that `Source.fetch` returns.
    """

    name: str
    dtype: tf.DType
    shape: tuple[int, ...]
    fetched: tf.DType

    @property
    def bytes(self) -> int:
        """Size of one example, in bytes; an estimate for text."""
        return (_BYTES_OF_TEXT if self.dtype == tf.string else self.dtype.size) * int(np.prod(self.shape))

    @property
    def spec(self) -> tf.TensorSpec:
        """The spec of one example as fetched."""
        return tf.TensorSpec(self.shape, self.fetched)

    @property
    def feature(self) -> tf.io.FixedLenFeature:
        """The parsing rule: one string of bytes, or one text per element of the shape."""
        return tf.io.FixedLenFeature(self.shape if self.dtype == tf.string else [], tf.string)

    def __str__(self) -> str:
        return f"{self.name}, {self.dtype.name} {list(self.shape)}, takes {self.bytes} bytes"

    def decode(self, raw: tf.Tensor, indices: tf.Tensor) -> tf.Tensor:
        """Decodes parsed strings [n, ...] to an array [n, ...]; `indices` [n] gives the static length."""
        rows = indices.shape[0] if indices.shape[0] is not None else -1
        if self.dtype == tf.string:
            return tf.reshape(raw, [rows, *self.shape])
        lengths = tf.strings.length(raw)
        fits = tf.debugging.Assert(tf.reduce_all(lengths == self.bytes), [f"{self}, but the record has another size"])
        with tf.control_dependencies([fits] if fits is not None else []):
            raw = tf.identity(raw)
        return tf.reshape(tf.io.decode_raw(raw, self.dtype), [rows, *self.shape])


def to_json(specs: Structure, stored: Structure) -> dict[str, Any]:
    """Returns a structure of specs, with the dtypes in which the values are stored, as JSON.

    Args:
      specs: Specs of one example as fetched.
      stored: Tensors [n, ...] as stored, in the same structure.

    Returns:
      `{"dict": {name: ...}}`, `{"tuple": [...]}`, `{"weighted": [labels, weights]}`, or, for one array,
      `{"shape": [...], "dtype": "float32", "stored": "uint8"}`.
    """
    if isinstance(specs, Weighted):
        return {"weighted": [to_json(spec, value) for spec, value in zip(specs, stored, strict=True)]}
    if isinstance(specs, Mapping):
        return {"dict": {key: to_json(specs[key], stored[key]) for key in sorted(specs)}}
    if isinstance(specs, tuple):
        return {"tuple": [to_json(spec, value) for spec, value in zip(specs, stored, strict=True)]}
    return {"shape": specs.shape.as_list(), "dtype": specs.dtype.name, "stored": stored.dtype.name}


def from_json(name: str, content: Mapping[str, Any]) -> Structure:
    """Returns the columns that `to_json` describes, in their structure.

    Args:
      name: The name of the features: `"x"` or `"y"`.
      content: The JSON.

    Raises:
      KeyError: Something is missing.
    """
    if "weighted" in content:
        y, weight = content["weighted"]
        return Weighted(from_json(f"{name}/y", y), from_json(f"{name}/sample_weight", weight))
    if "dict" in content:
        return {key: from_json(f"{name}/{key}", value) for key, value in content["dict"].items()}
    if "tuple" in content:
        return tuple(from_json(f"{name}/{number}", value) for number, value in enumerate(content["tuple"]))
    stored, fetched = tf.as_dtype(content["stored"]), tf.as_dtype(content["dtype"])
    return Column(name, stored, tuple(content["shape"]), fetched)

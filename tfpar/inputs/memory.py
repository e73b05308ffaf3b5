"""Examples that are read once and kept in host memory, as stored."""

from __future__ import annotations

import dataclasses

from tfpar.inputs import bad_records
from tfpar.inputs.source import Batch, Held, Source, as_written

import numpy as np
import tensorflow as tf

AUTO_CACHE_BYTES = 1 << 30
_READ_AT_ONCE = 256


def keep_in_memory(source: Source, stored_bytes: int) -> Source:
    """Keeps every example, as stored, in host memory; they are read once, at first use.

    Args:
      source: The examples. With `skip`, those that cannot be used are left out.
      stored_bytes: Size of one example with its label as stored, in bytes.

    Returns:
      A portable source with the same examples in the same order. Its `load` raises ConfigError for
      an example that cannot be used, unless it is to be skipped.
    """
    info = source.info
    if info.num_examples == 0:
        return source
    kept = Held(lambda: _read_all(source))

    def read(indices: tf.Tensor) -> Batch:
        x, y, _ = kept.tensors()
        return tf.gather(x, indices), tf.gather(y, indices)

    def usable(indices: tf.Tensor) -> tf.Tensor:
        return tf.gather(kept.tensors()[2], indices)

    return dataclasses.replace(
        source,
        info=dataclasses.replace(info, storage="memory"),
        read=read,
        portable=True,
        kept_bytes=info.num_examples * stored_bytes,
        load=kept.tensors,
        usable=usable if source.skip else None,
        origin=source,
    )


def cached(source: Source, policy: str, stored_bytes: int) -> Source:
    """Applies `--cache` to a source that reads files.

    Args:
      source: A source with `storage="files"`.
      policy: `"memory"` keeps all examples, `"none"` keeps nothing, `"auto"` keeps them if they
        fit in 1 GiB.
      stored_bytes: Size of one example with its label as stored, in bytes.
    """
    total = source.info.num_examples * stored_bytes
    if policy == "memory" or (policy == "auto" and total <= AUTO_CACHE_BYTES):
        return keep_in_memory(source, stored_bytes)
    return source


def _read_all(source: Source) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All examples as stored, and which are usable: x [n, ...], y [n, ...], bool [n]."""
    info = source.info

    @as_written
    def read(indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        if source.skip:
            return bad_records.read_usable(source, indices)
        return (*source.read(indices), tf.ones_like(indices, tf.bool))

    examples = tf.data.Dataset.range(info.num_examples).batch(_READ_AT_ONCE)
    examples = examples.map(read, num_parallel_calls=tf.data.AUTOTUNE)
    arrays: list[np.ndarray] = []
    filled = 0
    try:
        for parts in examples.as_numpy_iterator():
            if not arrays:
                arrays = [np.empty((info.num_examples, *part.shape[1:]), part.dtype) for part in parts]
            for array, part in zip(arrays, parts, strict=True):
                array[filled : filled + len(part)] = part
            filled += len(parts[0])
    except bad_records.READ_ERRORS as error:
        some = range(filled, min(filled + _READ_AT_ONCE, info.num_examples))
        raise bad_records.explained(source, some, error) from None
    x, y, usable = arrays
    if not source.skip:  # else that was looked at on the way
        check_values(source, x, y)
    return x, y, usable


def check_values(source: Source, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Labels out of range and values that are not finite, in all examples at once.

    Args:
      source: Their description, and whether to skip them.
      x: Inputs [n, ...].
      y: Labels [n, ...].

    Returns:
      Which are usable, bool [n].

    Raises:
      BadRecordError: One is not, and they are not to be skipped; names the first.
    """
    wrong = bad_records.unusable(source.info, x, y)
    first = int(np.argmax(wrong)) if len(wrong) else 0
    if wrong.any() and not source.skip:
        bad = bad_records.bad_values(source.info, first, x[first], y[first])
        raise bad_records.error(source.info, bad, others=int(wrong.sum()) - 1)
    return ~wrong

"""Examples that are read once and kept in the memory of the host, as stored."""

from __future__ import annotations

import dataclasses

from tfpar.inputs import bad_records
from tfpar.inputs.source import Batch, LazyTensors, Source, no_autograph

import numpy as np
import tensorflow as tf

AUTO_CACHE_BYTES = 1 << 30
_READ_AT_ONCE = 256


def keep_in_memory(source: Source, stored_bytes: int) -> Source:
    """Keeps every example in the memory of the host, as stored; reads each one once, at first use.

    Args:
      source: The examples. With `skip`, bad ones are skipped.
      stored_bytes: Size of one example with its label as stored, in bytes.

    Returns:
      A portable source with the same examples in the same order. Its `load` raises ConfigError for
      a bad example, unless bad examples are skipped.
    """
    info = source.info
    if info.num_examples == 0:
        return source
    examples = LazyTensors(lambda: _read_all(source))

    def read(indices: tf.Tensor) -> Batch:
        x, y, _ = examples.tensors()
        return tf.gather(x, indices), tf.gather(y, indices)

    def usable(indices: tf.Tensor) -> tf.Tensor:
        return tf.gather(examples.tensors()[2], indices)

    return dataclasses.replace(
        source,
        info=dataclasses.replace(info, storage="memory"),
        read=read,
        portable=True,
        kept_bytes=info.num_examples * stored_bytes,
        load=examples.tensors,
        usable=usable if source.skip else None,
        origin=source,
    )


def apply_cache(source: Source, policy: str, stored_bytes: int) -> Source:
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
    """Reads all examples as stored, and which are usable: x [n, ...], y [n, ...], bool [n]."""
    info = source.info

    @no_autograph
    def read(indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        if source.skip:
            return bad_records.read_with_mask(source, indices)
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
        failed_batch = range(filled, min(filled + _READ_AT_ONCE, info.num_examples))
        raise bad_records.diagnose_read_error(source, failed_batch, error) from None
    x, y, usable = arrays
    if not source.skip:  # otherwise `read_with_mask` has checked them
        check_values(source, x, y)
    return x, y, usable


def check_values(source: Source, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Checks all examples at once for labels out of range and for values that are not finite.

    Args:
      source: The description of the examples, and whether to skip bad ones.
      x: Inputs [n, ...].
      y: Labels [n, ...].

    Returns:
      The mask of usable examples, bool [n].

    Raises:
      BadRecordError: An example is bad, and bad examples are not skipped; the message names the first one.
    """
    unusable = bad_records.unusable_rows(source.info, x, y)
    first = int(np.argmax(unusable)) if len(unusable) else 0
    if unusable.any() and not source.skip:
        bad = bad_records.diagnose_values(source.info, first, x[first], y[first])
        raise bad_records.bad_record_error(source.info, bad, others=int(unusable.sum()) - 1)
    return ~unusable

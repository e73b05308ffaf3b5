"""Examples that are read once and kept in the memory of the host, as stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfpar.inputs import bad_records
from tfpar.inputs.source import Batch, LazyTensors, Source, SourceInfo, no_autograph
from tfpar.inputs.structures import Structure

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
    skip = source.skip
    examples = LazyTensors(lambda: _read_all(dataclasses.replace(source, skip=skip)))

    def load() -> None:
        bad = np.flatnonzero(~examples.tensors()[-1].numpy())
        if len(bad) and not source.skip:  # a run that skips bad examples has read them
            raise bad_records.diagnose_read_error(source, bad.tolist())

    def load_usable() -> None:
        nonlocal skip
        skip = True
        examples.tensors()

    def read(indices: tf.Tensor) -> Batch:
        return gather_packed(info, examples.tensors(), indices)

    def usable(indices: tf.Tensor) -> tf.Tensor:
        return tf.gather(examples.tensors()[-1], indices)

    return dataclasses.replace(
        source,
        info=dataclasses.replace(info, storage="memory"),
        read=read,
        portable=True,
        kept_bytes=info.num_examples * stored_bytes,
        load=load,
        load_usable=load_usable,
        usable=usable,
        origin=source,
    )


def gather_packed(info: SourceInfo, tensors: Sequence[tf.Tensor], indices: tf.Tensor) -> Batch:
    """Returns examples `(x [n, ...], y [n, ...])` from the flat tensors of all examples.

    Args:
      info: The description of the examples; gives the structures.
      tensors: The leaves of the inputs and then of the labels, [examples, ...]; further tensors are not used.
      indices: int64 [n].
    """
    specs = (info.input_spec, info.target_spec)
    count = len(tf.nest.flatten(specs))
    x, y = tf.nest.pack_sequence_as(specs, [tf.gather(values, indices) for values in tensors[:count]])
    return x, y


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


def _read_all(source: Source) -> list[np.ndarray]:
    """Reads all examples as stored: the leaves of x [n, ...] and y [n, ...], and which are usable, bool [n]."""
    info = source.info

    @no_autograph
    def read(indices: tf.Tensor) -> tuple[tf.Tensor, ...]:
        if source.skip:
            return tuple(tf.nest.flatten(bad_records.read_with_mask(source, indices)))
        return (*tf.nest.flatten(source.read(indices)), tf.ones_like(indices, tf.bool))

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
    if not source.skip:  # otherwise `read_with_mask` has checked them
        x, y = tf.nest.pack_sequence_as((info.input_spec, info.target_spec), arrays[:-1])
        check_values(source, x, y)
    return arrays


def read_labels(source: Source) -> np.ndarray:
    """Returns the labels of all examples, which are one integer each, without keeping anything else: int64 [n].

    Args:
      source: The examples. If bad ones are skipped, their labels are 0.

    Raises:
      BadRecordError: An example cannot be read, and bad examples are not skipped; the message names it.
    """

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None], tf.int64)])
    def read(indices: tf.Tensor) -> tf.Tensor:
        if not source.skip:
            return tf.cast(source.read(indices)[1], tf.int64)
        _, labels, usable = bad_records.fetch_with_mask(source, indices)
        return tf.where(usable, tf.cast(labels, tf.int64), 0)

    read._omit_frequent_tracing_warning = True  # one for each source; see `TrainStep`
    parts, count = [np.zeros(0, np.int64)], source.info.num_examples
    for start in range(0, count, _READ_AT_ONCE):
        chunk = range(start, min(start + _READ_AT_ONCE, count))
        try:
            parts.append(read(tf.range(chunk.start, chunk.stop, dtype=tf.int64)).numpy())
        except bad_records.READ_ERRORS as error:
            raise bad_records.diagnose_read_error(source, chunk, error) from None
    return np.concatenate(parts)


def check_values(source: Source, x: Structure, y: Structure) -> np.ndarray:
    """Checks all examples at once for labels out of range and for values that are not finite.

    Args:
      source: The description of the examples, and whether to skip bad ones.
      x: Inputs, arrays [n, ...] in the structure of the source.
      y: Labels, arrays [n, ...], with their sample weights if there are any.

    Returns:
      The mask of usable examples, bool [n].

    Raises:
      BadRecordError: An example is bad, and bad examples are not skipped; the message names the first one.
    """
    unusable = bad_records.unusable_rows(source.info, x, y)
    first = int(np.argmax(unusable)) if len(unusable) else 0
    if unusable.any() and not source.skip:
        x_first, y_first = tf.nest.map_structure(lambda values: values[first], (x, y))
        bad = bad_records.diagnose_values(source.info, first, x_first, y_first)
        raise bad_records.bad_record_error(source.info, bad, others=int(unusable.sum()) - 1)
    return ~unusable

"""Bad examples: skipped and counted, or located and named in an error.

An example is bad if its record is truncated, fails its checksum or does not parse; if its image does not decode or
its shape differs from the declared shape; if its label is outside `[0, num_classes)`; if a value is NaN or infinite;
or if its file is missing.

With `--on_bad_record=fail` a bad example raises an error in a TensorFlow op somewhere inside the input pipeline, which
names neither the example nor the file. `locate_bad_example` reads the same examples again, one by one, and returns
both. That costs nothing until an error occurs, and needs no information from the op. With `skip`, `fetch_with_mask`
reads a batch as a whole, and in smaller parts only if that fails; a skipped example becomes padding of weight 0, so
the batches, their order and their number stay the same on every worker.
"""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Sequence

from tfpar.config import ConfigError
from tfpar.config.errors import TrainingError
from tfpar.inputs import structures
from tfpar.inputs.source import Read, Source, SourceInfo, Weighted, usable_rows
from tfpar.inputs.structures import Structure

import numpy as np
import tensorflow as tf

_READ_AT_ONCE = 256
# The Python exceptions that a failed read raises. TensorFlow 2.21 quotes a record that does not parse in its error
# message, which is then not valid UTF-8.
READ_ERRORS = (tf.errors.OpError, UnicodeDecodeError)
_LONGEST_REASON = 200
_SLOW_READS = 8
# A batch that cannot be read as a whole is read in parts of 16 examples, and a failing part example by example.
_PARTS = (16, 1)
# What TensorFlow adds around the text of an op's error.
_DECORATION = re.compile(
    r"\{\{[^}]*\}\}\s*|\s*\[\[.*|\s*\[Op:.*|^\w+(Error|Exception): |^Error in user-defined function .*? iterator: \S+: "
)
# Lines before the error text of an op that ran in a function: they say where the program created the op.
_AROUND = ("Graph execution error", "Detected at node", "<stack traces", "  ", "\t")


@dataclasses.dataclass(frozen=True)
class BadExample:
    """An example that cannot be used.

    Attributes:
      index: Its index in the split.
      file: The file that holds it; empty if it is not in a file.
      reason: What is wrong, as the end of a sentence whose subject is the example.
    """

    index: int
    file: str
    reason: str

    def describe(self, info: SourceInfo) -> str:
        """Describes the example in words, without the data set. A file says it all where each example has its own."""
        place = f" in file {self.file!r}" if self.file else ""
        number = "" if self.file and len(info.files) == info.num_examples else f" {self.index}"
        return f"{info.split} example{number}{place} {self.reason}"


class BadRecordError(ConfigError):
    """A bad example ended the run. The message names the data set, the file, the example and what is wrong."""


def bad_record_error(info: SourceInfo, bad: BadExample, others: int = 0) -> BadRecordError:
    """Returns the error for a bad example, which says what to do.

    Args:
      info: The source of the example.
      bad: The example.
      others: How many more bad examples there are.
    """
    more = f"; {others} more {'example is' if others == 1 else 'examples are'} bad too" if others else ""
    return BadRecordError(
        f"--dataset={info.name}: {bad.describe(info)}{more}. Repair or remove such examples, or train without them: "
        "--on_bad_record=skip."
    )


def transient_read_error(info: SourceInfo, reason: BaseException | None) -> TrainingError:
    """Returns the error for an example that could not be read at first, but was read without error the second time."""
    cause = f" ({error_text(reason)})" if reason else ""
    return TrainingError(
        f"--dataset={info.name}: an example of the {info.split} split could not be read{cause}, but reading it again "
        "works: the storage failed temporarily. Restart the run, which resumes from its last checkpoint, or skip "
        "unreadable examples: --on_bad_record=skip."
    )


def diagnose_read_error(source: Source, indices: Sequence[int], reason: BaseException | None = None) -> Exception:
    """Reads examples again after an error: returns `bad_record_error`, or `transient_read_error` if all are usable now.

    Args:
      source: The source of the examples.
      indices: The examples.
      reason: The exception that the first read raised.
    """
    bad_examples = locate_bad_example(source, indices)
    return bad_record_error(source.info, bad_examples[0]) if bad_examples else transient_read_error(source.info, reason)


def unusable_rows(info: SourceInfo, x: Structure, y: Structure) -> np.ndarray:
    """Returns which examples have a label out of range or a value that is not finite: bool [n].

    Args:
      info: The description of their source.
      x: Inputs, arrays [n, ...] in the structure of the source, as stored or as fetched.
      y: Labels, arrays [n, ...], with their sample weights if there are any.
    """
    unusable = np.zeros(len(structures.first_leaf(x)), bool)
    for part, classes in ((x, 0), (y, info.num_classes)):
        for values in tf.nest.flatten(part):
            bad = _bad_values(values, classes, info.ignore_class)
            if bad is not None:
                unusable |= bad.reshape(len(values), -1 if values.size else 0).any(axis=1)
    return unusable


def _bad_values(values: np.ndarray, classes: int, ignore_class: int | None) -> np.ndarray | None:
    """Returns which values are no classes or not finite: bool [...]; None if nothing can be wrong with them."""
    if structures.is_integer(values.dtype):
        if not classes:
            return None
        outside = (values < 0) | (values >= classes)
        return outside if ignore_class is None else outside & (values != ignore_class)
    if values.dtype.kind in "OSUb":  # text and booleans
        return None
    if values.dtype != np.float64:  # bfloat16 is not a subtype of np.floating
        values = values.astype(np.float32, copy=False)
    return ~np.isfinite(values)


def diagnose_values(info: SourceInfo, index: int, x: Structure, y: Structure) -> BadExample:
    """Returns what is wrong with an example that `unusable_rows` reports.

    Args:
      info: The description of its source.
      index: Its index in the split.
      x: Its input, arrays [...] in the structure of the source.
      y: Its label, with its sample weights if there are any.

    Raises:
      ValueError: The example is usable.
    """
    labels = y.y if isinstance(y, Weighted) else y
    weights = y.sample_weight if isinstance(y, Weighted) else ()
    for what, part in (("label", labels), ("input", x), ("sample weight", weights)):
        for path, leaf in structures.named_leaves(part):
            values = np.asarray(leaf)
            bad = _bad_values(values, info.num_classes if what == "label" else 0, info.ignore_class)
            if bad is None or not bad.any():
                continue
            which = f"{what} {path!r}" if path else what
            if structures.is_integer(values.dtype):
                label = values[bad].flat[0]
                reason = f"has label {label}, but labels must be 0 to {info.num_classes - 1}"
                if info.num_classes <= 1 and label < 0:  # it was found out from labels, none of them larger than 0
                    reason = f"has label {label}, but labels are class numbers, from 0 on"
                elif info.num_classes == 1:
                    reason = f"has label {label}, but num_classes=1 allows 0 alone; labels 0 and 1 are two classes"
                if label < 0:
                    reason += ", or floating point if they are no classes"
            else:
                reason = f"has NaN or infinity in its {which} ({int(bad.sum())} of {values.size} values)"
            return BadExample(index, file_of(info, index), reason)
    raise ValueError(f"example {index} is usable")


def file_of(info: SourceInfo, index: int) -> str:
    """Returns the file that holds an example; empty if the example is not in a file."""
    if not info.files:
        return ""
    return info.files[int(np.searchsorted(np.cumsum(info.records_per_file), index, side="right"))]


def locate_bad_example(
    source: Source, indices: Sequence[int] | np.ndarray, *, limit: int = 1, seconds: float = math.inf
) -> list[BadExample]:
    """Reads examples again and returns the bad ones with the reason for each.

    Args:
      source: The source; if it keeps the examples in memory, their files are read again.
      indices: The examples to read, in this order.
      limit: The largest number of bad examples to return.
      seconds: How long to search.

    Returns:
      Up to `limit` bad examples, in the order of `indices`. An empty list does not prove that an earlier read error
      was wrong: the file system may have recovered.
    """
    source = source.origin or source
    deadline = time.monotonic() + seconds
    fetch, read = (
        tf.function(reader, input_signature=[tf.TensorSpec([None], tf.int64)], autograph=False)
        for reader in (source.fetch, source.read)
    )
    # It may be called for many sources, which TensorFlow takes for a loop around a `tf.function`.
    fetch._omit_frequent_tracing_warning = read._omit_frequent_tracing_warning = True
    remaining = np.array(list(dict.fromkeys(int(index) for index in indices)), np.int64)
    bad_examples: list[BadExample] = []
    for first in range(0, len(remaining), _READ_AT_ONCE):
        chunk = remaining[first : first + _READ_AT_ONCE]
        try:
            x, y = _as_arrays(fetch(tf.constant(chunk)))
            suspects = np.flatnonzero(unusable_rows(source.info, x, y))
        except READ_ERRORS:
            suspects = np.arange(len(chunk))
        for position in suspects:
            if len(bad_examples) >= limit or time.monotonic() > deadline:
                return bad_examples
            bad = _examine(source.info, read, int(chunk[position]))
            if bad is not None:
                bad_examples.append(bad)
    return bad_examples


def _as_arrays(batch: Structure) -> Structure:
    return tf.nest.map_structure(lambda part: part.numpy(), batch)


def _examine(info: SourceInfo, read: Read, index: int) -> BadExample | None:
    try:
        x, y = _as_arrays(read(tf.constant([index], tf.int64)))
    except READ_ERRORS as error:
        return BadExample(index, file_of(info, index), f"cannot be read: {error_text(error)}")
    for article, what, part, specs in (("an", "input", x, info.input_spec), ("a", "label", y, info.target_spec)):
        for values, (path, spec) in zip(tf.nest.flatten(part), structures.named_leaves(specs), strict=True):
            if not spec.shape.is_compatible_with(values.shape[1:]):
                which = f"{what} {path!r}" if path else what
                reason = f"has {article} {which} of shape {values.shape[1:]}, but the declared shape is {spec.shape}"
                return BadExample(index, file_of(info, index), reason)
    if not unusable_rows(info, x, y)[0]:
        return None
    return diagnose_values(info, index, *tf.nest.map_structure(lambda values: values[0], (x, y)))


def error_text(error: BaseException) -> str:
    """Returns the message of an error in one printable line, without TensorFlow's node names and traceback."""
    text = str(error.message if isinstance(error, tf.errors.OpError) else error)
    if isinstance(error, UnicodeDecodeError):
        text = error.object.decode(errors="replace")
    first_of_several = re.search(r"root error\(s\) found\.\s*\(0\) \w+:(.*)", text)
    lines = [first_of_several[1].strip()] if first_of_several else text.splitlines()
    line = next((line for line in lines if line.strip() and not line.startswith(_AROUND)), type(error).__name__)
    for _ in range(3):  # decorations are nested
        line = _DECORATION.sub("", line.strip())
    line = "".join(letter if letter.isprintable() else "?" for letter in line.strip().rstrip("."))
    return line if len(line) <= _LONGEST_REASON else line[:_LONGEST_REASON] + "..."


# Skipping bad examples.


def fetch_with_mask(source: Source, indices: tf.Tensor) -> tuple[Structure, Structure, tf.Tensor]:
    """Reads a batch of examples and returns a mask of the usable ones; a graph function.

    Args:
      source: The examples.
      indices: int64 [n].

    Returns:
      x [n, ...] and y [n, ...] as `Source.fetch` returns them, and the mask of usable examples, bool [n]. A usable
      example of the same batch replaces each bad one, so that it does a model no more harm than padding does (zeros
      would affect batch statistics, and a loss may not be finite at 0); the values are zeros if the whole batch is bad.
    """
    info = source.info
    if info.storage == "files":
        x, y, usable = read_with_mask(source, indices)
    else:
        x, y = source.read(indices)
        if source.usable is None:
            return (*source.cast_and_scale(x, y), tf.ones_like(indices, tf.bool))
        usable = source.usable(indices)
    x = structures.ensure_rows(x, indices, info.input_spec)
    y = structures.ensure_rows(y, indices, info.target_spec)
    x, y = source.cast_and_scale(
        *tf.cond(tf.reduce_all(usable), lambda: (x, y), lambda: _replace_unusable(x, y, usable))
    )
    x = structures.ensure_rows(x, indices, info.input_spec)
    return x, structures.ensure_rows(y, indices, info.target_spec), usable


def _replace_unusable(x: Structure, y: Structure, usable: tf.Tensor) -> tuple[Structure, Structure]:
    """Replaces the bad examples with the first usable one; with zeros if all are bad."""
    positions = tf.range(tf.size(usable, tf.int64), dtype=tf.int64)
    source = tf.where(usable, positions, tf.argmax(tf.cast(usable, tf.int32)))
    any_usable = tf.reduce_any(usable)
    x, y = tf.nest.map_structure(
        lambda part: tf.where(any_usable, tf.gather(part, source), tf.zeros_like(part)), (x, y)
    )
    return x, y


def read_with_mask(source: Source, indices: tf.Tensor) -> tuple[Structure, Structure, tf.Tensor]:
    """Reads a batch as a whole, or in smaller and smaller parts where that fails; a graph function.

    Args:
      source: The examples.
      indices: int64 [n].

    Returns:
      x [n, ...] and y [n, ...] as stored, zeros where reading failed; and the mask of usable examples, bool [n].
    """
    info = source.info

    def read(chunk: tf.Tensor) -> tuple[Structure, Structure, tf.Tensor]:
        x, y = source.read(chunk)
        x = structures.ensure_rows(x, chunk, info.input_spec)
        y = structures.ensure_rows(y, chunk, info.target_spec)
        return x, y, _are_usable(info, x, y)

    def attempt(chunk: tf.Tensor, sizes: Sequence[int]) -> tuple[Structure, Structure, tf.Tensor]:
        # Data sets, because inside a graph only they can continue after an error. The second one does not start unless
        # the first one yields nothing.
        whole = tf.data.Dataset.from_tensors(chunk).map(read)
        if sizes:
            parts = tf.data.Dataset.from_tensor_slices(chunk).batch(sizes[0])
            parts = parts.map(lambda part: attempt(part, sizes[1:]), num_parallel_calls=_SLOW_READS)
            fallback = parts.unbatch().batch(tf.shape(chunk, tf.int64)[0])
        else:
            zeros = tf.nest.map_structure(lambda spec: tf.zeros([1, *spec.shape[1:]], spec.dtype), whole.element_spec)
            fallback = tf.data.Dataset.from_tensors(zeros)
        return whole.ignore_errors().concatenate(fallback).take(1).get_single_element()

    return attempt(indices, _PARTS)


def _are_usable(info: SourceInfo, x: Structure, y: Structure) -> tf.Tensor:
    """The negation of `unusable_rows`, as graph operations."""
    usable = tf.ones(tf.shape(structures.first_leaf(x))[:1], tf.bool)
    for values in tf.nest.flatten(x):
        usable &= usable_rows(values)
    for values in tf.nest.flatten(y):
        usable &= usable_rows(values, info.num_classes, info.ignore_class)
    return usable

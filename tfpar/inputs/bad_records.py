"""Examples that cannot be used: left out and counted, or found again and named.

What makes one unusable: its record is torn, fails its checksum or does not parse; its image does not decode or has
another shape than declared; its label is outside `[0, num_classes)`; a value is NaN or infinite; its file is gone.

With `--on_bad_record=fail` such an example is an error of a TensorFlow op somewhere inside the input pipeline, which
knows neither example nor file. Reading the same examples once more, one by one, tells both: `find`. That costs
nothing until something is wrong, and needs no word from the op. With `skip`, `fetch_usable` reads a batch as one
whole, and only what fails in parts; what is left out becomes padding of weight 0, so that batches, their
order and their number stay what they were, on every worker.
"""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Sequence

from tfpar.config import ConfigError
from tfpar.config.errors import TrainingError
from tfpar.inputs.source import Read, Source, SourceInfo, usable_rows

import numpy as np
import tensorflow as tf

_READ_AT_ONCE = 256
# What an op's failure is in Python. TensorFlow 2.21 quotes a record that does not parse in its message, and the
# message of the exception is then no UTF-8.
READ_ERRORS = (tf.errors.OpError, UnicodeDecodeError)
_LONGEST_REASON = 200
_SLOW_READS = 8
# A batch that cannot be read as a whole is read in parts of these sizes, one inside the other.
_PARTS = (16, 1)
# What TensorFlow puts around the words of an op's error.
_DECORATION = re.compile(
    r"\{\{[^}]*\}\}\s*|\s*\[\[.*|\s*\[Op:.*|^\w+(Error|Exception): |^Error in user-defined function .*? iterator: \S+: "
)
# Lines before the words of an op that ran in a function: where in the program it was made.
_AROUND = ("Graph execution error", "Detected at node", "<stack traces", "  ", "\t")


@dataclasses.dataclass(frozen=True)
class BadExample:
    """An example that cannot be used.

    Attributes:
      index: Its number in the split.
      file: Its file; empty if it is in none.
      reason: What is wrong, as the end of a sentence that begins with the example.
    """

    index: int
    file: str
    reason: str

    def describe(self, info: SourceInfo) -> str:
        """The example in words, without data set."""
        place = f" in file {self.file!r}" if self.file else ""
        return f"{info.split} example {self.index}{place} {self.reason}"


class BadRecordError(ConfigError):
    """An example that cannot be used ended the run. The message names data set, file, example and what is wrong."""


def error(info: SourceInfo, bad: BadExample, others: int = 0) -> BadRecordError:
    """The error for an example that cannot be used, with the ways out.

    Args:
      info: Where it comes from.
      bad: The example.
      others: How many more are known.
    """
    more = f"; {others} more cannot be used either" if others else ""
    return BadRecordError(
        f"--dataset={info.name}: {bad.describe(info)}{more}. Repair or remove such examples, or train without them: "
        "--on_bad_record=skip."
    )


def passing_error(info: SourceInfo, reason: BaseException | None) -> TrainingError:
    """The error for an example that could not be read, though reading it again works."""
    said = f" ({words(reason)})" if reason else ""
    return TrainingError(
        f"--dataset={info.name}: an example of the {info.split} split could not be read{said}, and reading it again "
        "works: the storage failed for a moment. Start again (a run goes on from its last checkpoint), or leave out "
        "what cannot be read: --on_bad_record=skip."
    )


def explained(source: Source, indices: Sequence[int], reason: BaseException | None = None) -> Exception:
    """The error for examples of which one cannot be used: `error`, or `passing_error` if all can by now.

    Args:
      source: Where they come from.
      indices: The examples.
      reason: What was raised when they were read.
    """
    found = find(source, indices)
    return error(source.info, found[0]) if found else passing_error(source.info, reason)


def unusable(info: SourceInfo, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Which of some examples have a label out of range or a value that is not finite: bool [n].

    Args:
      info: Their description.
      x: Inputs [n, ...], as stored or as fetched.
      y: Labels [n, ...].
    """
    wrong = np.zeros(len(x), bool)
    for values, classes in ((x, 0), (y, info.num_classes)):
        if np.issubdtype(values.dtype, np.integer):
            bad = (values < 0) | (values >= classes) if classes else np.zeros(len(values), bool)
        else:  # bfloat16 is no np.floating
            bad = ~np.isfinite(values.astype(np.float32, copy=False))
        wrong |= bad.reshape(len(values), -1 if values.size else 0).any(axis=1)
    return wrong


def bad_values(info: SourceInfo, index: int, x: np.ndarray, y: np.ndarray) -> BadExample:
    """Says what is wrong with an example that `unusable` found.

    Args:
      info: Its description.
      index: Its number in the split.
      x: Its input, [...].
      y: Its label, [...].
    """
    if np.issubdtype(y.dtype, np.integer) and ((y < 0) | (y >= info.num_classes)).any():
        outside = y[(y < 0) | (y >= info.num_classes)]
        label = f"label {outside.flat[0]}"
        return BadExample(index, file_of(info, index), f"has {label}, and labels are 0 to {info.num_classes - 1}")
    for values, what in ((x, "input"), (y, "label")):
        if not np.issubdtype(values.dtype, np.integer):
            count = int(np.sum(~np.isfinite(values.astype(np.float32, copy=False))))
            if count:
                reason = f"has NaN or infinity in its {what} ({count} of {values.size} values)"
                return BadExample(index, file_of(info, index), reason)
    raise ValueError(f"example {index} is usable")


def file_of(info: SourceInfo, index: int) -> str:
    """The file that holds an example; empty if none does."""
    if not info.files:
        return ""
    return info.files[int(np.searchsorted(np.cumsum(info.records_per_file), index, side="right"))]


def find(
    source: Source, indices: Sequence[int] | np.ndarray, *, limit: int = 1, seconds: float = math.inf
) -> list[BadExample]:
    """Reads examples once more and says which cannot be used, and why.

    Args:
      source: The examples; of those kept in memory, their files are read again.
      indices: Which to look at, in this order.
      limit: How many to look for.
      seconds: For how long to look.

    Returns:
      Up to `limit` examples, in the order given. None does not mean that all is well with one that could not be read
      before: a file system may have come back.
    """
    source = source.origin or source
    deadline = time.monotonic() + seconds
    fetch, read = (
        tf.function(reader, input_signature=[tf.TensorSpec([None], tf.int64)], autograph=False)
        for reader in (source.fetch, source.read)
    )
    remaining = np.array(list(dict.fromkeys(int(index) for index in indices)), np.int64)
    found: list[BadExample] = []
    for first in range(0, len(remaining), _READ_AT_ONCE):
        some = remaining[first : first + _READ_AT_ONCE]
        try:
            x, y = (part.numpy() for part in fetch(tf.constant(some)))
            suspects = np.flatnonzero(unusable(source.info, x, y))
        except READ_ERRORS:
            suspects = np.arange(len(some))
        for position in suspects:
            if len(found) >= limit or time.monotonic() > deadline:
                return found
            bad = _examine(source.info, read, int(some[position]))
            if bad is not None:
                found.append(bad)
    return found


def _examine(info: SourceInfo, read: Read, index: int) -> BadExample | None:
    try:
        x, y = (part.numpy()[0] for part in read(tf.constant([index], tf.int64)))
    except READ_ERRORS as wrong:
        return BadExample(index, file_of(info, index), f"cannot be read: {words(wrong)}")
    for what, values, spec in (("input", x, info.input_spec), ("label", y, info.label_spec)):
        if not spec.shape.is_compatible_with(values.shape):
            reason = f"has an {what} of shape {values.shape}, declared is {spec.shape}".replace("an label", "a label")
            return BadExample(index, file_of(info, index), reason)
    return bad_values(info, index, x, y) if unusable(info, x[None], y[None])[0] else None


def words(wrong: BaseException) -> str:
    """What an error says, in one printable line without TensorFlow's node names and traceback."""
    text = str(wrong.message if isinstance(wrong, tf.errors.OpError) else wrong)
    if isinstance(wrong, UnicodeDecodeError):
        text = wrong.object.decode(errors="replace")
    several = re.search(r"root error\(s\) found\.\s*\(0\) \w+:(.*)", text)
    lines = [several[1].strip()] if several else text.splitlines()
    line = next((line for line in lines if line.strip() and not line.startswith(_AROUND)), type(wrong).__name__)
    for _ in range(3):  # decorations come one inside the other
        line = _DECORATION.sub("", line.strip())
    line = "".join(letter if letter.isprintable() else "?" for letter in line.strip().rstrip("."))
    return line if len(line) <= _LONGEST_REASON else line[:_LONGEST_REASON] + "..."


# Leaving out.


def fetch_usable(source: Source, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Reads a batch of examples, of which some may be unusable; a graph function.

    Args:
      source: The examples.
      indices: int64 [n].

    Returns:
      x [n, *input_spec.shape] and y [n, *label_spec.shape] as `Source.fetch` gives them, and which are usable: bool
      [n]. In the place of one that is not stands another of the same batch, which costs a model nothing that padding
      would not (batch statistics, losses that are not finite at 0); zeros if there is none.
    """
    info = source.info
    if info.storage == "files":
        x, y, usable = read_usable(source, indices)
    else:
        x, y = source.read(indices)
        if source.usable is None:
            return (*source.finished(x, y), tf.ones_like(indices, tf.bool))
        usable = source.usable(indices)
    x = tf.ensure_shape(x, indices.shape + info.input_spec.shape)
    y = tf.ensure_shape(y, indices.shape + info.label_spec.shape)
    x, y = source.finished(*tf.cond(tf.reduce_all(usable), lambda: (x, y), lambda: _filled(x, y, usable)))
    shapes = (indices.shape + info.input_spec.shape, indices.shape + info.label_spec.shape)
    return tf.ensure_shape(x, shapes[0]), tf.ensure_shape(y, shapes[1]), usable


def _filled(x: tf.Tensor, y: tf.Tensor, usable: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The first usable example in the place of those that are not; zeros if none is."""
    positions = tf.range(tf.size(usable, tf.int64), dtype=tf.int64)
    source = tf.where(usable, positions, tf.argmax(tf.cast(usable, tf.int32)))
    some = tf.reduce_any(usable)
    return tuple(tf.where(some, tf.gather(part, source), tf.zeros_like(part)) for part in (x, y))


def read_usable(source: Source, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Reads a batch in one go, or in ever smaller parts where that fails; a graph function.

    Args:
      source: The examples.
      indices: int64 [n].

    Returns:
      x [n, ...] and y [n, ...] as stored, zeros where reading failed; and which are usable, bool [n].
    """
    info = source.info

    def read(some: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        x, y = source.read(some)
        x = tf.ensure_shape(x, some.shape + info.input_spec.shape)
        y = tf.ensure_shape(y, some.shape + info.label_spec.shape)
        return x, y, _are_usable(info, x, y)

    def attempt(some: tf.Tensor, sizes: Sequence[int]) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        # Data sets, because they are what can go on after an error inside a graph. The second is not begun unless the
        # first gives nothing.
        whole = tf.data.Dataset.from_tensors(some).map(read)
        if sizes:
            parts = tf.data.Dataset.from_tensor_slices(some).batch(sizes[0])
            parts = parts.map(lambda part: attempt(part, sizes[1:]), num_parallel_calls=_SLOW_READS)
            otherwise = parts.unbatch().batch(tf.shape(some, tf.int64)[0])
        else:
            zeros = [tf.zeros([1, *spec.shape[1:]], spec.dtype) for spec in whole.element_spec]
            otherwise = tf.data.Dataset.from_tensors(tuple(zeros))
        return whole.ignore_errors().concatenate(otherwise).take(1).get_single_element()

    return attempt(indices, _PARTS)


def _are_usable(info: SourceInfo, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """`unusable` in the graph, and its opposite."""
    return usable_rows(x) & usable_rows(y, info.num_classes)

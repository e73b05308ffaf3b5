"""What a source of examples is: a description and random access, a batch at a time.

A source knows nothing of epochs, batches or workers; `tfpar.inputs.pipeline` decides which
indices are read when. Reading by index, many at once, is what makes the order a pure function of
(seed, epoch, position) and leaves no per-example cost in Python or tf.data.

Building a source runs no TensorFlow operation: the first one initialises the runtime, after which
neither devices nor collectives can be set up. What is kept in memory becomes tensors at first use.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import tensorflow as tf

CLASSIFICATION = "classification"
LANGUAGE_MODEL = "language_model"
Batch = tuple[tf.Tensor, tf.Tensor]
Read = Callable[[tf.Tensor], Batch]
Function = TypeVar("Function", bound=Callable)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceInfo:
    """Description of a source.

    Attributes:
      name: The source as `--dataset` writes it; used in reports and errors.
      task: `"classification"` or `"language_model"`.
      split: `"train"` or `"validation"`.
      num_examples: How many examples there are, `>= 0`.
      input_spec: Shape and dtype of one input as `Source.fetch` gives it. Images are float32
        [height, width, channels] in [0, 1]; text is int32 [sequence_length].
      label_spec: Shape and dtype of one label: int32 [] or, for text, int32 [sequence_length].
      num_classes: Labels lie in `[0, num_classes)`. For text, the size of the vocabulary.
      class_names: Names of the classes in label order; empty if unknown.
      files: The files that hold the examples, in the order of the examples; empty if the
        examples are not in files.
      records_per_file: How many examples each of `files` holds.
      storage: `"memory"` (decoded once and kept), `"files"` (read each epoch) or `"generated"`.
      decode: For text: token ids (any shape of integers, flattened) to a string.
      digest: Of the examples' content, where they are in memory anyway; else empty.
    """

    name: str
    task: str
    split: str
    num_examples: int
    input_spec: tf.TensorSpec
    label_spec: tf.TensorSpec
    num_classes: int
    class_names: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    records_per_file: tuple[int, ...] = ()
    storage: str = "files"
    decode: Callable[[np.ndarray], str] | None = None
    digest: str = ""

    def __post_init__(self) -> None:
        if self.files and (
            len(self.files) != len(self.records_per_file) or sum(self.records_per_file) != self.num_examples
        ):
            raise ValueError(
                f"{self.name}: {len(self.files)} files with {sum(self.records_per_file)} records in "
                f"{len(self.records_per_file)} entries do not make {self.num_examples} examples"
            )

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that differ when the examples' number, shape or files differ.

        Workers compare it to find out that they do not see the same data; a resumed run compares
        it with its checkpoint. File contents are not read and directories do not count, so the
        same data may be mounted elsewhere. Of arrays it is the content that counts.
        """
        files = [name.replace("\\", "/").rsplit("/", 1)[-1] for name in self.files]
        parts = [self.task, self.split, self.num_examples, self.num_classes, str(self.input_spec.shape)]
        text = json.dumps([*parts, files, self.records_per_file, *([self.digest] if self.digest else [])])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def as_written(function: Function) -> Function:
    """The function, for `Dataset.map`, without AutoGraph: half a second for what uses TensorFlow's ops alone."""
    return tf.autograph.experimental.do_not_convert(function)


class Held:
    """Arrays that become tensors in host memory when they are first used, and not before.

    Args:
      make: Gives the arrays, or reads them; called once.
    """

    def __init__(self, make: Callable[[], Sequence[np.ndarray]]):
        self._make: Callable[[], Sequence[np.ndarray]] | None = make
        self._tensors: tuple[tf.Tensor, ...] = ()
        self._lock = threading.Lock()

    @as_written  # AutoGraph would rewrite the error of a source that cannot be read
    def tensors(self) -> tuple[tf.Tensor, ...]:
        """The tensors. Functions capture them by reference; NumPy arrays they would copy into the graph."""
        with self._lock:
            if self._make is not None:
                # The first use may be inside the tracing of a function, and for a device that is not of this host.
                with tf.init_scope(), tf.device(None), tf.device("CPU:0"):
                    self._tensors = tuple(tf.constant(array) for array in self._make())
                self._make = None  # the arrays themselves are no longer needed
        return self._tensors


def _nothing() -> None:
    """What sources do that keep nothing in memory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """Examples by index.

    `read` is the whole of what a new kind of source has to write. It maps int64 indices [n] to
    `(x, y)` of shapes [n, ...] in the compact dtypes they are stored in (uint8 for pixels and
    bytes), as TensorFlow ops (no AutoGraph) with static trailing shapes; it may be traced many times
    and called from several threads. `fetch` turns that into what a model takes. Caches and record files keep
    the compact form.

    Attributes:
      info: The description.
      read: int64 [n] -> (x [n, ...], y [n, ...]) as stored.
      scale: Factor from stored to fetched inputs; 1/255 for pixels. Ignored for integer inputs.
      portable: Whether `read` may be sent to another process (a tf.data service worker): False
        if it calls Python or reads files by descriptor.
      kept_bytes: Host memory that the kept examples take, in bytes; 0 unless they are in memory.
      load: Brings into memory what is kept there; otherwise the first `read` does. Raises
        ConfigError for examples that cannot be used, unless they are to be skipped.
      skip: Whether examples that cannot be used are left out (`--on_bad_record=skip`); a pipeline
        does so too where its own configuration says it.
      usable: int64 [n] -> bool [n], for examples in memory of which some are to be left out.
      origin: Where examples that are kept in memory were read from; tells what is wrong with one.
    """

    info: SourceInfo
    read: Read
    scale: float = 1.0
    portable: bool = True
    kept_bytes: int = 0
    load: Callable[[], object] = _nothing
    skip: bool = False
    usable: Callable[[tf.Tensor], tf.Tensor] | None = None
    origin: Source | None = None

    def fetch(self, indices: tf.Tensor) -> Batch:
        """Reads a batch of examples; a graph function.

        Args:
          indices: int64 [n], every value in `[0, num_examples)`.

        Returns:
          x [n, *input_spec.shape] and y [n, *label_spec.shape], in the dtypes of the specs.

        Raises:
          tf.errors.OpError: When run, if an example cannot be read, has a label outside
            `[0, num_classes)`, or is not finite. `tfpar.inputs.bad_records` tells which one and why.
            Examples in memory were checked when they were loaded.
        """
        x, y = self.read(indices)
        info = self.info
        x = tf.ensure_shape(x, indices.shape + info.input_spec.shape)
        y = tf.ensure_shape(y, indices.shape + info.label_spec.shape)
        if info.storage == "files":
            x, y = _checked(x, "inputs"), _checked(y, "labels", info.num_classes)
        return self.finished(x, y)

    def finished(self, x: tf.Tensor, y: tf.Tensor) -> Batch:
        """Stored examples `[n, ...]` as `fetch` gives them: in the dtypes of the specs, inputs scaled."""
        info = self.info
        x, y = tf.cast(x, info.input_spec.dtype), tf.cast(y, info.label_spec.dtype)
        if info.input_spec.dtype.is_floating and self.scale != 1.0:
            x = x * tf.constant(self.scale, x.dtype)
        return x, y


def decode_bytes(tokens: np.ndarray) -> str:
    """Byte tokens (0 to 255) as text; what is not UTF-8 becomes U+FFFD."""
    return np.asarray(tokens).astype(np.uint8).tobytes().decode("utf-8", errors="replace")


def held_out(names: Sequence[str], count: int) -> list[bool]:
    """Which of these names are held out for validation, by the hashes of the names alone.

    The choice looks random, is the same on every machine and for every seed, and changes little
    when names come or go: the `count` names with the lowest SHA-256 are taken.

    Args:
      names: Different names, e.g. paths relative to the data set.
      count: How many to hold out.
    """
    ranked = sorted(range(len(names)), key=lambda number: hashlib.sha256(names[number].encode()).digest())
    chosen = set(ranked[:count])
    return [number in chosen for number in range(len(names))]


def finite_rows(values: tf.Tensor) -> tf.Tensor:
    """Which rows of floating-point values [n, ...] are finite: bool [n].

    A sum of squares is one quick pass and finite only if all values are. Where it is not, which large values do too,
    each is looked at: five times the work (TensorFlow 2.21, CPU).
    """

    def each() -> tf.Tensor:
        return tf.reduce_all(tf.math.is_finite(values), axis=list(range(1, len(values.shape))))

    some = tf.ones(tf.shape(values)[:1], tf.bool)
    return tf.cond(tf.math.is_finite(tf.nn.l2_loss(values)), lambda: some, each)


def usable_rows(values: tf.Tensor, num_classes: int = 0) -> tf.Tensor:
    """Which rows of values [n, ...] are of use: floating-point ones finite, classes in `[0, num_classes)`; bool [n]."""
    if values.dtype.is_floating:
        return finite_rows(values)
    if not num_classes:
        return tf.ones(tf.shape(values)[:1], tf.bool)
    wide = tf.cast(values, tf.int64)
    return tf.reduce_all((wide >= 0) & (wide < num_classes), axis=list(range(1, len(values.shape))))


def _checked(values: tf.Tensor, what: str, num_classes: int = 0) -> tf.Tensor:
    """The same values, or an error when run where `usable_rows` finds some that are not."""
    if values.dtype.is_integer and (
        not num_classes or (values.dtype.is_unsigned and values.dtype.max < num_classes)
    ):  # nothing can be wrong
        return values
    said = f"{what} are not finite" if values.dtype.is_floating else f"{what} outside [0, {num_classes})"
    check = tf.debugging.Assert(tf.reduce_all(usable_rows(values, num_classes)), [said])
    with tf.control_dependencies([check] if check is not None else []):
        return tf.identity(values)

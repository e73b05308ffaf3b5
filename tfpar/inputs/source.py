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

from tfpar.config import ConfigError

import numpy as np
import tensorflow as tf

CLASSIFICATION = "classification"
LANGUAGE_MODEL = "language_model"
AUTO_CACHE_BYTES = 1 << 30
_READ_AT_ONCE = 256

Batch = tuple[tf.Tensor, tf.Tensor]
Read = Callable[[tf.Tensor], Batch]


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
        same data may be mounted elsewhere.
        """
        files = [name.replace("\\", "/").rsplit("/", 1)[-1] for name in self.files]
        parts = [self.task, self.split, self.num_examples, self.num_classes, str(self.input_spec.shape)]
        text = json.dumps([*parts, files, self.records_per_file])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class Held:
    """Arrays that become tensors in host memory when they are first used, and not before.

    Args:
      make: Gives the arrays, or reads them; called once.
    """

    def __init__(self, make: Callable[[], Sequence[np.ndarray]]):
        self._make: Callable[[], Sequence[np.ndarray]] | None = make
        self._tensors: tuple[tf.Tensor, ...] = ()
        self._lock = threading.Lock()

    # AutoGraph would follow the pipeline's functions into here and rewrite the error of a source that cannot be read.
    @tf.autograph.experimental.do_not_convert
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
    bytes), as TensorFlow ops with static trailing shapes; it may be traced many times and called
    from several threads. `fetch` turns that into what a model takes. Caches and record files keep
    the compact form.

    Attributes:
      info: The description.
      read: int64 [n] -> (x [n, ...], y [n, ...]) as stored.
      scale: Factor from stored to fetched inputs; 1/255 for pixels. Ignored for integer inputs.
      portable: Whether `read` may be sent to another process (a tf.data service worker): False
        if it calls Python or reads files by descriptor.
      kept_bytes: Host memory that the kept examples take, in bytes; 0 unless they are in memory.
      load: Brings into memory what is kept there; otherwise the first `read` does. Raises
        ConfigError for examples that cannot be read.
    """

    info: SourceInfo
    read: Read
    scale: float = 1.0
    portable: bool = True
    kept_bytes: int = 0
    load: Callable[[], object] = _nothing

    def fetch(self, indices: tf.Tensor) -> Batch:
        """Reads a batch of examples; a graph function.

        Args:
          indices: int64 [n], every value in `[0, num_examples)`.

        Returns:
          x [n, *input_spec.shape] and y [n, *label_spec.shape], in the dtypes of the specs.

        Raises:
          tf.errors.InvalidArgumentError: When run, if a label is outside `[0, num_classes)`;
            names the data set and the example. Sources in memory were checked when built.
        """
        x, y = self.read(indices)
        info = self.info
        x = tf.cast(tf.ensure_shape(x, indices.shape + info.input_spec.shape), info.input_spec.dtype)
        y = tf.cast(tf.ensure_shape(y, indices.shape + info.label_spec.shape), info.label_spec.dtype)
        if info.input_spec.dtype.is_floating and self.scale != 1.0:
            x = x * tf.constant(self.scale, x.dtype)
        if info.storage == "files" and info.task == CLASSIFICATION:
            y = _checked_labels(info, indices, y)
        return x, y


def keep_in_memory(source: Source, stored_bytes: int) -> Source:
    """Keeps every example, as stored, in host memory; they are read once, at first use.

    Args:
      source: The examples.
      stored_bytes: Size of one example with its label as stored, in bytes.

    Returns:
      A portable source with the same examples in the same order. Its `load` raises ConfigError for
      an example that cannot be read or a label outside `[0, num_classes)`.
    """
    info = source.info
    if info.num_examples == 0:
        return source
    kept = Held(lambda: _read_all(source))

    def read(indices: tf.Tensor) -> Batch:
        x, y = kept.tensors()
        return tf.gather(x, indices), tf.gather(y, indices)

    return dataclasses.replace(
        source,
        info=dataclasses.replace(info, storage="memory"),
        read=read,
        portable=True,
        kept_bytes=info.num_examples * stored_bytes,
        load=kept.tensors,
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


def _read_all(source: Source) -> tuple[np.ndarray, np.ndarray]:
    info = source.info
    examples = tf.data.Dataset.range(info.num_examples).batch(_READ_AT_ONCE)
    examples = examples.map(lambda indices: source.read(indices), num_parallel_calls=tf.data.AUTOTUNE)
    x = y = None
    filled = 0
    try:
        for some_x, some_y in examples.as_numpy_iterator():
            if x is None or y is None:
                x = np.empty((info.num_examples, *some_x.shape[1:]), some_x.dtype)
                y = np.empty((info.num_examples, *some_y.shape[1:]), some_y.dtype)
            x[filled : filled + len(some_x)] = some_x
            y[filled : filled + len(some_y)] = some_y
            filled += len(some_x)
    except tf.errors.OpError as error:
        raise _unreadable(source, filled, error) from error
    assert x is not None
    assert y is not None
    check_labels(info, y)
    return x, y


def _unreadable(source: Source, first: int, error: tf.errors.OpError) -> ConfigError:
    """The error of a batch that begins with example `first`, with the example and its file named."""
    info = source.info
    number = first
    for index in range(first, min(first + _READ_AT_ONCE, info.num_examples)):
        try:
            source.read(tf.constant([index], tf.int64))
        except tf.errors.OpError as own:
            number, error = index, own
            break
    file = ""
    if info.files:
        owner = int(np.searchsorted(np.cumsum(info.records_per_file), number, side="right"))
        file = f" in file {info.files[owner]!r}"
    reason = str(error.message).splitlines()[0].partition(" [Op:")[0]
    return ConfigError(
        f"--dataset={info.name}: {info.split} example {number}{file} cannot be read: {reason}. Repair or remove it."
    )


def check_labels(info: SourceInfo, labels: np.ndarray) -> None:
    """Raises ConfigError if a label is outside `[0, num_classes)`; names the first such example."""
    wrong = np.flatnonzero(
        ((labels < 0) | (labels >= info.num_classes)).reshape(len(labels), -1 if labels.size else 0).any(axis=1)
    )
    if len(wrong):
        raise ConfigError(
            f"--dataset={info.name}: label {np.asarray(labels[wrong[0]]).tolist()} of {info.split} example {wrong[0]} "
            f"is out of range, as are {len(wrong) - 1} others: there are {info.num_classes} classes, so labels are 0 "
            f"to {info.num_classes - 1}. Correct the labels or the declared number of classes."
        )


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


def _checked_labels(info: SourceInfo, indices: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    wrong = (labels < 0) | (labels >= info.num_classes)
    position = tf.argmax(tf.cast(wrong, tf.int32))
    check = tf.debugging.Assert(
        tf.logical_not(tf.reduce_any(wrong)),
        [
            f"--dataset={info.name}: label",
            labels[position],
            f"is out of range [0, {info.num_classes}), in {info.split} example",
            indices[position],
        ],
    )
    with tf.control_dependencies([check] if check is not None else []):
        return tf.identity(labels)

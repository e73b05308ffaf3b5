"""Sources of examples: a description and random access, a batch at a time.

A source does not depend on epochs, batches or workers; `tfpar.inputs.pipeline` decides when to
read which indices. Because a source reads many examples by index at once, the order is a pure
function of (seed, epoch, position), and there is no per-example cost in Python or tf.data.

Building a source runs no TensorFlow operation: the first operation initialises the runtime, after
which neither devices nor collectives can be configured. Arrays become tensors at first use.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import numbers
import os
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from tfpar.inputs import structures
from tfpar.inputs.structures import Structure

import numpy as np
import tensorflow as tf

CLASSIFICATION = "classification"
LANGUAGE_MODEL = "language_model"
REINFORCEMENT = "reinforcement"
FEDERATED = "federated"
STREAM = "stream"
TASKS = (CLASSIFICATION, LANGUAGE_MODEL, REINFORCEMENT, FEDERATED)
STORAGES = ("memory", "files", "generated", STREAM)
UNKNOWN = -1  # the number of examples of a stream that has not been counted
# Inputs and labels of some examples, each a tensor [n, ...] or a structure of them.
Batch = tuple[Structure, Structure]
Read = Callable[[tf.Tensor], Batch]
Function = TypeVar("Function", bound=Callable)


class Weighted(NamedTuple):
    """Labels with the sample weights that the data carry.

    Attributes:
      y: The labels, as without weights.
      sample_weight: Float weights: [n] for one per example, [n, ...] for one per position, or a structure of them like
        that of the labels.
    """

    y: Structure
    sample_weight: Structure


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceInfo:
    """The description of a source.

    Attributes:
      name: The source in the notation of `--dataset`; used in reports and errors.
      task: `"classification"` or `"language_model"`.
      split: `"train"` or `"validation"`.
      num_examples: Number of examples, `>= 0`; `UNKNOWN` for a stream that has not been counted.
      input_spec: Shape and dtype of one input as `Source.fetch` returns it, or a structure (tuples and dicts) of them.
        Images are float32 [height, width, channels] in [0, 1]; text is int32 [sequence_length].
      label_spec: Shape and dtype of one label, or a structure of them; `()` without labels. Classes are int32 [] or,
        for text, int32 [sequence_length].
      num_classes: Labels lie in `[0, num_classes)`. For text, the size of the vocabulary. 0 if unknown, as for several
        labels; integer labels are then not checked.
      weight_spec: Shape and dtype of one example's sample weights, or a structure of them; `()` without weights.
      ignore_class: A label outside `[0, num_classes)` that is allowed, because the loss ignores it.
      block_size: Examples that are stored together and shuffled together; 1 shuffles single examples. A last, smaller
        block is not shuffled.
      label_range: Smallest and largest label, if they are known at no cost: for a single label array in memory.
      class_names: Names of the classes in label order; empty if unknown.
      files: The files that hold the examples, in the order of the examples; empty if the
        examples are not in files.
      records_per_file: Number of examples in each of `files`.
      storage: `"memory"` (decoded once and kept), `"files"` (read each epoch), `"generated"`, or `"stream"`.
      decode: For text: token ids (any shape of integers, flattened) to a string.
      digest: Digest of the examples' content if they are arrays in memory; otherwise empty.
      may_be_short: Whether a training split may have fewer examples than a batch, which is then padded at weight 0.
      first_step: Steps of the run before the first pass over these examples, in a run that continues with others.
    """

    name: str
    task: str
    split: str
    num_examples: int
    input_spec: Structure
    label_spec: Structure
    num_classes: int
    weight_spec: Structure = ()
    ignore_class: int | None = None
    block_size: int = 1
    label_range: tuple[float, float] | None = None
    class_names: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    records_per_file: tuple[int, ...] = ()
    storage: str = "files"
    decode: Callable[[np.ndarray], str] | None = None
    digest: str = ""
    may_be_short: bool = False
    first_step: int = 0

    def __post_init__(self) -> None:
        for name, known in (("task", TASKS), ("storage", STORAGES)):
            if (given := getattr(self, name)) not in known:
                raise ValueError(f"{self.name}: {name}={given!r} is none of {', '.join(map(repr, known))}")
        if self.files and (
            len(self.files) != len(self.records_per_file) or sum(self.records_per_file) != self.num_examples
        ):
            raise ValueError(
                f"{self.name}: {len(self.files)} files with {sum(self.records_per_file)} records in "
                f"{len(self.records_per_file)} entries do not add up to {self.num_examples} examples"
            )

    @property
    def target_spec(self) -> Structure:
        """The specs of one example's `y`: `label_spec`, or `Weighted` specs if the data carry sample weights."""
        if structures.is_empty(self.weight_spec):
            return self.label_spec
        return Weighted(self.label_spec, self.weight_spec)

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that differ when the examples' number, shape or files differ.

        Workers compare it to detect that they do not read the same data; a resumed run compares
        it with its checkpoint. File contents and directories do not count, so the same data may
        be mounted elsewhere. For arrays, the content counts.
        """
        files = [name.replace("\\", "/").rsplit("/", 1)[-1] for name in self.files]
        inputs = structures.describe_specs(self.input_spec)
        # A stream may have been counted, or not; what counts as an epoch of acting depends on the length of the run.
        count = UNKNOWN if self.storage == STREAM or self.task == REINFORCEMENT else self.num_examples
        parts = [self.task, self.split, count, self.num_classes, inputs]
        extra: list[object] = [self.digest] if self.digest else []
        if not (structures.is_single(self.input_spec) and structures.is_single(self.target_spec)):
            extra.append(structures.describe_specs(self.target_spec))
        text = json.dumps([*parts, files, self.records_per_file, *extra])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def no_autograph(function: Function) -> Function:
    """Exempts a function for `Dataset.map` from AutoGraph, which takes half a second even for TensorFlow ops alone."""
    return tf.autograph.experimental.do_not_convert(function)


class LazyTensors:
    """Arrays that become tensors in the memory of the host at first use, and not before.

    Args:
      make: Returns the arrays, or reads them; called once.
    """

    def __init__(self, make: Callable[[], Sequence[np.ndarray]]):
        self._make: Callable[[], Sequence[np.ndarray]] | None = make
        self._tensors: tuple[tf.Tensor, ...] = ()
        self._lock = threading.Lock()

    @no_autograph  # AutoGraph would rewrite the error of a source that cannot be read
    def tensors(self) -> tuple[tf.Tensor, ...]:
        """Returns the tensors. Functions capture tensors by reference, but would copy NumPy arrays into the graph."""
        with self._lock:
            if self._make is not None:
                # The first use may be while a function is traced, possibly for a device of another host.
                with tf.init_scope(), tf.device(None), tf.device("CPU:0"):
                    self._tensors = tuple(tf.constant(array) for array in self._make())
                self._make = None  # the arrays themselves are no longer needed
        return self._tensors


def _nothing() -> None:
    """The `load` of a source that keeps nothing in memory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """Examples by index.

    A new kind of source only has to write `read`. It maps int64 indices [n] to `(x, y)` of shapes
    [n, ...] in the compact dtypes of storage (uint8 for pixels and bytes), in TensorFlow ops (no
    AutoGraph) with static trailing shapes; it may be traced many times and called from several
    threads. `x` and `y` have the structures of `info.input_spec` and `info.target_spec`. `fetch`
    converts the result to the dtypes that a model takes. Caches and record files keep the compact
    form.

    Attributes:
      info: The description.
      read: int64 [n] -> (x [n, ...], y [n, ...]) as stored, or structures of such tensors.
      scale: Factor from stored to fetched inputs; 1/255 for pixels. Ignored for inputs that are not floating-point. A
        structure like the inputs has a factor for each.
      portable: Whether `read` may be sent to another process (a tf.data service worker): False
        if it calls Python or reads files by descriptor.
      kept_bytes: Memory of the host that the kept examples take, in bytes; 0 unless they are in memory.
      load: Reads the examples into memory if they are kept there; otherwise the first `read` does.
        Raises ConfigError for a bad example, unless bad examples are skipped.
      load_usable: The same, but for a run that skips bad examples: `usable` then says which ones they are, even if
        `skip` is False. None if `load` does that, or if no example can be bad.
      skip: Whether bad examples are skipped (`--on_bad_record=skip`); a pipeline also skips them
        if its own configuration says so.
      usable: int64 [n] -> bool [n], if some examples in memory are to be skipped.
      origin: The source that examples in memory were read from; reading it again shows what is
        wrong with an example.
    """

    info: SourceInfo
    read: Read
    scale: Structure = 1.0
    portable: bool = True
    kept_bytes: int = 0
    load: Callable[[], object] = _nothing
    load_usable: Callable[[], object] | None = None
    skip: bool = False
    usable: Callable[[tf.Tensor], tf.Tensor] | None = None
    origin: Source | None = None

    def __post_init__(self) -> None:
        for scale in tf.nest.flatten(self.scale):
            if not isinstance(scale, numbers.Real):
                raise ValueError(f"{self.info.name}: scale={scale!r} is no number to multiply inputs by")

    def fetch(self, indices: tf.Tensor) -> Batch:
        """Reads a batch of examples; a graph function.

        Args:
          indices: int64 [n], every value in `[0, num_examples)`.

        Returns:
          x [n, ...] and y [n, ...] in the structures, shapes and dtypes of `info.input_spec` and `info.target_spec`.

        Raises:
          tf.errors.OpError: When run, if an example cannot be read, has a label outside
            `[0, num_classes)`, or is not finite. `tfpar.inputs.bad_records` reports which example
            and why. Examples in memory are checked when they are loaded.
        """
        x, y = self.read(indices)
        info = self.info
        x = structures.ensure_rows(x, indices, info.input_spec)
        y = structures.ensure_rows(y, indices, info.target_spec)
        if info.storage == "files":
            x = tf.nest.map_structure(lambda values: _assert_usable(values, "inputs"), x)
            y = tf.nest.map_structure(
                lambda values: _assert_usable(values, "labels", info.num_classes, info.ignore_class), y
            )
        return self.cast_and_scale(x, y)

    def cast_and_scale(self, x: Structure, y: Structure) -> Batch:
        """Converts stored examples `[n, ...]` to the dtypes of the specs, and scales the inputs."""
        info = self.info
        scale = self.scale
        if structures.is_single(scale):
            scale = tf.nest.map_structure(lambda _: self.scale, info.input_spec)
        x = tf.nest.map_structure(_cast_and_scale, x, info.input_spec, scale)
        y = tf.nest.map_structure(lambda values, spec: _cast_and_scale(values, spec, 1.0), y, info.target_spec)
        return x, y


def _cast_and_scale(values: tf.Tensor, spec: tf.TensorSpec, scale: float) -> tf.Tensor:
    if spec.dtype != tf.string:
        values = tf.cast(values, spec.dtype)
    if spec.dtype.is_floating and scale != 1.0:
        values = values * tf.constant(scale, values.dtype)
    return values


def decode_bytes(tokens: np.ndarray) -> str:
    """Decodes byte tokens (0 to 255) to text; invalid UTF-8 becomes U+FFFD."""
    return np.asarray(tokens).astype(np.uint8).tobytes().decode("utf-8", errors="replace")


def held_out_mask(names: Sequence[str], count: int) -> list[bool]:
    """Returns which of these names are held out for validation, by the hashes of the names alone.

    The choice looks random, is the same on every machine and for every seed, and changes little
    when names are added or removed: the `count` names with the lowest SHA-256 are held out.

    Args:
      names: Distinct names, e.g. paths relative to the data set.
      count: How many to hold out.
    """
    ranked = sorted(range(len(names)), key=lambda number: hashlib.sha256(os.fsencode(names[number])).digest())
    chosen = set(ranked[:count])
    return [number in chosen for number in range(len(names))]


def finite_rows(values: tf.Tensor) -> tf.Tensor:
    """Returns which rows of floating-point values [n, ...] are finite: bool [n].

    A sum of squares is one quick pass, and is finite only if all values are. If it is not finite, which large values
    can also cause, every value is tested: five times the work (TensorFlow 2.21, CPU).
    """

    def test_every_value() -> tf.Tensor:
        return tf.reduce_all(tf.math.is_finite(values), axis=list(range(1, len(values.shape))))

    all_finite = tf.ones(tf.shape(values)[:1], tf.bool)
    return tf.cond(tf.math.is_finite(tf.nn.l2_loss(values)), lambda: all_finite, test_every_value)


def usable_rows(values: tf.Tensor, num_classes: int = 0, ignore_class: int | None = None) -> tf.Tensor:
    """Returns which rows of values [n, ...] are usable: finite floats, classes in `[0, num_classes)`; bool [n].

    Args:
      values: Inputs, labels or weights.
      num_classes: Integers must be classes below this number; 0 for no limit.
      ignore_class: An integer that is allowed besides the classes.
    """
    if values.dtype.is_floating:
        return finite_rows(values)
    if not num_classes or not values.dtype.is_integer:
        return tf.ones(tf.shape(values)[:1], tf.bool)
    wide = tf.cast(values, tf.int64)
    allowed = (wide >= 0) & (wide < num_classes)
    if ignore_class is not None:
        allowed |= wide == ignore_class
    return tf.reduce_all(allowed, axis=list(range(1, len(values.shape))))


def _assert_usable(values: tf.Tensor, what: str, num_classes: int = 0, ignore_class: int | None = None) -> tf.Tensor:
    """Returns the same values; when run, raises an error if `usable_rows` is False for a row."""
    dtype = values.dtype
    if not dtype.is_floating and (
        not num_classes or not dtype.is_integer or (dtype.is_unsigned and dtype.max < num_classes)
    ):  # nothing can be wrong
        return values
    message = f"{what} are not finite" if dtype.is_floating else f"{what} outside [0, {num_classes})"
    check = tf.debugging.Assert(tf.reduce_all(usable_rows(values, num_classes, ignore_class)), [message])
    with tf.control_dependencies([check] if check is not None else []):
        return tf.identity(values)

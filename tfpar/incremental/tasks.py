"""Splits any source of classified examples into tasks, and builds sources from parts of others.

Shapes: n examples.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from tfpar.config import ConfigError, IncrementalConfig
from tfpar.inputs import structures
from tfpar.inputs.memory import read_labels
from tfpar.inputs.source import CLASSIFICATION, Batch, LazyTensors, Source
from tfpar.process.listing import listed

import numpy as np
import tensorflow as tf


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """The examples of one task.

    Attributes:
      name: Name for reports.
      indices: Int64 `[n]`: indices of the training examples.
      validation: Int64: indices of the examples on which the task is evaluated.
      classes: The classes of the task, in order.
      own: Whether `validation` are indices of training examples, which the task holds out, or of validation examples.
    """

    name: str
    indices: np.ndarray
    validation: np.ndarray
    classes: tuple[int, ...]
    own: bool = False


def split_tasks(
    options: IncrementalConfig, train: Source, validation: Source, *, validation_fraction: float
) -> list[Task]:
    """Divides training and validation examples into tasks, in order.

    Args:
      options: `tasks` determines the division.
      train: Training examples, with one class each.
      validation: Validation examples. If the tasks are groups of classes, a task is evaluated on the examples of its
        classes. Otherwise nothing tells which of them belong to a task, which holds out own training examples instead.
      validation_fraction: Fraction of its training examples that such a task holds out.

    Raises:
      ConfigError: Examples do not have one class each, there are fewer than two tasks, or a task has no examples.
    """
    kind, number = options.parts()
    labels = labels_of(train)
    if kind == "by_class":
        tasks = _by_class(number, labels, labels_of(validation))
    else:
        if not validation_fraction:
            raise ConfigError(
                f"--validation_fraction=0 leaves the tasks of --tasks={options.tasks} without examples for their "
                "evaluation: each holds out some of its own. Use --validation_fraction=0.1."
            )
        parts = _by_file(options, train) if kind == "by_file" else _in_order(number, len(labels))
        tasks = []
        for name, part in parts:
            held_out = _held_out(part, validation_fraction)
            tasks.append(Task(name, np.setdiff1d(part, held_out), held_out, (), own=True))
    if len(tasks) < 2 or not all(len(task.indices) and len(task.validation) for task in tasks):
        shown = [task for task in tasks if not (len(task.indices) and len(task.validation))] or tasks
        counts = listed([f"{task.name}: {len(task.indices)} and {len(task.validation)}" for task in shown], 6)
        raise ConfigError(
            f"--tasks={options.tasks} divides {train.info.name} into {len(tasks)} tasks, with these numbers of "
            f"training and validation examples: {counts}. There must be two tasks or more, and each needs examples. "
            "Choose another number, or --validation_fraction."
        )
    return [
        dataclasses.replace(task, classes=tuple(int(each) for each in np.unique(labels[task.indices])))
        for task in tasks
    ]


def _by_class(number: int, labels: np.ndarray, held_out: np.ndarray) -> list[Task]:
    classes = np.unique(labels)
    groups = np.split(classes, range(number, len(classes), number))
    return [
        Task(
            _named("class", "classes", group),
            np.flatnonzero(np.isin(labels, group)),
            np.flatnonzero(np.isin(held_out, group)),
            (),
        )
        for group in groups
    ]


def _by_file(options: IncrementalConfig, train: Source) -> list[tuple[str, np.ndarray]]:
    """Returns the names of tasks, and the indices of their files' examples."""
    _, number = options.parts()
    if not train.info.files:
        raise ConfigError(f"--tasks={options.tasks}: {train.info.name} has no files. Use by_class:N or in_order:N.")
    ends = np.cumsum(train.info.records_per_file)
    files = np.split(np.arange(ends[-1]), ends[:-1])
    return [
        (
            _named("file", "files", np.arange(first, min(first + number, len(files))) + 1),
            np.concatenate(files[first : first + number]),
        )
        for first in range(0, len(files), number)
    ]


def _in_order(number: int, count: int) -> list[tuple[str, np.ndarray]]:
    """Returns the names of tasks, and the indices of their examples."""
    return [(f"part {place + 1}", part) for place, part in enumerate(np.array_split(np.arange(count), number))]


def _named(one: str, several: str, numbers: np.ndarray) -> str:
    """Returns the name of a group of numbers in order, such as `classes 0-3, 7`."""
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"{one if len(numbers) == 1 else several} {', '.join(texts)}"


def _held_out(part: np.ndarray, fraction: float) -> np.ndarray:
    """Returns the indices that a task holds out: at random, because neighbours may be alike, but not by the seed."""
    order = np.random.default_rng([31, len(part)]).permutation(part)
    return np.sort(order[: max(1, round(len(part) * fraction))])


def labels_of(source: Source) -> np.ndarray:
    """Returns the classes of all examples, int64 `[n]`.

    Raises:
      ConfigError: Examples have no class, several classes, or sample weights; or one cannot be read.
    """
    info = source.info
    one = structures.is_single(info.target_spec) and not info.target_spec.shape.rank
    if info.task != CLASSIFICATION or not one or not info.target_spec.dtype.is_integer:
        raise ConfigError(
            f"--dataset={info.name}: incremental learning needs examples with one class each. Use a data set for "
            "classification."
        )
    return read_labels(source)


def chosen(source: Source, indices: np.ndarray, name: str) -> Source:
    """Returns a source with some of the examples of another source.

    Args:
      source: All examples.
      indices: Int64 `[n]`: indices of the chosen examples, in this order.
      name: Describes the chosen examples in reports.
    """
    kept = indices.astype(np.int64)
    table = LazyTensors(lambda: [kept])
    content = hashlib.blake2b(source.info.fingerprint.encode() + kept.tobytes(), digest_size=16).hexdigest()
    usable = source.usable
    return dataclasses.replace(
        source,
        info=_described(source, f"{source.info.name} ({name})", len(kept), content),
        read=lambda places: source.read(tf.gather(table.tensors()[0], places)),
        usable=usable and (lambda places: usable(tf.gather(table.tensors()[0], places))),
        origin=source.origin and chosen(source.origin, indices, name),  # with the same numbers of examples
    )


def with_classes(source: Source, classes: int) -> Source:
    """Returns the same examples, for a model with this number of outputs."""
    return dataclasses.replace(source, info=dataclasses.replace(source.info, num_classes=classes))


def joined(first: Source, second: Source, repeats: int, name: str) -> Source:
    """Returns a source with the examples of `first`, followed by those of `second`, repeated.

    Args:
      first: A source.
      second: A source whose examples have the same structure, shapes and dtypes.
      repeats: Number of times that the examples of `second` occur.
      name: Describes the examples in reports.
    """
    own, others = first.info.num_examples, second.info.num_examples
    content = hashlib.blake2b(
        f"{first.info.fingerprint} {second.info.fingerprint} {repeats}".encode(), digest_size=16
    ).hexdigest()

    def split(places: tf.Tensor, apply: Callable[[Source, tf.Tensor], Any]) -> Any:
        """Returns the examples of both sources, in the order of the places."""
        is_first = places < own
        where = [tf.where(condition)[:, 0] for condition in (is_first, ~is_first)]
        parts = [apply(first, tf.gather(places, where[0])), apply(second, (tf.gather(places, where[1]) - own) % others)]
        order = [tf.cast(each, tf.int32) for each in where]
        return tf.nest.map_structure(lambda *two: _stitched(order, two), *parts)

    def read(places: tf.Tensor) -> Batch:
        batch: Batch = split(places, lambda source, own_places: source.read(own_places))
        return batch

    def all_usable(source: Source, own_places: tf.Tensor) -> tf.Tensor:
        return source.usable(own_places) if source.usable else tf.ones(tf.shape(own_places), tf.bool)

    return dataclasses.replace(
        first,
        info=_described(first, f"{first.info.name} ({name})", own + repeats * others, content),
        read=read,
        usable=(lambda places: split(places, all_usable)) if first.usable or second.usable else None,
        origin=joined(first.origin, second.origin, repeats, name) if first.origin and second.origin else None,
    )


def _stitched(order: Sequence[tf.Tensor], parts: Sequence[tf.Tensor]) -> tf.Tensor:
    result = tf.dynamic_stitch(list(order), list(parts))
    result.set_shape([None, *parts[0].shape[1:]])
    return result


def _described(source: Source, name: str, count: int, digest: str) -> Any:
    """Returns the description of a derived source, whose examples are no longer in the order of files."""
    return dataclasses.replace(
        source.info,
        name=name,
        num_examples=count,
        files=(),
        records_per_file=(),
        block_size=1,
        label_range=None,
        digest=digest,
    )

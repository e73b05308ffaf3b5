"""Chooses the examples of earlier tasks to keep. The choice depends only on the seed and the tasks, so it is not
stored.

Shapes: n examples.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tfpar.config import ConfigError
from tfpar.incremental.tasks import Task, chosen, joined
from tfpar.inputs.bad_records import read_with_mask
from tfpar.inputs.source import Source

import numpy as np
import tensorflow as tf

_log = logging.getLogger(__name__)


def kept_examples(tasks: Sequence[Task], labels: np.ndarray, room: int, *, policy: str, seed: int) -> np.ndarray:
    """Returns the indices of the examples that are kept after some tasks, int64, at most `room`.

    Each example has a random key. `reservoir` keeps the examples with the smallest keys so far, which are a uniform
    sample, like that of a reservoir (Vitter 1985, Random Sampling with a Reservoir). `balanced` keeps the examples with
    the smallest keys of each class, equally many; if the room is not divisible by the number of classes, the classes
    whose next key is smallest keep one more. When more classes arrive, each class first loses the examples with the
    largest keys.

    Args:
      tasks: The tasks so far.
      labels: Int64: the classes of all training examples.
      room: Number of examples to keep.
      policy: `balanced` or `reservoir`.
      seed: Seed of the run.
    """
    keys = np.random.default_rng([seed & 0xFFFFFFFF, 23]).random(len(labels))
    seen = np.concatenate([task.indices for task in tasks])
    order = seen[np.argsort(keys[seen], kind="stable")]
    if policy == "reservoir":
        return np.sort(order[:room])
    by_class = [order[labels[order] == label] for label in np.unique(labels[seen])]
    kept: list[int] = []
    if room < len(by_class):
        _log.warning(
            "replay has room for %d examples, and %d classes have come: %d of them are not kept at all. Give a larger "
            "--replay_examples, or a larger --replay_bytes if that is the limit.",
            *(room, len(by_class), len(by_class) - room),
        )
    for place in range(max(map(len, by_class))):  # one of each class in turn
        turn = sorted((int(each[place]) for each in by_class if place < len(each)), key=lambda example: keys[example])
        kept += turn[: room - len(kept)]
        if len(kept) == room:
            break
    return np.sort(np.asarray(kept, np.int64))


def room_for(source: Source, examples: int, limit: int) -> int:
    """Returns the number of examples that may be kept.

    Args:
      source: The source of the examples.
      examples: `--replay_examples`.
      limit: `--replay_bytes`; 0 for no limit.

    Raises:
      ConfigError: The limit is smaller than one example.
    """
    if not limit:
        return examples
    x, y, _ = read_with_mask(source, tf.zeros([1], tf.int64))  # has the size of a usable one even if it is not
    row = tf.nest.flatten((x, y))
    size = max(sum(part.numpy().nbytes for part in row), 1)
    if limit < size:
        raise ConfigError(
            f"--replay_bytes={limit} holds no example: one of {source.info.name} has {size} bytes. Use "
            f"--replay_bytes={size} or more, or 0 for no limit."
        )
    return min(examples, limit // size)


def with_replay(train: Source, task: Task, kept: np.ndarray) -> Source:
    """Returns the examples of a task followed by about as many kept examples, which are thus about half of each epoch.

    If there are more kept examples than that, some of them are used; if there are fewer, all are repeated a whole
    number of times.

    Args:
      train: All training examples.
      task: The current task.
      kept: The result of `kept_examples`.
    """
    own = chosen(train, task.indices, task.name)
    if not len(kept):
        return own
    if len(kept) > len(task.indices):
        some = np.random.default_rng([len(kept), len(task.indices)])
        kept = np.sort(some.choice(kept, len(task.indices), replace=False))
    repeats = max(1, round(len(task.indices) / len(kept)))
    return joined(own, chosen(train, kept, "kept"), repeats, f"{task.name}, and {len(kept)} kept")

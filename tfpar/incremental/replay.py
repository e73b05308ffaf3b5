"""Which examples of earlier tasks are kept: a function of the seed and of what has come, so that nothing is stored.

Shapes: n examples.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfpar.incremental.tasks import Task, chosen, joined
from tfpar.inputs.source import Source

import numpy as np
import tensorflow as tf


def kept_examples(tasks: Sequence[Task], labels: np.ndarray, room: int, *, policy: str, seed: int) -> np.ndarray:
    """The examples that are kept after some tasks, int64, at most `room`.

    Each example has a random key. `reservoir` keeps the smallest of all that have come: a uniform sample, and the one
    that a reservoir (Vitter 1985, Random Sampling with a Reservoir) would hold. `balanced` keeps the smallest of each
    class, so that what is left of a class when others come is what had the smallest keys.

    Args:
      tasks: What has come.
      labels: Int64: the classes of all training examples.
      room: How many are kept.
      policy: `balanced` or `reservoir`.
      seed: That of the run.
    """
    keys = np.random.default_rng([seed & 0xFFFFFFFF, 23]).random(len(labels))
    seen = np.concatenate([task.indices for task in tasks])
    order = seen[np.argsort(keys[seen], kind="stable")]
    if policy == "reservoir":
        return np.sort(order[:room])
    by_class = [order[labels[order] == label] for label in np.unique(labels[seen])]
    kept: list[int] = []
    for place in range(max(map(len, by_class))):  # one of each class in turn
        kept += [int(each[place]) for each in by_class if place < len(each)][: room - len(kept)]
        if len(kept) == room:
            break
    return np.sort(np.asarray(kept, np.int64))


def room_for(source: Source, examples: int, limit: int) -> int:
    """How many examples may be kept.

    Args:
      source: What they are of.
      examples: `--replay_examples`.
      limit: `--replay_bytes`; 0 for none.
    """
    if not limit:
        return examples
    row = tf.nest.flatten(source.read(tf.zeros([1], tf.int64)))
    return min(examples, limit // max(sum(part.numpy().nbytes for part in row), 1))


def with_replay(train: Source, task: Task, kept: np.ndarray) -> Source:
    """The examples of a task, and as many of the kept ones, over and over, so that they are half of every epoch.

    Args:
      train: All training examples.
      task: The one that is learned.
      kept: From `kept_examples`.
    """
    own = chosen(train, task.indices, task.name)
    if not len(kept):
        return own
    repeats = max(1, round(len(task.indices) / len(kept)))
    return joined(own, chosen(train, kept, "kept"), repeats, f"{task.name}, and {len(kept)} kept")

"""Which example goes where: a pure function of (seed, update, micro-batch, replica, slot).

Shapes: K updates, L replicas, A micro-batches an update, m slots of a micro-batch on a replica.

An epoch is a permutation of a shard's examples, cut into batches. A batch of n examples is split
evenly over the A micro-batches (micro-batch a gets positions `a*n//A` up to `(a+1)*n//A`), and
each micro-batch evenly over the replicas in the same way. Hence the examples of a micro-batch do
not depend on how many replicas share it, which batch statistics synchronised across replicas
need in order to agree between layouts. Slots that are left over are padding.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from tfpar.inputs import permutation

import numpy as np
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Shard:
    """Examples that are permuted together: all of them, or those of one worker's files.

    Attributes:
      starts: First example of each run of consecutive examples.
      lengths: Length of each run, positive.
      batch: Examples of this shard in a full update.
      files: How many files the runs come from.
    """

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    batch: int
    files: int = 0

    @property
    def size(self) -> int:
        """Number of examples."""
        return sum(self.lengths)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpochOrder:
    """The order of one split's examples over updates, micro-batches and replicas.

    Attributes:
      shards: One shard for all replicas, or one per worker.
      replicas: Replicas that share a shard.
      accumulate_steps: A, micro-batches an update.
      drop_remainder: Whether the last, partial batch of an epoch is left out.
      shuffle: Whether each epoch is permuted.
      seed: Seed of the permutations.
    """

    shards: tuple[Shard, ...]
    replicas: int
    accumulate_steps: int
    drop_remainder: bool
    shuffle: bool
    seed: int

    @property
    def updates_per_epoch(self) -> int:
        """Updates in an epoch: what the fullest shard needs; with `drop_remainder`, what every shard can fill."""
        if self.drop_remainder:
            return min(shard.size // shard.batch for shard in self.shards)
        return max(-(-shard.size // shard.batch) for shard in self.shards)

    @property
    def examples_per_epoch(self) -> int:
        """Examples trained on in an epoch."""
        updates = self.updates_per_epoch
        return sum(min(shard.size, updates * shard.batch) for shard in self.shards)

    @property
    def micro_batch(self) -> int:
        """m: slots of a micro-batch on a replica, the same for every update and replica."""
        largest = max(shard.batch for shard in self.shards)
        return math.ceil(math.ceil(largest / self.accumulate_steps) / self.replicas)

    def examples_in(self, updates: np.ndarray) -> np.ndarray:
        """How many examples each replica has in some updates: the sums of `real` in `slots`, by arithmetic.

        Args:
          updates: int64 [K].

        Returns:
          int64 [K, shards * replicas], the replicas of each shard in turn.
        """
        sizes, batches = (np.array([getattr(shard, name) for shard in self.shards]) for name in ("size", "batch"))
        first = (updates % self.updates_per_epoch)[:, None] * batches
        count = np.clip(sizes - first, 0, batches)[:, :, None]
        bounds = np.arange(self.accumulate_steps + 1) * count // self.accumulate_steps
        share = np.diff(bounds)[:, :, None, :]  # [K, shards, 1, A]
        replica = np.arange(self.replicas + 1)[None, None, :, None]
        per_replica = np.diff(replica * share // self.replicas, axis=2).sum(axis=-1)
        return per_replica.reshape(len(updates), -1)

    def slots(self, updates: tf.Tensor, shard_number: int, replicas: Sequence[int]) -> tuple[tf.Tensor, tf.Tensor]:
        """The examples of some updates.

        Args:
          updates: int64 [K], numbered on from 0 across epochs.
          shard_number: Which shard.
          replicas: The L replicas wanted, each in `[0, self.replicas)`.

        Returns:
          indices: int64 [K, L, A, m], of the whole split. A padding slot repeats an example of
            the same update, or of the shard if the shard has none left in this epoch.
          real: bool of the same shape, False for padding.
        """
        shard = self.shards[shard_number]
        steps = self.accumulate_steps
        updates_per_epoch = self.updates_per_epoch
        epoch = updates // updates_per_epoch
        first = (updates % updates_per_epoch) * shard.batch
        count = tf.clip_by_value(shard.size - first, 0, shard.batch)[:, None, None, None]

        micro = tf.range(steps, dtype=tf.int64)[None, None, :, None]
        micro_start, micro_stop = micro * count // steps, (micro + 1) * count // steps
        replica = tf.constant(list(replicas), tf.int64)[None, :, None, None]
        share = micro_stop - micro_start
        start = micro_start + replica * share // self.replicas
        stop = micro_start + (replica + 1) * share // self.replicas
        slot = tf.range(self.micro_batch, dtype=tf.int64)
        real = start + slot < stop

        first = tf.minimum(first, shard.size - 1)[:, None, None, None]
        position = first + tf.minimum(start + slot, tf.maximum(count - 1, 0))
        if self.shuffle:
            # Shards of several workers get different permutations, also where they are of one size.
            seed = permutation.mix64(self.seed) + shard_number if len(self.shards) > 1 else self.seed
            position = permutation.permute(position, shard.size, seed, epoch[:, None, None, None])
        return _to_examples(position, shard), real


def whole(examples: int, batch: int) -> tuple[Shard, ...]:
    """One shard with all examples."""
    return (Shard((0,), (examples,), batch),)


def by_file(records_per_file: Sequence[int], batch: int, workers: int) -> tuple[Shard, ...]:
    """A shard of whole files per worker, balanced by number of examples.

    Files go, largest first, to the worker with the fewest examples so far (Graham 1969, LPT: the
    fullest worker has at most 4/3 of the optimum). Batches are `batch` split evenly, in order.

    Args:
      records_per_file: Examples of each file, in order.
      batch: Examples per update over all workers.
      workers: Number of workers; at most as many as there are files with examples.
    """
    begins = np.cumsum([0, *records_per_file])
    load = [0] * workers
    owned: list[list[int]] = [[] for _ in range(workers)]
    for file in sorted(range(len(records_per_file)), key=lambda file: (-records_per_file[file], file)):
        if records_per_file[file]:
            worker = min(range(workers), key=lambda worker: (load[worker], len(owned[worker]), worker))
            owned[worker].append(file)
            load[worker] += records_per_file[file]
    return tuple(
        Shard(
            starts=tuple(int(begins[file]) for file in sorted(files)),
            lengths=tuple(records_per_file[file] for file in sorted(files)),
            batch=(worker + 1) * batch // workers - worker * batch // workers,
            files=len(files),
        )
        for worker, files in enumerate(owned)
    )


def _to_examples(position: tf.Tensor, shard: Shard) -> tf.Tensor:
    """Position in a shard to index in the split."""
    if len(shard.starts) == 1:
        return position + shard.starts[0]
    ends = np.cumsum(shard.lengths, dtype=np.int64)
    run = tf.searchsorted(tf.constant(ends), tf.reshape(position, [-1]), side="right")
    shift = tf.constant(np.array(shard.starts, np.int64) - (ends - np.array(shard.lengths, np.int64)))
    return position + tf.reshape(tf.gather(shift, run), tf.shape(position))

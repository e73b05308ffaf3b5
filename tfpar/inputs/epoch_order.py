"""The order of the examples: a pure function of (seed, step, micro-batch, replica, slot).

Shapes: K steps, L replicas, A micro-batches per step, m slots of a micro-batch on a replica.

An epoch is a permutation of a shard's examples, cut into batches. A batch of n examples is split
evenly over the A micro-batches (micro-batch a gets positions `a*n//A` up to `(a+1)*n//A`), and
each micro-batch evenly over the replicas in the same way. Hence the examples of a micro-batch do
not depend on how many replicas share it, so that batch statistics synchronised across replicas
are the same for any number of replicas. The remaining slots are padding.
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
    """Examples that are permuted together: all examples, or the examples in one worker's files.

    Attributes:
      starts: First example of each range of consecutive examples.
      lengths: Length of each range, positive.
      batch: Examples of this shard in a full step.
      files: Number of files that the ranges come from.
      block: Consecutive examples that stay together; 1 permutes single examples.
    """

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    batch: int
    files: int = 0
    block: int = 1

    @property
    def size(self) -> int:
        """Number of examples."""
        return sum(self.lengths)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpochOrder:
    """The order of one split's examples over steps, micro-batches and replicas.

    Attributes:
      shards: One shard for all replicas, or one per worker.
      replicas: Replicas that share a shard.
      accumulate_steps: A, micro-batches per step.
      drop_remainder: Whether the last, partial batch of an epoch is dropped.
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
    def steps_per_epoch(self) -> int:
        """Steps per epoch: as many as the largest shard needs; with `drop_remainder`, as many as all can fill."""
        if self.drop_remainder:
            return min(shard.size // shard.batch for shard in self.shards)
        return max(-(-shard.size // shard.batch) for shard in self.shards)

    @property
    def examples_per_epoch(self) -> int:
        """Examples that an epoch trains on."""
        return sum(min(shard.size, self.steps_per_epoch * shard.batch) for shard in self.shards)

    @property
    def micro_batch(self) -> int:
        """m: slots of a micro-batch on a replica, the same for every step and replica."""
        largest = max(shard.batch for shard in self.shards)
        return math.ceil(math.ceil(largest / self.accumulate_steps) / self.replicas)

    def examples_in(self, steps: np.ndarray) -> np.ndarray:
        """Returns how many examples each replica has in each step: the sums of `real` in `slots`, by arithmetic.

        Args:
          steps: Numbers of the steps, int64 [K].

        Returns:
          int64 [K, shards * replicas], ordered by shard and then by replica.
        """
        sizes, batches = (np.array([getattr(shard, name) for shard in self.shards]) for name in ("size", "batch"))
        first = (steps % self.steps_per_epoch)[:, None] * batches
        count = np.clip(sizes - first, 0, batches)[:, :, None]
        bounds = np.arange(self.accumulate_steps + 1) * count // self.accumulate_steps
        share = np.diff(bounds)[:, :, None, :]  # [K, shards, 1, A]
        replica = np.arange(self.replicas + 1)[None, None, :, None]
        per_replica = np.diff(replica * share // self.replicas, axis=2).sum(axis=-1)
        return per_replica.reshape(len(steps), -1)

    def slots(self, steps: tf.Tensor, shard_number: int, replicas: Sequence[int]) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the examples of some steps.

        Args:
          steps: Numbers of the steps, int64 [K], counted from 0 across epochs.
          shard_number: The index of the shard.
          replicas: L replicas, each in `[0, self.replicas)`.

        Returns:
          indices: int64 [K, L, A, m], of the whole split. A padding slot repeats an example of
            the same step, or of the shard if the shard has no examples left in this epoch.
          real: bool of the same shape, False for padding.
        """
        shard = self.shards[shard_number]
        steps_per_epoch = self.steps_per_epoch
        epoch = steps // steps_per_epoch
        first = (steps % steps_per_epoch) * shard.batch
        count = tf.clip_by_value(shard.size - first, 0, shard.batch)[:, None, None, None]

        within, real = split_batch(
            count, micro_batches=self.accumulate_steps, replicas=self.replicas, local=replicas, slots=self.micro_batch
        )
        first = tf.minimum(first, shard.size - 1)[:, None, None, None]
        position = first + within
        if self.shuffle:
            # The shards of several workers get different permutations even if they have the same size.
            seed = permutation.mix64(self.seed) + shard_number if len(self.shards) > 1 else self.seed
            position = _permute(position, shard, seed, epoch[:, None, None, None])
        return _to_examples(position, shard), real


def split_batch(
    count: tf.Tensor, *, micro_batches: int, replicas: int, local: Sequence[int], slots: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the rows of batches that some replicas take.

    Args:
      count: Examples of each batch, int64 [K, 1, 1, 1].
      micro_batches: A.
      replicas: Replicas that share the batches.
      local: L of them, each in `[0, replicas)`.
      slots: m, slots of a micro-batch on a replica.

    Returns:
      within: int64 [K, L, A, m], rows of the batch; a padding slot repeats one.
      real: bool of the same shape, False for padding.
    """
    micro = tf.range(micro_batches, dtype=tf.int64)[None, None, :, None]
    micro_start, micro_stop = micro * count // micro_batches, (micro + 1) * count // micro_batches
    replica = tf.constant(list(local), tf.int64)[None, :, None, None]
    share = micro_stop - micro_start
    start = micro_start + replica * share // replicas
    stop = micro_start + (replica + 1) * share // replicas
    slot = tf.range(slots, dtype=tf.int64)
    return tf.minimum(start + slot, tf.maximum(count - 1, 0)), start + slot < stop


def one_shard(examples: int, batch: int, block: int = 1) -> tuple[Shard, ...]:
    """Returns one shard with all examples, in blocks of `block` that stay together."""
    return (Shard((0,), (examples,), batch, block=block),)


def shards_by_file(records_per_file: Sequence[int], batch: int, workers: int) -> tuple[Shard, ...]:
    """Returns a shard of whole files per worker, balanced by number of examples.

    Files go, largest first, to the worker with the fewest examples so far (Graham 1969, LPT: the
    largest shard has at most 4/3 of the optimal size). `batch` is split evenly over the shards.

    Args:
      records_per_file: Examples of each file, in order.
      batch: Examples per step over all workers.
      workers: Number of workers; at most as many as there are files with examples.
    """
    file_starts = np.cumsum([0, *records_per_file])
    load = [0] * workers
    files_of: list[list[int]] = [[] for _ in range(workers)]
    for file in sorted(range(len(records_per_file)), key=lambda file: (-records_per_file[file], file)):
        if records_per_file[file]:
            worker = min(range(workers), key=lambda worker: (load[worker], len(files_of[worker]), worker))
            files_of[worker].append(file)
            load[worker] += records_per_file[file]
    return tuple(
        Shard(
            starts=tuple(int(file_starts[file]) for file in sorted(files)),
            lengths=tuple(records_per_file[file] for file in sorted(files)),
            batch=(worker + 1) * batch // workers - worker * batch // workers,
            files=len(files),
        )
        for worker, files in enumerate(files_of)
    )


def _permute(position: tf.Tensor, shard: Shard, seed: int, epoch: tf.Tensor) -> tf.Tensor:
    """Permutes positions of a shard; whole blocks if it has blocks, of which a last, smaller one keeps its place."""
    if shard.block == 1:
        return permutation.permute(position, shard.size, seed, epoch)
    blocks = shard.size // shard.block
    if not blocks:
        return position
    number = position // shard.block
    permuted = permutation.permute(tf.minimum(number, blocks - 1), blocks, seed, epoch)
    return tf.where(number < blocks, permuted * shard.block + position % shard.block, position)


def _to_examples(position: tf.Tensor, shard: Shard) -> tf.Tensor:
    """Converts positions in a shard to indices in the split."""
    if len(shard.starts) == 1:
        return position + shard.starts[0]
    ends = np.cumsum(shard.lengths, dtype=np.int64)
    ranges = tf.searchsorted(tf.constant(ends), tf.reshape(position, [-1]), side="right")
    shift = tf.constant(np.array(shard.starts, np.int64) - (ends - np.array(shard.lengths, np.int64)))
    return position + tf.reshape(tf.gather(shift, ranges), tf.shape(position))

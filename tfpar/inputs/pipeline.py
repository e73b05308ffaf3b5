"""The one pipeline behind every source: shards, shuffles, batches, pads, prefetches, resumes.

    counter of updates -> plan (many updates at once) -> one element per replica -> fetch -> prefetch

The order is `tfpar.inputs.epoch_order`'s, a pure function, so there is no shuffle buffer to fill or to
save: starting at update k costs nothing, and an element depends on its update number alone.

Shapes: A micro-batches an update, R replicas, m slots of a micro-batch on a replica.
"""

from __future__ import annotations

from tfpar.config import InputConfig
from tfpar.inputs import bad_records, checks, epoch_order, service
from tfpar.inputs import describe as report
from tfpar.inputs.source import Source, as_written

import numpy as np
import tensorflow as tf

# Indices planned per call: enough that the cost of its hundred small ops is lost in that of reading.
_PLANNED_AT_ONCE = 4096
# More updates than any run takes, and no overflow when a chunk is added.
_ENDLESS = 1 << 62
# Elements larger than this are worth a second thread even when they are only copied from memory.
_PARALLEL_BYTES = 1 << 20


class Pipeline:
    """Batches of a source for every replica of a training or evaluation run.

    Args:
      source: The examples.
      config: The input options.
      accumulate_steps: A; must be 1 for evaluation.
      replicas: R, over all workers.
      workers: Processes that read; each has `replicas / workers` replicas.
      seed: Seed of the order.
      training: Shuffle and shard as configured and go on for ever; otherwise one pass in order,
        every example exactly once, sharded by example.

    Attributes:
      source: The source.
      updates_per_epoch: Updates in one pass.
      micro_batch: m.
      examples_per_epoch: Examples with a weight of 1 in one pass, if all are usable.
      skips: Whether examples that cannot be used get the weight 0 (`--on_bad_record=skip`).

    Raises:
      ConfigError: The data set is empty, has fewer examples than a training batch, or cannot be
        shared out as asked; or the batch does not divide and `uneven_batches` is off.
      ValueError: `replicas` is no multiple of `workers`, or evaluation with `accumulate_steps > 1`.
    """

    def __init__(
        self,
        source: Source,
        config: InputConfig,
        *,
        accumulate_steps: int = 1,
        replicas: int = 1,
        workers: int = 1,
        seed: int = 0,
        training: bool = True,
    ):
        if replicas < 1 or workers < 1 or replicas % workers:
            raise ValueError(f"replicas={replicas} must be a positive multiple of workers={workers}")
        if accumulate_steps < 1 or (accumulate_steps > 1 and not training):
            raise ValueError(f"accumulate_steps={accumulate_steps} must be at least 1, and 1 for evaluation")
        checks.check_source(
            source, config, replicas=replicas, workers=workers, accumulate_steps=accumulate_steps, training=training
        )
        # An evaluation is one pass in order: it gains nothing from file shards, and its split may have few files.
        by_file = training and config.shard_by == "file"
        batch = config.global_batch_size
        self.source = source
        self._config = config
        self._training = training
        self._workers = workers
        self._by_file = by_file
        self._local_replicas = replicas // workers
        self._plan = epoch_order.EpochOrder(
            shards=epoch_order.by_file(source.info.records_per_file, batch, workers)
            if by_file
            else epoch_order.whole(source.info.num_examples, batch),
            replicas=self._local_replicas if by_file else replicas,
            accumulate_steps=accumulate_steps,
            drop_remainder=training and config.remainder == "drop",
            shuffle=training and config.shuffle,
            seed=seed,
        )
        self.updates_per_epoch = self._plan.updates_per_epoch
        self.micro_batch = self._plan.micro_batch
        self.examples_per_epoch = self._plan.examples_per_epoch
        self.skips = source.skip or config.on_bad_record == "skip"
        checks.check_updates(config, [shard.size for shard in self._plan.shards], self.updates_per_epoch)

    @property
    def pads(self) -> bool:
        """Whether some places in the batches of an epoch hold padding, at weight 0."""
        order = self._plan
        places = len(order.shards) * order.replicas * order.accumulate_steps * self.micro_batch
        return self.skips or self.updates_per_epoch * places != self.examples_per_epoch

    def report(self, *, asynchronous: bool = False) -> str:
        """What is read, by whom and in which order: the lines that the chief prints before the first update.

        Args:
          asynchronous: Whether each replica's share of a batch is an update of its own.
        """
        return report.describe(
            self.source,
            self._config,
            self._plan,
            workers=self._workers,
            by_file=self._by_file,
            training=self._training,
            asynchronous=asynchronous,
        )

    @property
    def element_spec(self) -> tuple[tf.TensorSpec, tf.TensorSpec, tf.TensorSpec]:
        """Specs of x [A, m, ...], y [A, m, ...] and weight float32 [A, m]."""
        info = self.source.info
        rows = tf.TensorShape([self._plan.accumulate_steps, self.micro_batch])
        return (
            tf.TensorSpec(rows + info.input_spec.shape, info.input_spec.dtype),
            tf.TensorSpec(rows + info.label_spec.shape, info.label_spec.dtype),
            tf.TensorSpec(rows, tf.float32),
        )

    def batch_indices(self, update: int) -> np.ndarray:
        """The examples of an update, computed on the host.

        Args:
          update: Number of the update, counted on across epochs.

        Returns:
          int64 [A, R, m], -1 for padding.
        """
        return self.indices(update, 1)[0]

    def indices(self, first: int, count: int, worker: int | None = None) -> np.ndarray:
        """The examples of some updates, computed on the host.

        Args:
          first: Number of the first update, counted on across epochs.
          count: K, how many.
          worker: Only those of this worker's replicas.

        Returns:
          int64 [K, A, R, m], -1 for padding.
        """
        updates = first + tf.range(count, dtype=tf.int64)
        parts = []
        for shard in range(len(self._plan.shards)):
            indices, real = self._plan.slots(updates, shard, range(self._plan.replicas))
            parts.append(tf.where(real, indices, -1).numpy())
        found = np.concatenate(parts, axis=1).transpose(0, 2, 1, 3)
        if worker is None:
            return found
        return found[:, :, worker * self._local_replicas : (worker + 1) * self._local_replicas]

    def examples_in(self, updates: np.ndarray) -> np.ndarray:
        """How many examples some updates have: with their weights, how many of them were skipped.

        Args:
          updates: int64 [K], counted on across epochs.

        Returns:
          int64 [K, replicas].
        """
        return self._plan.examples_in(np.asarray(updates, np.int64))

    def dataset(self, worker: int = 0, local_replicas: int | None = None, start_update: int = 0) -> tf.data.Dataset:
        """The elements of one worker: for each update, one per local replica, in order.

        Args:
          worker: Which worker, in `[0, workers)`.
          local_replicas: Its replicas; always `replicas / workers`, and checked if given.
          start_update: First update; any costs the same. In training, updates are counted on
            across epochs.

        Returns:
          A dataset of `(x [A, m, ...], y [A, m, ...], weight float32 [A, m])`, static shapes.
          Weights are 1, or 0 for padding, whose examples are real ones; also 0 for examples that
          cannot be used, where they are skipped. Infinite for training;
          for evaluation, the rest of one pass, `(updates_per_epoch - start_update) *
          local_replicas` elements.

        Raises:
          ValueError: An argument is out of its range.
        """
        local = self._local_replicas
        if not 0 <= worker < self._workers or local_replicas not in (None, local):
            raise ValueError(
                f"worker={worker} with local_replicas={local_replicas} does not belong to {self._workers} workers of "
                f"{local} replicas"
            )
        if start_update < 0 or (not self._training and start_update > self.updates_per_epoch):
            raise ValueError(f"start_update={start_update} is outside the {self.updates_per_epoch} updates of a pass")
        self.source.load()  # here, not while the function below is traced: errors of the data keep their words
        elements = self._planned(worker, start_update).map(self._fetch, num_parallel_calls=self._parallel_calls())
        if self._config.data_service:
            service.check_reachable(self._config.data_service)
            elements = service.distribute(elements, self._config.data_service)
        rest = (self.updates_per_epoch - start_update) * local
        elements = elements.apply(
            tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY if self._training else rest)
        )
        if self._config.prefetch:
            elements = elements.prefetch(self._config.prefetch * local)
        return elements.with_options(self._options())

    def batch(self, update: tf.Tensor, replica: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """One element by number, without a dataset: for workers that are handed their work.

        Args:
          update: int64 scalar, counted on across epochs.
          replica: int64 scalar in `[0, replicas)`.

        Returns:
          `(x [A, m, ...], y [A, m, ...], weight float32 [A, m])`, the same element that `dataset` gives.

        Raises:
          ValueError: With file shards, where a replica's examples depend on its worker.
        """
        if self._by_file:
            raise ValueError("batch() needs shard_by='example'")
        indices, real = self._plan.slots(update[None], 0, range(self._plan.replicas))
        return self._fetch(indices[0, replica], real[0, replica])

    def _planned(self, worker: int, start_update: int) -> tf.data.Dataset:
        """(indices int64 [A, m], real bool [A, m]) for each update and local replica."""
        local = self._local_replicas
        rows = self._plan.accumulate_steps * self.micro_batch
        stride = max(1, _PLANNED_AT_ONCE // (local * rows))
        shard = worker if self._by_file else 0
        replicas = range(local) if self._by_file else range(worker * local, (worker + 1) * local)
        if not self._training:
            stride = min(stride, self.updates_per_epoch)
        # A range without end rather than Dataset.counter: in TensorFlow 2.21 that is a scan over a repeated tensor, of
        # which a tf.data service cannot hand out parts: every service worker counts from the start.
        chunks = tf.data.Dataset.range(
            start_update, _ENDLESS if self._training else self.updates_per_epoch, stride, output_type=tf.int64
        )

        @as_written
        def slots(first: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            indices, real = self._plan.slots(first + tf.range(stride, dtype=tf.int64), shard, replicas)
            flat = [stride * local, self._plan.accumulate_steps, self.micro_batch]
            return tf.reshape(indices, flat), tf.reshape(real, flat)

        planned = chunks.map(slots).unbatch()
        if not self._training:
            planned = planned.take((self.updates_per_epoch - start_update) * local)
        return planned

    @as_written
    def _fetch(self, indices: tf.Tensor, real: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        x_spec, y_spec, weight_spec = self.element_spec
        flat = tf.reshape(indices, [weight_spec.shape.num_elements()])
        if self.skips:
            x, y, usable = bad_records.fetch_usable(self.source, flat)
            real &= tf.reshape(usable, weight_spec.shape)
        else:
            x, y = self.source.fetch(flat)
        return tf.reshape(x, x_spec.shape), tf.reshape(y, y_spec.shape), tf.cast(real, tf.float32)

    def _parallel_calls(self) -> int | None:
        if self._config.input_threads:
            return self._config.input_threads
        if self.source.info.storage == "files":
            return tf.data.AUTOTUNE
        # From memory one thread keeps up, and a parallel map's hand-over would cost more than a small copy.
        spec = self.element_spec[0]
        return 2 if spec.dtype.size * spec.shape.num_elements() > _PARALLEL_BYTES else None

    def _options(self) -> tf.data.Options:
        options = tf.data.Options()
        options.deterministic = True
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        # Elements depend on their number alone; what a reader keeps (open files) is no state of the input.
        options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
        options.autotune.enabled = self._parallel_calls() == tf.data.AUTOTUNE
        if self._config.input_threads:
            options.threading.private_threadpool_size = self._config.input_threads
        return options

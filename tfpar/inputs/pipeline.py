"""The pipeline of every source: shards, shuffles, batches, pads, prefetches, resumes.

    step counter -> order (many steps at once) -> one element per replica -> fetch -> prefetch

`tfpar.inputs.epoch_order` computes the order as a pure function, so there is no shuffle buffer to
fill or to save: starting at step k costs nothing, and an element depends on its step number alone.

Shapes: A micro-batches per step, R replicas, m slots of a micro-batch on a replica.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfpar.config import InputConfig
from tfpar.inputs import bad_records, checks, epoch_order, service, structures
from tfpar.inputs import describe as report
from tfpar.inputs.source import Source, no_autograph

import numpy as np
import tensorflow as tf

# Indices computed per call: so many that the hundred small ops of a call cost little compared with reading.
_INDICES_PER_CALL = 4096
# More steps than any run takes, but few enough that adding a chunk does not overflow.
_ENDLESS = 1 << 62
# A second thread pays off for elements larger than this even if they are only copied from memory.
_PARALLEL_BYTES = 1 << 20


class Pipeline:
    """Batches of a source for every replica of a training or evaluation run.

    Args:
      source: The examples.
      config: The input options.
      accumulate_steps: A; must be 1 for evaluation.
      replicas: R, over all workers.
      workers: Number of workers; each has `replicas / workers` replicas.
      seed: Seed of the order.
      training: Shuffle and shard as configured, without end; otherwise one pass in order, every
        example exactly once, sharded by example.

    Attributes:
      source: The source.
      steps_per_epoch: Steps in one pass.
      micro_batch: m.
      examples_per_epoch: Examples of weight 1 in one pass, if all are usable.
      skips: Whether bad examples get weight 0 (`--on_bad_record=skip`).

    Raises:
      ConfigError: The data set is empty, has fewer examples than a training batch and drops the remainder, or cannot be
        sharded as configured; or the batch does not divide evenly and `uneven_batches` is off.
      ValueError: `replicas` is not a multiple of `workers`, or evaluation with `accumulate_steps > 1`.
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
        # Evaluation is one pass in order: it gains nothing from file shards, and its split may have few files.
        by_file = training and config.shard_by == "file"
        batch = config.global_batch_size
        if training and not (by_file or source.info.may_be_short):
            batch = min(batch, source.info.num_examples)  # as in `fit`, where a batch is never filled up
        self.source = source
        self._config = config
        self._training = training
        self._workers = workers
        self._by_file = by_file
        self._local_replicas = replicas // workers
        self._order = epoch_order.EpochOrder(
            shards=epoch_order.shards_by_file(source.info.records_per_file, batch, workers)
            if by_file
            else epoch_order.one_shard(source.info.num_examples, batch, source.info.block_size),
            replicas=self._local_replicas if by_file else replicas,
            accumulate_steps=accumulate_steps,
            drop_remainder=training and config.remainder == "drop",
            shuffle=training and config.shuffle,
            seed=seed,
        )
        self.steps_per_epoch = self._order.steps_per_epoch
        self.micro_batch = self._order.micro_batch
        self.examples_per_epoch = self._order.examples_per_epoch
        self.skips = source.skip or config.on_bad_record == "skip"
        checks.check_epoch(config, [shard.size for shard in self._order.shards], self.steps_per_epoch)

    @property
    def pads(self) -> bool:
        """Whether some slots in the batches of an epoch hold padding, at weight 0."""
        order = self._order
        slots = len(order.shards) * order.replicas * order.accumulate_steps * self.micro_batch
        return self.skips or self.steps_per_epoch * slots != self.examples_per_epoch

    def report(self, *, asynchronous: bool = False) -> str:
        """Returns the input report: which worker reads what, in which order. The chief prints it before the first step.

        Args:
          asynchronous: Whether each replica's share of a batch is a separate step.
        """
        return report.describe(
            self.source,
            self._config,
            self._order,
            workers=self._workers,
            by_file=self._by_file,
            training=self._training,
            asynchronous=asynchronous,
        )

    @property
    def element_spec(self) -> tuple[structures.Structure, structures.Structure, tf.TensorSpec]:
        """The specs of x [A, m, ...] and y [A, m, ...], in the structures of the source, and weight float32 [A, m]."""
        info = self.source.info
        rows = tf.TensorShape([self._order.accumulate_steps, self.micro_batch])
        return (
            structures.batch_specs(rows, info.input_spec),
            structures.batch_specs(rows, info.target_spec),
            tf.TensorSpec(rows, tf.float32),
        )

    def follow(self, iterator: Any) -> None:
        """Does nothing, unlike `StreamPipeline.follow`: the number of a step determines its examples."""

    def export(self) -> dict[str, np.ndarray]:
        """Returns no state for a checkpoint, unlike `StreamPipeline.export`."""
        return {}

    def restore(self, saved: Mapping[str, np.ndarray], *, same_workers: bool) -> str:
        """Does nothing, unlike `StreamPipeline.restore`."""
        del saved, same_workers
        return ""

    def indices(self, first: int, count: int, worker: int | None = None) -> np.ndarray:
        """Returns the examples of some steps, computed eagerly.

        Args:
          first: Number of the first step, counted across epochs.
          count: K, the number of steps.
          worker: Return only the examples of this worker's replicas; None returns all.

        Returns:
          int64 [K, A, R, m], -1 for padding.
        """
        steps = first + tf.range(count, dtype=tf.int64)
        parts = []
        for shard in range(len(self._order.shards)):
            indices, real = self._order.slots(steps, shard, range(self._order.replicas))
            parts.append(tf.where(real, indices, -1).numpy())
        of_all_workers = np.concatenate(parts, axis=1).transpose(0, 2, 1, 3)
        if worker is None:
            return of_all_workers
        return of_all_workers[:, :, worker * self._local_replicas : (worker + 1) * self._local_replicas]

    def examples_in(self, steps: np.ndarray) -> np.ndarray:
        """Returns how many examples some steps have; minus the sum of their weights, it is the number of skipped ones.

        Args:
          steps: Numbers of the steps, int64 [K], counted across epochs.

        Returns:
          int64 [K, replicas].
        """
        return self._order.examples_in(np.asarray(steps, np.int64))

    def dataset(self, worker: int = 0, local_replicas: int | None = None, start_step: int = 0) -> tf.data.Dataset:
        """Returns the elements of one worker: for each step, one per local replica, in order.

        Args:
          worker: Rank of the worker, in `[0, workers)`.
          local_replicas: Number of its replicas: None, or `replicas / workers`.
          start_step: Number of the first step; the cost does not depend on it. In training, steps are
            counted across epochs.

        Returns:
          A dataset of `(x [A, m, ...], y [A, m, ...], weight float32 [A, m])`, static shapes; `x` and `y` have the
          structures of the source (`SourceInfo.input_spec` and `target_spec`). Weights are 1, or 0 for padding, which
          repeats examples; also 0 for bad examples if they are skipped. Infinite in training; in evaluation, the rest
          of one pass, `(steps_per_epoch - start_step) * local_replicas` elements.

        Raises:
          ValueError: An argument is out of range.
        """
        local = self._local_replicas
        if not 0 <= worker < self._workers or local_replicas not in (None, local):
            raise ValueError(
                f"worker={worker} and local_replicas={local_replicas} do not fit {self._workers} workers of {local} "
                "replicas each"
            )
        if start_step < 0 or (not self._training and start_step > self.steps_per_epoch):
            raise ValueError(f"start_step={start_step} is outside the {self.steps_per_epoch} steps of a pass")
        load = self.source.load_usable if self.skips and self.source.load_usable else self.source.load
        load()  # not while `_fetch` is traced: tracing would rewrite the errors of the data
        elements = self._element_indices(worker, start_step).map(self._fetch, num_parallel_calls=self._parallel_calls())
        if self._config.data_service:
            service.check_reachable(self._config.data_service)
            elements = service.distribute(elements, self._config.data_service)
        remaining = (self.steps_per_epoch - start_step) * local
        elements = elements.apply(
            tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY if self._training else remaining)
        )
        if self._config.prefetch:
            elements = elements.prefetch(self._config.prefetch * local)
        return elements.with_options(self._options())

    def batch(
        self, step: tf.Tensor, replica: tf.Tensor
    ) -> tuple[structures.Structure, structures.Structure, tf.Tensor]:
        """Returns one element by number, without a dataset: for parameter servers, where the chief assigns the work.

        Args:
          step: Number of the step, int64 scalar, counted across epochs.
          replica: int64 scalar in `[0, replicas)`.

        Returns:
          `(x [A, m, ...], y [A, m, ...], weight float32 [A, m])`, the same element as in `dataset`.

        Raises:
          ValueError: With file shards, where a replica's examples depend on its worker.
        """
        if self._by_file:
            raise ValueError("batch() needs shard_by='example'")
        indices, real = self._order.slots(step[None], 0, range(self._order.replicas))
        return self._fetch(indices[0, replica], real[0, replica])

    def _element_indices(self, worker: int, start_step: int) -> tf.data.Dataset:
        """Returns (indices int64 [A, m], real bool [A, m]) for each step and local replica."""
        local = self._local_replicas
        rows = self._order.accumulate_steps * self.micro_batch
        stride = max(1, _INDICES_PER_CALL // (local * rows))
        shard = worker if self._by_file else 0
        replicas = range(local) if self._by_file else range(worker * local, (worker + 1) * local)
        if not self._training:
            stride = min(stride, self.steps_per_epoch)
        # An endless range rather than Dataset.counter: in TensorFlow 2.21 the latter is a scan over a repeated tensor,
        # which a tf.data service cannot distribute: every service worker counts from the start.
        chunks = tf.data.Dataset.range(
            start_step, _ENDLESS if self._training else self.steps_per_epoch, stride, output_type=tf.int64
        )

        @no_autograph
        def slots(first: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            indices, real = self._order.slots(first + tf.range(stride, dtype=tf.int64), shard, replicas)
            flat = [stride * local, self._order.accumulate_steps, self.micro_batch]
            indices, real = tf.reshape(indices, flat), tf.reshape(real, flat)
            if self._training:
                return indices, real
            # Not `take` behind `unbatch`: each worker of a tf.data service would take that many elements.
            within = local * tf.minimum(self.steps_per_epoch - first, stride)
            return indices[:within], real[:within]

        return chunks.map(slots).unbatch()

    @no_autograph
    def _fetch(
        self, indices: tf.Tensor, real: tf.Tensor
    ) -> tuple[structures.Structure, structures.Structure, tf.Tensor]:
        x_spec, y_spec, weight_spec = self.element_spec
        flat = tf.reshape(indices, [weight_spec.shape.num_elements()])
        if self.skips:
            x, y, usable = bad_records.fetch_with_mask(self.source, flat)
            real &= tf.reshape(usable, weight_spec.shape)
        else:
            x, y = self.source.fetch(flat)
        x, y = (
            tf.nest.map_structure(lambda value, spec: tf.reshape(value, spec.shape), values, specs)
            for values, specs in ((x, x_spec), (y, y_spec))
        )
        return x, y, tf.cast(real, tf.float32)

    def _parallel_calls(self) -> int | None:
        if self._config.input_threads:
            return self._config.input_threads
        if self.source.info.storage == "files":
            return tf.data.AUTOTUNE
        # One thread keeps up with copies from memory, and a parallel map's overhead would exceed that of a small copy.
        size = sum(spec.dtype.size * spec.shape.num_elements() for spec in tf.nest.flatten(self.element_spec[0]))
        return 2 if size > _PARALLEL_BYTES else None

    def _options(self) -> tf.data.Options:
        options = tf.data.Options()
        options.deterministic = True
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        # Elements depend on their number alone; what a reader keeps (open files) is not part of the input's state.
        options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
        options.autotune.enabled = self._parallel_calls() == tf.data.AUTOTUNE
        if self._config.input_threads:
            options.threading.private_threadpool_size = self._config.input_threads
        return options

"""The batches of a stream, split over replicas like those of an indexed source.

Shapes: A micro-batches per step, R replicas, L replicas of this worker, m slots of a micro-batch on a replica.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from tfpar.config import ConfigError, InputConfig
from tfpar.inputs import checks, epoch_order, structures
from tfpar.inputs import describe as report
from tfpar.inputs.source import UNKNOWN, no_autograph
from tfpar.inputs.streams import position
from tfpar.inputs.streams.source import StreamSource
from tfpar.inputs.structures import Structure

import numpy as np
import tensorflow as tf

ENDLESS = 1 << 40  # steps of an epoch of unknown length
_log = logging.getLogger(__name__)


class StreamPipeline:
    """The counterpart of `Pipeline` for a stream: elements of the same form, in the order of the stream.

    Args:
      source: The stream.
      config: The input options; only `global_batch_size`, `remainder`, `uneven_batches` and `prefetch` are used.
      accumulate_steps: Micro-batches per step.
      replicas: R, over all workers.
      workers: Number of workers that read.
      training: Whether the stream repeats; evaluation is one pass, whose length must be known.

    Attributes:
      source: The stream.
      steps_per_epoch: Steps in one pass; `ENDLESS` if unknown.
      micro_batch: m.
      examples_per_epoch: Examples that an epoch trains on.
      skips: False: an example of a stream is never skipped.

    Raises:
      ConfigError: The stream cannot be read by these workers and replicas.
    """

    skips = False

    def __init__(
        self,
        source: StreamSource,
        config: InputConfig,
        *,
        accumulate_steps: int = 1,
        replicas: int = 1,
        workers: int = 1,
        training: bool = True,
    ):
        self.source = source
        self._config = config
        self._training = training
        self._workers = workers
        self._local_replicas = replicas // workers
        self._replicas = replicas
        self._own_streams = source.sharding == "worker"
        self._check(config, replicas, workers, accumulate_steps)
        batch = config.global_batch_size
        known = source.info.num_examples != UNKNOWN
        examples = source.info.num_examples if known else batch
        # If every worker has its own stream, these are assumed to have the same length.
        streams = workers if self._own_streams else 1
        shard = epoch_order.one_shard(-(-examples // streams), batch // streams)
        self._order = epoch_order.EpochOrder(
            shards=shard * streams,
            replicas=replicas // streams,
            accumulate_steps=accumulate_steps,
            drop_remainder=training and config.remainder == "drop",
            shuffle=False,
            seed=0,
        )
        self.micro_batch = self._order.micro_batch
        self.steps_per_epoch = self._order.steps_per_epoch if known else ENDLESS
        self.examples_per_epoch = self._order.examples_per_epoch if known else UNKNOWN
        if not self.steps_per_epoch:
            raise ConfigError(
                f"--remainder=drop leaves no steps: {source.name} has {source.info.num_examples} examples, fewer than "
                f"--global_batch_size={batch}. Use --remainder=pad or a smaller batch."
            )
        self._position: position.Position | None = None
        self._iterator: tf.data.Iterator | None = None
        self._saved: Mapping[str, np.ndarray] | None = None
        self._told = False

    @property
    def pads(self) -> bool:
        """Whether some slots may hold padding, at weight 0: an uneven batch, or the last one of a pass."""
        batch = self._config.global_batch_size
        if self._replicas * self._order.accumulate_steps * self.micro_batch != batch:
            return True
        ends = not self.source.endless and not self._order.drop_remainder
        return ends and (self.steps_per_epoch == ENDLESS or self.examples_per_epoch % batch != 0)

    @property
    def element_spec(self) -> tuple[Structure, Structure, tf.TensorSpec]:
        """The specs of x [A, m, ...] and y [A, m, ...], in the structures of the source, and weight float32 [A, m]."""
        info = self.source.info
        rows = tf.TensorShape([self._order.accumulate_steps, self.micro_batch])
        return (
            structures.batch_specs(rows, info.input_spec),
            structures.batch_specs(rows, info.target_spec),
            tf.TensorSpec(rows, tf.float32),
        )

    def report(self, *, asynchronous: bool = False) -> str:
        """Returns the input report. The chief prints it before the first step."""
        del asynchronous  # parameter servers read by number
        return report.describe_stream(
            self.source.info,
            self._config,
            self._order,
            workers=self._workers,
            own_streams=self._own_streams,
            own_batch=self.source.own_batch if self._training else None,
            steps_per_epoch=None if self.steps_per_epoch == ENDLESS else self.steps_per_epoch,
            training=self._training,
        )

    def indices(self, first: int, count: int, worker: int | None = None) -> np.ndarray:
        """Returns the positions of examples in one pass of the stream.

        Args:
          first: Number of the first step.
          count: K, the number of steps.
          worker: Return only the examples of this worker's replicas; None returns all.

        Returns:
          int64 [K, A, R, m], -1 for padding; [K, 0] in training, where positions do not identify examples.
        """
        if self._training:
            return np.zeros((count, 0), np.int64)
        steps = first + tf.range(count, dtype=tf.int64)
        places, real = self._order.slots(steps, 0, range(self._order.replicas))
        all_workers = tf.where(real, places, -1).numpy().transpose(0, 2, 1, 3)
        if worker is None:
            return all_workers
        return all_workers[:, :, worker * self._local_replicas : (worker + 1) * self._local_replicas]

    def examples_in(self, steps: np.ndarray) -> np.ndarray:
        """Returns the number of examples of each replica in some steps of one pass: int64 [K, R] for int64 [K]."""
        return self._order.examples_in(np.asarray(steps, np.int64))

    def dataset(
        self, worker: int = 0, local_replicas: int | None = None, start_step: int = 0, *, stacked: bool = False
    ) -> tf.data.Dataset:
        """Returns the elements of one worker: for each step, one per local replica, in order.

        Args:
          worker: Rank of the worker.
          local_replicas: Number of its replicas: None, or `replicas / workers`.
          start_step: Not used: a stream has no random access; see `restore`.
          stacked: Whether a step is one element, `[L, A, m, ...]` if there are several local replicas.

        Returns:
          See `Pipeline.dataset`.
        """
        del local_replicas, start_step
        config, local = self._config, self._local_replicas
        context = tf.distribute.InputContext(
            num_input_pipelines=self._workers if self._own_streams else 1,
            input_pipeline_id=worker if self._own_streams else 0,
            num_replicas_in_sync=self._replicas,
        )
        batch = self._order.shards[0].batch
        batches = self.source.batches(context).rebatch(batch, drop_remainder=self._order.drop_remainder)
        if self._training:
            self._position = position.Position(batches, restores=self._saved is not None)
            batches = self._position.repeated()
        else:
            position.evaluates(batches)
            batches = batches.take(self.steps_per_epoch) if self.source.endless else batches
            batches = batches.enumerate().map(no_autograph(self._checked))
        first = 0 if self._own_streams else worker * local
        elements = batches.map(no_autograph(self._split(range(first, first + local))))
        each = 1 if stacked else local
        elements = elements.unbatch() if each > 1 else elements
        length = tf.data.INFINITE_CARDINALITY if self._training else self.steps_per_epoch * each
        elements = elements.apply(tf.data.experimental.assert_cardinality(length))
        return elements.prefetch(config.prefetch * each) if config.prefetch else elements

    def _checked(self, number: tf.Tensor, batch: tuple[Structure, Structure]) -> tuple[Structure, Structure]:
        """Returns a batch of an evaluation; checks that its size agrees with the number of examples. Of a stream that
        has no end, the last batch is cut."""
        examples, size = self.source.info.num_examples, self._config.global_batch_size
        expected = tf.clip_by_value(examples - number * size, 0, size)
        if self.source.endless:
            batch = structures.map_arrays(lambda values: values[:expected], batch)
        count = tf.shape(structures.first_leaf(batch), tf.int64)[0]
        right = tf.equal(count, expected)
        check = tf.debugging.Assert(right, [f"{self.source.name} was expected to contain {examples} examples"])
        with tf.control_dependencies([check] if check is not None else []):
            return tf.nest.map_structure(tf.identity, batch)

    def _split(self, replicas: range) -> Any:
        """Returns `(x, targets) -> (x, y, weight)`, which takes these replicas' rows: [L, A, m, ...] or [A, m, ...]."""
        order = self._order
        rows = [order.accumulate_steps, self.micro_batch]
        shape = [len(replicas), *rows] if len(replicas) > 1 else rows
        takes_all = order.replicas == 1 and order.accumulate_steps == 1

        def take(x: Structure, targets: Structure) -> tuple[Structure, Structure, tf.Tensor]:
            count = tf.shape(structures.first_leaf((x, targets)), tf.int64)[0]
            place, real = epoch_order.split_batch(
                tf.reshape(count, [1, 1, 1, 1]),
                micro_batches=order.accumulate_steps,
                replicas=order.replicas,
                local=replicas,
                slots=self.micro_batch,
            )
            place = tf.reshape(place, [-1])

            def rows_of(values: tf.Tensor) -> tf.Tensor:
                if takes_all:  # all rows in order, unless the batch is not full
                    full = tf.equal(count, self.micro_batch)
                    values = tf.cond(full, lambda: values, lambda: tf.gather(values, place))
                else:
                    values = tf.gather(values, place)
                return tf.reshape(values, [*shape, *values.shape[1:]])

            x, y = structures.map_arrays(rows_of, (x, targets))
            return x, y, tf.cast(tf.reshape(real, shape), tf.float32)

        return take

    def follow(self, iterator: Any) -> None:
        """Keeps the iterator that training reads; if `restore` was called, sets it to the saved position.

        Args:
          iterator: A tf.data iterator over `dataset`; the position of any other object is not saved.
        """
        self._iterator = iterator if isinstance(iterator, tf.data.Iterator) else None
        saved, self._saved = self._saved, None
        if saved is None or self._iterator is None or self._position is None:
            return
        try:
            self._position.restore(self._iterator, saved)
        except tf.errors.OpError as error:
            raise ConfigError(
                f"{self.source.name}: the position of the saved run does not fit this stream ({_first_line(error)}). "
                "Give the same tf.data pipeline, or start in another workdir with warm_start."
            ) from error

    def export(self) -> dict[str, np.ndarray]:
        """Returns the position in the stream for a checkpoint, see `Position.save`; no bytes if it cannot be saved."""
        none = {
            position.STATE: np.zeros(0, np.uint8)
        }  # not empty, because either all workers or none must write arrays
        if self._iterator is None or self._position is None:
            return none
        try:
            return self._position.save(self._iterator)
        except tf.errors.OpError as error:
            if not self._told:
                _log.warning(
                    "%s: tf.data cannot save this stream's position (%s); a run that resumes starts the stream again",
                    self.source.name,
                    _first_line(error),
                )
            self._told = True
            return none

    def restore(self, saved: Mapping[str, np.ndarray], *, same_workers: bool) -> str:
        """Resumes from this worker's export. Call it before `dataset`; it takes effect with `follow`.

        Args:
          saved: The result of `export`.
          same_workers: Whether the saved run had the same numbers of workers and replicas.

        Returns:
          A message for the user: where the stream continues.
        """
        if same_workers and position.STATE in saved and saved[position.STATE].size:
            self._saved = saved
            return f"{self.source.name}: the stream continues where it stopped"
        why = "the position was not saved" if same_workers else "the saved run had other workers"
        return (
            f"{self.source.name}: the stream starts again from its beginning ({why}), so the examples that it gave "
            "since the last epoch began repeat"
        )

    def _check(self, config: InputConfig, replicas: int, workers: int, accumulate_steps: int) -> None:
        name = self.source.name
        if replicas < 1 or workers < 1 or replicas % workers:
            raise ValueError(f"replicas={replicas} must be a positive multiple of workers={workers}")
        if config.data_service:
            raise ConfigError(f"--data_service: {name} is a tf.data.Dataset. Distribute it in its own pipeline.")
        if self._training and config.shard_by == "file":
            raise ConfigError(
                f"--shard_by=file: {name} is a tf.data.Dataset. Let each worker read files of its own: "
                'from_dataset(..., sharding="worker").'
            )
        if self._training:
            checks.check_divides(config, replicas, accumulate_steps)
        elif self.source.info.num_examples == UNKNOWN:
            raise ConfigError(f"{name}: evaluation needs the number of examples. Call counted() on the source first.")
        if self._own_streams and not self._training:
            raise ConfigError(
                f"{name}: an evaluation counts every example once, which is impossible if each worker has its own "
                "stream. "
                'Give a dataset that is the same on every worker: from_dataset(..., sharding="example").'
            )
        if self._own_streams and config.global_batch_size % workers:
            raise ConfigError(
                f"--global_batch_size={config.global_batch_size} is not divisible by {workers} workers, each of which "
                f"has a stream of its own ({name}). Choose a multiple of {workers}."
            )


def _first_line(error: BaseException) -> str:
    text = str(getattr(error, "message", "") or error).strip()
    return text.splitlines()[0].partition("}} ")[2].partition(" [Op:")[0] or text.splitlines()[0] if text else ""

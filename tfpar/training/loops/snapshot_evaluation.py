"""Evaluation of a snapshot of the weights on the chief, during training with parameter servers."""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tfpar import inputs
from tfpar.config import InputConfig
from tfpar.monitor import samples
from tfpar.parallel.topology import Topology
from tfpar.training.model.whole_batches import BatchReaders, warn_of_left_out
from tfpar.training.program import Program
from tfpar.training.uneven_batches import eval_input

import numpy as np
import tensorflow as tf

_CHIEF = "/job:chief/replica:0/task:0/device:CPU:0"


class SnapshotResults(NamedTuple):
    """The results of the evaluation of a snapshot.

    Attributes:
      step: The step after which the snapshot was taken.
      results: `loss`, `examples` and metrics by name.
      text: A language model's continuation of the first example, or None if the examples are not text.
    """

    step: int
    results: Mapping[str, Any]
    text: samples.Continuation | None


class SnapshotEvaluation:
    """Evaluates in a separate thread, one snapshot at a time.

    Args:
      program: The program, on the chief of `parameter_server`.
      validation: The examples.
    """

    def __init__(self, program: Program, validation: inputs.AnySource) -> None:
        self._program = program
        self._validation = validation
        self._batch_sums = tf.function(program.core.evaluate, jit_compile=program.jit_compile or None, autograph=False)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="evaluation")
        self._pending: concurrent.futures.Future[SnapshotResults] | None = None

    def check(self) -> None:
        """Refuses padding that a loss over whole batches would count.

        Raises:
          ConfigError: With what to do.
        """
        self._readers.check(self._pipeline, self._validation, self._input, training=False)
        warn_of_left_out(self._without, self._validation)

    def start(self, step: int) -> None:
        """Takes a snapshot of the weights after step `step`. The results of the previous snapshot have been
        collected."""
        self._pending = self._thread.submit(self._evaluate, step, *self._snapshot())

    def collect(self, *, wait: bool) -> SnapshotResults | None:
        """The results of the started snapshot, once; None if there are none yet.

        Args:
          wait: Wait for them.
        """
        if self._pending is None or not (wait or self._pending.done()):
            return None
        pending, self._pending = self._pending, None
        return pending.result()

    def close(self) -> None:
        """Ends the thread, without waiting for results that nobody collects: the run may have failed."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _snapshot(self) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        with tf.device(_CHIEF):
            return (
                [tf.identity(variable.value) for variable in self._program.eval_weights()],
                [tf.identity(variable.value) for variable in self._program.model.non_trainable_variables],
            )

    def _evaluate(self, step: int, params: list[tf.Tensor], state: list[tf.Tensor]) -> SnapshotResults:
        total: list[np.ndarray] | None = None
        rows: list[list[np.ndarray]] = []  # for each batch, the rows that `Totals.weighted_losses` takes
        with tf.device(_CHIEF):
            for batch in self._batches:
                sums = self._batch_sums(params, state, batch)
                row = [np.asarray(part, np.float64) for part in (sums.loss, sums.count, *sums.metrics)]
                rows.append(row[: self._program.core.objective.totals.columns])
                total = row if total is None else [a + b for a, b in zip(total, row, strict=True)]
            text = None
            # Without a run directory, nothing is written.
            if self._program.config.checkpoint.workdir and samples.continues_text(self._validation):
                text = samples.continue_first(self._program.text_sampler, params, state, self._validation, seed=step)
        if total is None:
            return SnapshotResults(step, {}, text)
        loss, count, *metrics = total
        weighted = self._program.core.objective.totals.weighted_losses(np.array(rows))
        results = self._program.core.evaluation_results(loss, count, metrics, self._without, weighted)
        return SnapshotResults(step, results, text)

    @property
    def _input(self) -> InputConfig:
        return eval_input(self._program.config)

    @functools.cached_property
    def _readers(self) -> BatchReaders:
        """As in a run on one device: the chief evaluates alone, on its CPU."""
        return BatchReaders.of(self._program.core, Topology(name="one_device"))

    @functools.cached_property
    def _pipeline(self) -> inputs.AnyPipeline:
        layout: dict[str, Any] = {"accumulate_steps": 1, "replicas": 1, "workers": 1}
        return inputs.build_pipeline(self._validation, self._input, **layout, seed=0, training=False)

    @property
    def _without(self) -> Sequence[str]:
        """Names of the model's metrics that padding would distort."""
        return self._readers.distorted_metrics(self._pipeline)

    @functools.cached_property
    def _batches(self) -> tf.data.Dataset:
        """The batches, created once: TensorFlow 2.21 sends every traced function to all workers, and holds Python's
        lock until they have answered."""
        dataset = self._readers.shorten(self._pipeline, self._pipeline.dataset(0, 1), padded=False)
        return dataset.take(self._program.config.train.eval_steps or -1)

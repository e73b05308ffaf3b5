"""Evaluation of a snapshot of the weights on the chief, during training with parameter servers."""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from tfpar import inputs
from tfpar.monitor import samples
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
        results = self._program.core.evaluation_results(loss, count, metrics, weighted_losses=weighted)
        return SnapshotResults(step, results, text)

    @functools.cached_property
    def _batches(self) -> tf.data.Dataset:
        """The batches, created once: TensorFlow 2.21 sends every traced function to all workers, and holds Python's
        lock until they have answered."""
        pipeline = inputs.build_pipeline(
            self._validation,
            eval_input(self._program.config),
            accumulate_steps=1,
            replicas=1,
            workers=1,
            seed=0,
            training=False,
        )
        return pipeline.dataset(0, 1).take(self._program.config.train.eval_steps or -1)

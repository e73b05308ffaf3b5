"""Evaluation over all replicas: every example once, one sum over the workers at the end."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from tfpar import inputs
from tfpar.cluster import failure
from tfpar.collectives.agreement import WorkerAgreement
from tfpar.collectives.tensorflow import world_group
from tfpar.guards.bad_examples import SkippedExampleLog, named
from tfpar.guards.watchdog import Watchdog
from tfpar.parallel import replica
from tfpar.parallel.tensor.divided_logits import gathered
from tfpar.parallel.traced_gradients import graphs_released
from tfpar.process.activity import activity
from tfpar.process.heap import keep_tensors_on_heaps
from tfpar.training import confusion
from tfpar.training.core import Core
from tfpar.training.model.whole_batches import warn_of_left_out
from tfpar.training.program import Program

import keras
import numpy as np
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class BatchCalls:
    """Functions called around each batch of an evaluation or a prediction, on every worker.

    Attributes:
      begin: Takes the number of the batch, from 0.
      end: Takes the number of the batch, and its logs as Keras names them.
      stop: Whether to end after this batch; one worker's True is enough.
    """

    begin: Callable[[int], None]
    end: Callable[[int, Mapping[str, Any]], None]
    stop: Callable[[], bool]


class AnyEvaluator(Protocol):
    """The interface that a loop uses for evaluation.

    Attributes:
      confusion: Examples of the last evaluation by class and prediction, or None; see `Evaluator`.
    """

    confusion: np.ndarray | None

    def __call__(self, source: inputs.AnySource, *, steps: int = 0, calls: BatchCalls | None = None) -> dict[str, Any]:
        """Loss and metrics by name, the same on every worker; all workers call it together. See `Evaluator`."""


class Evaluator:
    """Evaluates a program on sources, under a synchronous strategy. Later calls reuse the compiled functions.

    Args:
      program: Model, loss and metrics under the strategy.

    Attributes:
      confusion: Float64 `[C, C]`: examples of the last evaluation by class (rows) and prediction (columns); None where
        the source or the model has no such classes.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self.confusion: np.ndarray | None = None
        self._evaluation: Evaluation | None = None
        self._elements: tuple[inputs.AnySource, inputs.AnyPipeline, Any] | None = None
        self._named_skipped: set[str] = set()  # fingerprints of sources whose skipped examples have been named
        self._named_distorted: set[str] = set()  # fingerprints of sources whose padding has been named

    def __call__(self, source: inputs.AnySource, *, steps: int = 0, calls: BatchCalls | None = None) -> dict[str, Any]:
        """Loss and metrics over the examples of a source, each counted once; all workers call it together.

        Args:
          source: Examples; no shuffling, no augmentation.
          steps: Batches to use, from the beginning; 0: all.
          calls: Functions to call around each batch, with the results so far; for them, results are summed over the
            workers after each batch.

        Returns:
          `loss`, `examples`, and one entry per metric.
        """
        program, topology = self._program, self._program.topology
        pipeline, elements = self._pipeline_and_elements(source)
        batches = min(steps or pipeline.steps_per_epoch, pipeline.steps_per_epoch)
        total = min(batches * program.config.eval_batch_size, source.info.num_examples)
        read = functools.partial(pipeline.indices, 0, batches, topology.data_worker)
        evaluation = self._current(program.eval_weights(), confusion.classes_of(source.info))
        examples_done = functools.partial(evaluation.examples_done, program.config.eval_batch_size)
        names = program.batch_readers.distorted_metrics(pipeline)
        what = f"evaluating {source.info.name}"
        with (
            Watchdog.of_run(program.config, topology, first=what, count=examples_done),
            failure.peer_errors_named(topology.cluster),
            graphs_released(),
            program.averages.shown(),
            named(source, read),
            activity(what, count=examples_done, total=total, shown=program.reports),
        ):
            iterator = iter(elements)
            keep_tensors_on_heaps()
            results = evaluation.run(iterator, batches, without=names, calls=calls)
        self.confusion = evaluation.confusion if np.any(evaluation.confusion) else None
        if names and source.info.fingerprint not in self._named_distorted:
            self._named_distorted.add(source.info.fingerprint)
            warn_of_left_out(names, source)
        already_named = source.info.fingerprint in self._named_skipped
        if evaluation.stopped:
            return results
        if results["examples"] < total and topology.is_chief and not already_named:
            self._named_skipped.add(source.info.fingerprint)
            SkippedExampleLog(pipeline, is_chief=True).name(np.arange(total))
        return results

    def _current(self, weights: Sequence[keras.Variable], classes: int) -> Evaluation:
        """The compiled evaluation for the current weights, which change once moving averages exist."""
        current = self._evaluation
        if current is None or current.classes != classes or not all(map(operator.is_, current.weights, weights)):
            program = self._program
            self._evaluation = Evaluation(
                program.core,
                program.strategy,
                agreement=WorkerAgreement(world_group(program.topology.workers, program.topology.worker), "evaluate()"),
                jit_compile=program.compiles_whole,
                weights=weights,
                classes=classes,
                within=program.placing.within,
                model_devices=program.topology.model_devices,
                counts=program.placing.adds_sums,
            )
        assert self._evaluation is not None
        return self._evaluation

    def _pipeline_and_elements(self, source: inputs.AnySource) -> tuple[inputs.AnyPipeline, Any]:
        """The pipeline of a source and its elements; kept for the next evaluation, because creating them takes 0.3
        s."""
        if self._elements is None or self._elements[0] is not source:
            pipeline = self._program.pipeline(source, training=False)
            self._elements = source, pipeline, self._program.distribute(pipeline)
        return self._elements[1:]


class Evaluation:
    """Computes loss and metrics of a model on a data set.

    Args:
      core: Model, loss and metrics.
      strategy: A synchronous strategy that the model was created under.
      agreement: The agreement between the workers of the strategy.
      jit_compile: Compile the forward pass with XLA.
      weights: The trainable weights to use, in order: the model's own, or their moving averages.
      classes: The number of classes whose predictions are counted, see `confusion.counts`; 0 for none.
      within: Opens the context of a replica's program, see `Placing.within`.
      model_devices: Devices that divide the layers of a replica, each with its own program.
      counts: Whether this worker's sums count; of the workers that divide the same layers, only one counts.

    Attributes:
      weights: As given, as a list.
      classes: As given.
      confusion: Float64 `[classes, classes]`: the counts of the last run.
      stopped: Whether `calls` ended the last run before its last batch.
    """

    def __init__(
        self,
        core: Core,
        strategy: tf.distribute.Strategy,
        *,
        agreement: WorkerAgreement,
        jit_compile: bool,
        weights: Sequence[keras.Variable],
        classes: int = 0,
        within: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        model_devices: int = 1,
        counts: bool = True,
    ) -> None:
        self._core, self._counts = core, counts
        self._within, self._model_devices = within, model_devices
        self._strategy = strategy
        self._agreement = agreement
        self.weights = list(weights)
        self.classes = classes
        self.confusion = np.zeros([classes, classes])
        self.stopped = False
        self._first = 0  # index of the first batch of the current call of `_run`
        on_tpu = isinstance(strategy, tf.distribute.TPUStrategy)
        compile_here = jit_compile and not on_tpu
        self._sums = (
            tf.function(self._batch_sums, jit_compile=True, autograph=False) if compile_here else self._batch_sums
        )
        with tf.device("CPU:0"):
            self._batches_done = tf.Variable(0)
        self._run = tf.function(self._loop, autograph=False)
        self._run._omit_frequent_tracing_warning = True  # see `TrainStep`

    def examples_done(self, batch_size: int) -> int:
        """The progress of `run`, for another thread; includes padding in the last batch."""
        return (self._first + int(self._batches_done.numpy())) * batch_size

    def run(
        self, iterator: Iterator[Any], batches: int, *, without: Sequence[str] = (), calls: BatchCalls | None = None
    ) -> dict[str, Any]:
        """Evaluates.

        Args:
          iterator: Distributed iterator over elements `(x, y, weight)` with a leading axis of 1.
          batches: How many elements each replica takes; the same on every worker.
          without: Names of metrics that the model updates itself, to leave out.
          calls: Called around each batch.

        Returns:
          `loss` (mean over examples, or positions), `examples`, and one entry per metric.
        """
        self._first, self.stopped = 0, False
        if calls is None:
            return self._results(*self._sums_of(iterator, batches), without)
        sums: np.ndarray = np.zeros(())
        losses: dict[str, float] = {}
        results: dict[str, Any] = {}
        for self._first in range(batches):
            calls.begin(self._first)
            added, added_losses = self._sums_of(iterator, 1)
            sums = sums + added
            losses |= {name: losses.get(name, 0.0) + value for name, value in added_losses.items()}
            results = self._results(sums, losses, without)
            calls.end(self._first, {name: value for name, value in results.items() if name != "examples"})
            if self._agreement.sums([float(calls.stop())])[0]:
                self.stopped = self._first < batches - 1
                break
        return results

    def _sums_of(self, iterator: Iterator[Any], batches: int) -> tuple[np.ndarray, dict[str, float]]:
        """The sums of the next batches over all workers, and their `Totals.weighted_losses`."""
        total, rows = (part.numpy() for part in self._run(iterator, tf.constant(batches)))
        own = np.concatenate([total, rows.ravel()])
        vector = self._agreement.sum_arrays(own if self._counts else np.zeros_like(own))  # 0 x inf would be NaN
        losses = self._core.objective.totals.weighted_losses(vector[total.size :].reshape(rows.shape))
        return vector[: total.size], losses

    def _results(self, sums: np.ndarray, losses: Mapping[str, float], without: Sequence[str]) -> dict[str, Any]:
        loss, count, *metrics, self.confusion = self._split(sums)
        return self._core.evaluation_results(loss, count, metrics, without, losses)

    def _loop(self, iterator: Iterator[Any], batches: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """This worker's sums over all batches, `[length]`, and the first sums of each batch, `[batches, columns]`."""
        length = sum(int(np.prod(shape)) for shape in self._shapes())
        columns = self._core.objective.totals.columns

        def body(index: tf.Tensor, total: tf.Tensor, rows: tf.TensorArray) -> tuple[tf.Tensor, ...]:
            self._batches_done.assign(index)
            batch = replica.next_batch(self._strategy, iterator, model_devices=self._model_devices)
            parts = self._strategy.experimental_local_results(self._strategy.run(self._replica_sums, args=(batch,)))
            parts = parts[:: self._model_devices]  # all devices of a replica see the same examples
            # float64: counts must stay exact past 2^24 examples.
            added = tf.add_n([tf.cast(part, tf.float64) for part in parts])
            return index + 1, total + added, rows.write(index, added[:columns])

        rows = tf.TensorArray(tf.float64, batches, element_shape=[columns])
        start = (tf.constant(0), tf.zeros([length], tf.float64), rows)
        _, total, rows = tf.while_loop(lambda index, *_: index < batches, body, start, parallel_iterations=1)
        return total, rows.stack()

    def _replica_sums(self, batch: Any) -> tf.Tensor:
        state = replica.read(self._core.model.non_trainable_variables)
        with self._within():
            return self._sums(replica.read(self.weights), state, batch)

    def _batch_sums(self, params: list[tf.Tensor], state: list[tf.Tensor], batch: Any) -> tf.Tensor:
        sums, outputs = self._core.evaluate_with_outputs(params, state, batch)
        parts = [*sums.metrics, *([self._confusion_of(batch, outputs)] if self.classes else [])]
        return tf.concat([tf.stack([sums.loss, sums.count]), *[tf.reshape(part, [-1]) for part in parts]], axis=0)

    def _confusion_of(self, batch: Any, outputs: Any) -> tf.Tensor:
        if outputs is None:  # another worker has the outputs
            return tf.zeros([self.classes, self.classes])
        return confusion.counts(batch, keras.tree.map_structure(gathered, outputs), self.classes)

    def _split(self, vector: np.ndarray) -> list[np.ndarray]:
        shapes = self._shapes()
        ends = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]
        return [part.reshape(shape) for part, shape in zip(np.split(vector, ends), shapes, strict=True)]

    def _shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the sums: loss, count, metrics, confusion."""
        metrics = [tuple(variable.shape) for variable in self._core.metric_variables]
        return [(), (), *metrics, (self.classes, self.classes)]

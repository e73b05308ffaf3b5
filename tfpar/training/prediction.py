"""Prediction over all replicas: the model's outputs for every example, in the order of the examples."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

from tfpar import inputs
from tfpar.cluster import failure
from tfpar.collectives.agreement import WorkerAgreement
from tfpar.collectives.tensorflow import world_group
from tfpar.guards.bad_examples import named
from tfpar.guards.watchdog import Watchdog
from tfpar.parallel import replica
from tfpar.parallel.traced_gradients import graphs_released
from tfpar.process.activity import activity
from tfpar.process.heap import keep_tensors_on_heaps
from tfpar.training.evaluation import BatchCalls
from tfpar.training.objective.outputs import check_inputs
from tfpar.training.program import Program

import keras
import numpy as np
import tensorflow as tf


class Predictor:
    """Predicts with a program's model, under a synchronous strategy. Later calls reuse the compiled functions.

    Args:
      program: The model under the strategy.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._weights: list[keras.Variable] = []
        self._forward: Any = None
        self._accepted: list[Any] = []

    def __call__(self, source: inputs.AnySource, *, calls: BatchCalls | None = None) -> Any:
        """The model's outputs for all examples of a source; all workers call it together.

        Args:
          source: Examples; no shuffling, no augmentation. Labels are not read.
          calls: Functions to call around each batch, with `outputs`: the model's outputs for this worker's examples.

        Returns:
          Arrays `[n, ...]` in the structure of the model's outputs, in the order of the examples, the same on every
          worker. An example that `--on_bad_record=skip` leaves out has NaN, or 0 where outputs are integers.

        Raises:
          ConfigError: The model cannot be called on such examples.
        """
        program, topology = self._program, self._program.topology
        with program.strategy.scope():
            check_inputs(program.model, source.info.input_spec, self._accepted)
        pipeline = program.pipeline(source, training=False)
        worker, counts = topology.data_worker, program.placing.has_outputs
        iterator = iter(program.distribute(pipeline, padded=True))
        forward = self._current(program.eval_weights())
        numbers: list[np.ndarray] = []
        rows: list[list[np.ndarray]] = []
        structure: Any = None
        batches = pipeline.steps_per_epoch
        what = f"predicting {source.info.name}"
        shown = activity(f"{what}, batch", count=lambda: len(rows), total=batches, shown=program.reports)
        agreement = WorkerAgreement(world_group(topology.workers, topology.worker), "predict()")
        watchdog = Watchdog.of_run(program.config, topology, first=what, count=lambda: len(rows))
        with watchdog, failure.peer_errors_named(topology.cluster), graphs_released(), program.averages.shown(), shown:
            for step in range(batches):
                if calls:
                    calls.begin(step)
                with named(source, functools.partial(pipeline.indices, step, 1, worker)):
                    structure, real = forward(iterator)
                keep_tensors_on_heaps()
                places = pipeline.indices(step, 1, worker).reshape(-1)
                is_example = places >= 0
                numbers.append(places[is_example])
                rows.append(
                    [
                        _blank_where(~real.numpy()[is_example], part.numpy()[is_example])
                        for part in tf.nest.flatten(structure)
                    ]
                )
                if calls:
                    calls.end(step, {"outputs": tf.nest.pack_sequence_as(structure, rows[-1])})
                    if agreement.sums([float(calls.stop())])[0]:
                        break
            # Workers that share a replica have the same outputs: only those of the first worker count.
            columns = [np.concatenate(parts)[: None if counts else 0] for parts in zip(*rows, strict=True)]
            numbers = numbers if counts else [part[:0] for part in numbers]
            order = np.argsort(np.concatenate(agreement.gather_arrays(np.concatenate(numbers))), kind="stable")
            arrays = [np.concatenate(agreement.gather_arrays(column))[order] for column in columns]
        return tf.nest.pack_sequence_as(structure, arrays)

    def _current(self, weights: Sequence[keras.Variable]) -> Any:
        """The compiled forward pass for the current weights, which change once moving averages exist."""
        if self._forward is None or not all(map(operator.is_, self._weights, weights)):
            self._weights = list(weights)
            self._forward = self._compiled()
        return self._forward

    def _compiled(self) -> Any:
        """`(iterator) -> (outputs [slots, ...], real bool [slots])` of the next batch, on this worker's replicas."""
        program = self._program
        on_tpu = isinstance(program.strategy, tf.distribute.TPUStrategy)
        model: Any = program.core.predict
        if not program.placing.several:  # otherwise every device has its own program
            compiles = program.compiles_whole and not on_tpu
            model = tf.function(model, jit_compile=True if compiles else None, autograph=False)

        def on_replica(batch: Any) -> tuple[Any, tf.Tensor]:
            state = replica.read(program.model.non_trainable_variables)
            with program.placing.within():
                outputs = model(replica.read(self._weights), state, batch)
            return outputs, tf.reshape(batch[2], [-1]) > 0

        def run(iterator: Any) -> Any:
            batch = replica.next_batch(program.strategy, iterator, model_devices=program.topology.model_devices)
            results = program.strategy.run(on_replica, args=(batch,))

            def joined(value: Any) -> tf.Tensor:
                with tf.device("CPU:0"):
                    parts = program.strategy.experimental_local_results(value)
                    return tf.concat(parts[:: program.topology.model_devices], axis=0)

            return tf.nest.map_structure(joined, results)

        function = tf.function(run, autograph=False)
        function._omit_frequent_tracing_warning = True  # see `TrainStep`
        return function


def _blank_where(skipped: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Values `[n, ...]` with the rows without an example overwritten."""
    if skipped.any():
        values = values.copy()
        values[skipped] = np.nan if np.issubdtype(values.dtype, np.inexact) else 0
    return values

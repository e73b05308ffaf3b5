"""Evaluation of the server's weights on the validation examples, and on the examples of single clients.

Shapes: K clients, M examples of the largest client.
"""

from __future__ import annotations

from typing import Any

from tfpar import inputs
from tfpar.collectives.agreement import WorkerAgreement
from tfpar.collectives.tensorflow import world_group
from tfpar.outer.federated.population import Population
from tfpar.process.activity import activity
from tfpar.training.evaluation import BatchCalls, Evaluator
from tfpar.training.program import Program

import numpy as np
import tensorflow as tf

_WIDTH = 256  # the most examples of a client in one forward pass
_EXAMPLES = 4096  # examples in one call, approximately


class FederatedEvaluator(Evaluator):
    """`Evaluator` that also reports the distribution of accuracy over clients.

    Args:
      program: Model, loss and metrics under the strategy.
      population: The clients.

    Attributes:
      by_client: Float64 `[K]`: the accuracy on each client of the last evaluation, or the loss if the model has no
        metric; empty before the first evaluation.
    """

    def __init__(self, program: Program, population: Population) -> None:
        super().__init__(program)
        self.by_client = np.zeros(0)
        self._population, self._core = population, program.core
        topology = program.topology
        self._agreement = WorkerAgreement(world_group(topology.workers, topology.worker), "evaluate()")
        self._sums = tf.function(self._rows_sums, autograph=False, jit_compile=program.compiles_whole or None)
        self._fetch = tf.function(self._read, autograph=False)

    def __call__(self, source: inputs.AnySource, *, steps: int = 0, calls: BatchCalls | None = None) -> dict[str, Any]:
        """Evaluates as `Evaluator` does, and adds minimum, tenth percentile, mean and maximum over the clients.

        Each client has the same weight in these figures, regardless of its number of examples.
        """
        results = super().__call__(source, steps=steps, calls=calls)
        name, self.by_client = self._of_clients()
        if not len(self.by_client):
            return results
        return results | {
            f"client_{name}_mean": float(self.by_client.mean()),
            f"client_{name}_min": float(self.by_client.min()),
            f"client_{name}_p10": float(np.percentile(self.by_client, 10)),
            f"client_{name}_max": float(self.by_client.max()),
        }

    def _of_clients(self) -> tuple[str, np.ndarray]:
        """Returns the name of the first metric and its value on each of some clients, the same in every evaluation."""
        population, program = self._population, self._program
        parts = population.held if population.options.client_holdout else population.parts
        having = np.flatnonzero([len(part) > 0 for part in parts])
        count = min(population.options.clients_evaluated, len(having))
        if not count:
            return "", np.zeros(0)
        clients = having[np.linspace(0, len(having) - 1, count).astype(np.int64)]
        with activity(f"evaluating on {count} clients", shown=program.reports):
            table = self._sums_of([parts[client] for client in clients])
        values = [self._results(row) for row in table]
        # Not of all results: those of several outputs contain the loss of each.
        core = self._core
        metrics = {*core.objective.totals.metrics, *(metric.name for metric in core.model_metrics)}
        name = next((each for each in values[0] if each in metrics), "loss")
        return name, np.array([float(np.mean(value[name])) for value in values])

    def _sums_of(self, parts: list[np.ndarray]) -> np.ndarray:
        """Returns loss, count and metrics, summed over the examples of each client: float64 `[K, n]`.

        Each worker evaluates a share of the clients.

        Args:
          parts: For each client, the indices of the examples to evaluate on.
        """
        program = self._program
        params = program.first_copies(program.eval_weights())
        state = program.first_copies(program.model.non_trainable_variables)
        width = min(_WIDTH, max(map(len, parts)))
        chunks = [
            (place, part[at : at + width]) for place, part in enumerate(parts) for at in range(0, len(part), width)
        ]
        chunks = chunks[program.topology.worker :: program.topology.workers]
        table, rows = np.zeros([len(parts), self._length]), max(1, min(len(chunks), _EXAMPLES // width))
        for first in range(0, len(chunks), rows):
            group = chunks[first : first + rows]
            indices, weights = np.zeros([rows, width], np.int64), np.zeros([rows, width], np.float32)
            for row, (_, chunk) in enumerate(group):
                indices[row, : len(chunk)], weights[row, : len(chunk)] = chunk, 1.0
            sums = self._sums(params, state, self._fetch(tf.constant(indices)), tf.constant(weights)).numpy()
            np.add.at(table, [place for place, _ in group], sums[: len(group)])
        return self._agreement.sum_arrays(table) if program.topology.workers > 1 else table

    @property
    def _length(self) -> int:
        return 2 + sum(int(np.prod(each.shape)) for each in self._core.metric_variables)

    def _read(self, indices: tf.Tensor) -> Any:
        """Returns the inputs and labels of the examples with these indices, `[rows, width]`."""
        x, y = self._population.source.fetch(tf.reshape(indices, [-1]))
        shape = tf.shape(indices)
        return tf.nest.map_structure(lambda part: tf.reshape(part, tf.concat([shape, part.shape[1:]], 0)), (x, y))

    def _rows_sums(self, params: list[tf.Tensor], state: list[tf.Tensor], examples: Any, weights: tf.Tensor) -> Any:
        """Returns the sums over each row of examples, float32 `[rows, n]`."""
        x, y = examples

        def row(place: tf.Tensor) -> tf.Tensor:
            batch = tf.nest.map_structure(lambda part: part[place][tf.newaxis], (x, y, weights))
            return self._batch_sums(params, state, batch)

        spec = tf.TensorSpec([self._length], tf.float32)
        return tf.map_fn(row, tf.range(weights.shape[0]), fn_output_signature=spec, parallel_iterations=1)

    def _batch_sums(self, params: list[tf.Tensor], state: list[tf.Tensor], batch: Any) -> tf.Tensor:
        sums = self._core.evaluate(params, state, batch)
        front = tf.stack([sums.loss, sums.count])
        return tf.concat([front, *[tf.reshape(each, [-1]) for each in sums.metrics]], axis=0)

    def _results(self, vector: np.ndarray) -> dict[str, Any]:
        shapes = [tuple(variable.shape) for variable in self._core.metric_variables]
        ends = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]
        parts = [part.reshape(shape) for part, shape in zip(np.split(vector[2:], ends), shapes, strict=True)]
        return self._core.evaluation_results(vector[0], vector[1], parts)

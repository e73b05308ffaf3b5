"""Rounds of local steps: workers train independently, then exchange their movements (Douillard et al. 2023).

Between two rounds every worker has its own weights, the *inner* weights, which its own steps change. At the end of a
round, worker k has moved by `d_k = outer - inner_k`. Its share `s_k` is its fraction of the loss count of the round: of
the examples, or positions, over which the workers' losses are averaged. The exchange sums `s_k d_k`, with the codec and
the error feedback of `--exchange`; the outer optimizer applies the sum to the *outer* weights, from which all workers
continue. Batch statistics are averaged with the same shares, without compression.

`weights.py` has the two sets of weights; `streaming.py` exchanges fragments of them while steps run.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tfpar import precision
from tfpar.collectives.agreement import WorkerAgreement
from tfpar.config import OuterConfig
from tfpar.config.sections.outer import AUTO
from tfpar.exchange import Exchange, Traffic
from tfpar.optim.pure_update import pure_apply
from tfpar.outer import optimizers
from tfpar.outer.local.lost import LostWorkers
from tfpar.outer.local.pace import TRIAL_STEPS, Pace
from tfpar.outer.local.parts import WHOLE, Parts, Tensors, by_program
from tfpar.outer.local.weights import TwoSets, function
from tfpar.parallel import replica
from tfpar.parallel.pipeline.devices import beside, call_beside

import keras
import numpy as np
import tensorflow as tf

# Bytes that each worker sends to each other worker, as float64: in a step, its loss, count, divisor and flag; in a
# round, its weight, norm and flag.
STEP_BYTES, ROUND_BYTES = 32, 24


class RoundReport(NamedTuple):
    """The report of a round, the same on every worker but for the bytes.

    Attributes:
      drift: Root mean square of the workers' distances from their mean, L2, weighted by their shares.
      movement: L2 norm of the mean movement that was applied.
      update: L2 norm of the change of the outer weights.
      wire_bytes: Bytes that this worker has sent in the exchange.
      fragment: Number of the model's fragment; 0 if the model is exchanged whole.
    """

    drift: float
    movement: float
    update: float
    wire_bytes: int
    fragment: int = 0


class Rounds:
    """The outer weights of a run, and the end of its rounds. Every worker has one such object.

    Workers that hold a replica between them train together, and count as one worker in all that follows; only `parts`
    and the exchange tell them apart.

    Args:
      options: The length of a round, and the outer optimizer.
      weights: The model's trainable weights, created under the strategy.
      state: The model's state that workers average: floating-point variables, such as batch statistics.
      kept: The model's other state, which each worker keeps for itself.
      inner: The optimizer of the local steps.
      exchange: The exchange that is built for the weights, with its own group.
      strategy: The running strategy.
      worker: Index of this worker, or of its replica.
      workers: Number of workers, or of replicas that workers hold between them.
      parts: How a replica is divided.

    Attributes:
      steps: Local steps of a round.
      seconds: Duration of a round in which each worker takes as many steps as it can; 0 if a round has `steps` steps.
      taken: Int64 `[workers]`: with `seconds`, the steps that each worker has taken; None before the first step.
      pace: Measures how long rounds should be; None if the length is given.
      pending: Steps of the round in progress, the same on every worker.
      weight: This worker's loss count (see `note`) in the round in progress.
      done: Rounds done, over all starts of the run; those of an earlier run of the same trainer do not count.
    """

    def __init__(
        self,
        options: OuterConfig,
        weights: Sequence[keras.Variable],
        state: Sequence[keras.Variable],
        kept: Sequence[keras.Variable],
        *,
        inner: keras.optimizers.Optimizer,
        exchange: Exchange,
        strategy: tf.distribute.Strategy,
        worker: int,
        workers: int,
        parts: Parts = WHOLE,
    ) -> None:
        measured = options.local_steps == AUTO
        self.steps = TRIAL_STEPS if measured else options.local_steps
        self.pace: Pace | None = Pace() if measured else None
        self.seconds = options.round_seconds
        self.taken: np.ndarray | None = None
        self.pending, self.weight = 0, 0.0
        self.done = 0
        self.worker, self.workers, self.parts = worker, workers, parts
        self.inner, self.kept = inner, list(kept)
        self._options = options
        self._exchange, self._strategy = exchange, strategy
        self._running = len(strategy.extended.worker_devices)
        self._weights, self._state = list(weights), list(state)
        self.sets = TwoSets(weights, state, strategy, parts)
        self.model_variables, self.outer_variables = self.sets.model, self.sets.outer
        with parts.scope(strategy):
            self.optimizer = optimizers.build(options, weights)
        self._lost = LostWorkers(reports=worker == parts.part == 0)
        self.retrace()

    def retrace(self) -> None:
        """Traces the exchange again in the next round, because it has changed."""
        self._end = function(self._exchange_and_apply)

    @property
    def outer_state(self) -> list[keras.Variable]:
        """Variables of the outer optimizer, the same on every worker."""
        return list(self.optimizer.variables)

    @property
    def state_count(self) -> int:
        """The number of state variables, the last ones of `model_variables`."""
        return len(self._state)

    @property
    def under_way(self) -> bool:
        """Whether a round is in progress: there are steps whose movement has not been exchanged."""
        return self.pending > 0

    def start(self) -> None:
        """Begins with the weights that the model has now, the same on every worker."""
        self.pending, self.weight, self.done, self.taken = 0, 0.0, 0, None
        self.sets.shown = False
        self._lost.reset()
        self.begin()

    def begin(self) -> None:
        """Prepares for local steps; called before them.

        At the beginning of a round, the model's weights become the outer weights: a hook may have assigned new ones.
        """
        if not self.under_way:
            self.sets.keep()

    def choose(self) -> int:
        """Ends the measurement; returns the length of the rounds from now on, the same on every worker."""
        assert self.pace is not None
        self.steps, self.pace = self.pace.local_steps(self._options.outer_time_share), None
        return self.steps

    def next_stop(self, step: int) -> int:
        """Returns the first step after `step` at which a round ends, if rounds have a fixed number of steps."""
        if self.seconds:
            return sys.maxsize
        return (step // self.steps + 1) * self.steps

    def note(self, steps: int, weights: np.ndarray) -> None:
        """Counts local steps.

        Args:
          steps: Number of steps, the same on every worker.
          weights: Float64 `[workers]`: the loss count of each worker, i.e. the number of examples or positions over
            which its losses were averaged in the steps that it has applied.
        """
        self.pending += steps
        self.weight += float(weights[self.worker])

    def after_steps(self, agreement: WorkerAgreement, step: int, *, finished: bool) -> list[RoundReport]:
        """Called after steps: ends the round if it is due or the run is finished; see `end`."""
        if self.seconds:
            self.steps = max(round(step / (self.done + 1)), 1)  # the mean length
        return self.finish(agreement, step) if finished or self.seconds or step % self.steps == 0 else []

    def finish(self, agreement: WorkerAgreement, step: int) -> list[RoundReport]:
        """Ends the round in progress; all workers then have the same weights. See `end`."""
        report = self.end(agreement, step)
        return [report] if report else []

    def end(self, agreement: WorkerAgreement, step: int) -> RoundReport | None:
        """Ends the round: exchanges the workers' movements, and applies their mean. All workers call it together.

        A worker whose weights are no longer finite contributes nothing. Like all others, it continues from the outer
        weights.

        Args:
          agreement: The agreement between the workers.
          step: Steps done, for messages.

        Returns:
          The report; None if no worker contributed.

        Raises:
          TrainingError: A worker contributed nothing three times in a row.
        """
        self.sets.show_inner()
        squared = self.sets.moved() ** 2
        row = np.array([self.weight, squared, 1.0] if math.isfinite(squared) else [0.0, 0.0, 0.0])
        rows = self.parts.of_all(agreement, row)
        finite = rows[:, :, 2].min(axis=1) > 0.0
        weights, squares = np.where(finite, rows[:, 0, 0], 0.0), rows[:, :, 1].sum(axis=1)
        total = float(weights.sum())
        self.pending, self.weight = 0, 0.0
        self._lost.note(np.flatnonzero(np.repeat(~finite, self.parts.workers)).tolist(), step)
        report = None
        if total > 0.0:
            shares = weights / total
            own = self._end(tf.constant(shares[self.worker], tf.float32)).numpy()
            movement, update = np.sqrt(self.parts.of_replica(own).sum(axis=0)).tolist()
            drift = max(float(shares @ squares) - movement**2, 0.0) ** 0.5
            report = RoundReport(drift, movement, update, self.traffic_of_round.wire_bytes)
            self.done += 1
        else:
            self.sets.take_back()
        if not finite[self.worker]:
            self.sets.mend(self.inner.variables)
        return report

    @property
    def traffic_of_round(self) -> Traffic:
        """Bytes of the exchange of one round."""
        sidecar_length = 1 + sum(math.prod(variable.shape) for variable in self._state)
        return self._exchange.traffic(self.workers, sidecar_length)

    def traffic(self, dense: Traffic, steps: int = 0) -> Traffic:
        """Returns the bytes of a step, averaged over rounds.

        Args:
          dense: The traffic of a step that exchanges gradients.
          steps: Steps done, over all starts of the run; 0 stands for the steps of a whole round.
        """
        if self.workers == 1:
            return dense
        part, peers = (self.done / steps if steps else 1.0 / self.steps), self.workers * self.parts.workers - 1
        one = self.traffic_of_round
        sent = (one.wire_bytes + ROUND_BYTES * peers) * part + STEP_BYTES * peers
        return Traffic(one.codec, one.pattern, round(one.payload_bytes * part), round(sent), dense.dense_bytes)

    def apply(self, movement: Sequence[np.ndarray], state: Sequence[np.ndarray]) -> None:
        """Applies a mean movement that was not exchanged, and assigns a mean state; the same on all workers.

        Args:
          movement: The mean of `outer - inner` over the workers, for each weight.
          state: The new value of each state.
        """
        values = [by_program(*pair, self.parts.programs) for pair in zip(self._weights, movement, strict=True)]
        mean = self.parts.distributed(self._strategy, values)
        function(lambda: self._strategy.run(self._apply, args=(mean, [*map(tf.constant, state)])))()
        self.done += 1

    def inner_values(self) -> list[np.ndarray]:
        """Returns this worker's own weights and state, in the order of `model_variables`."""
        return self.sets.inner_values()

    def resume_inner(self, values: Sequence[np.ndarray], pending: int, weight: float) -> None:
        """Continues within a round, after `start`.

        Args:
          values: The result of `inner_values`.
          pending: Steps of the round so far.
          weight: This worker's loss count in these steps.
        """
        for variable, value in zip(self.model_variables, values, strict=True):
            self.assign_here(variable, value)
        self.pending, self.weight = pending, weight

    def assign_here(self, variable: keras.Variable, value: Any) -> None:
        """Assigns to this worker's copies of a variable."""
        self.sets.assign_here(variable, value)

    fragments = 1
    own_share = 0.0  # the share of a worker's own weights in the weights from which it continues

    def export(self) -> dict[str, np.ndarray]:
        """Returns further arrays for a checkpoint: a measured length of rounds, or the steps taken."""
        if self.seconds and self.taken is not None:
            return {"taken": self.taken.copy()}
        return {"steps": np.array(self.steps)} if self._options.local_steps == AUTO and self.pace is None else {}

    def restore(self, arrays: Mapping[str, np.ndarray], *, same_workers: bool) -> set[int]:
        """Restores the count of rounds from a worker's file, and their length; see `Streaming.restore`."""
        self.taken = np.array(arrays["taken"], np.int64) if same_workers and "taken" in arrays else None
        if self._options.local_steps == AUTO and "steps" in arrays:
            self.steps, self.pace = int(arrays["steps"]), None
        self.done = round(float(arrays["round"][2]))
        return set()

    # Functions that run on devices.

    def _exchange_and_apply(self, share: tf.Tensor) -> tf.Tensor:
        """Exchanges and applies the movements; returns the squared norms of mean movement and update, float32 `[2]`, of
        the weights that this worker counts."""
        results = self._strategy.run(self._on_replica, args=(share,))
        return self.parts.summed_squares(self._strategy.experimental_local_results(results))

    def _on_replica(self, share: tf.Tensor) -> tf.Tensor:
        # The exchange sums over the replicas of a worker, which have the same values.
        part = share / float(self._running // self.parts.programs)
        inner, outer = replica.read(self.model_variables), replica.read(self.outer_variables)
        moved = []
        for old, new in zip(outer, inner, strict=True):
            with beside(new):  # if the share is 0, values may be NaN
                moved.append(tf.math.multiply_no_nan(precision.difference(old, new), part))
        count = len(self._weights)
        vector = tf.concat([[part], *(tf.reshape(each, [-1]) for each in moved[count:])], axis=0)
        # An exchange with residuals needs to know whether a step follows; here one always does.
        mean, vector = self._exchange.reduce_sums(moved[:count], vector, lambda _: tf.constant(True))
        shapes = [variable.shape for variable in self._state]
        changes = tf.split(vector[1:], [math.prod(shape) for shape in shapes]) if shapes else []
        state = [
            precision.moved(old, -tf.reshape(change, shape))
            for old, change, shape in zip(outer[count:], changes, shapes, strict=True)
        ]
        return self._apply([tf.convert_to_tensor(each) for each in mean], state)

    def _apply(self, mean: Tensors, state: Tensors) -> tf.Tensor:
        """Takes the outer step on this replica, from a mean movement and a mean state; returns the squared norms of
        the movement and of the change, of whole and of divided weights: float32 `[2, 2]`."""
        count = len(self._weights)
        old, slots = replica.read(self.outer_variables[:count]), replica.read(self.optimizer.variables)
        gradients = [tf.cast(each, weight.dtype) for each, weight in zip(mean, old, strict=True)]
        rate = tf.constant(self._options.learning_rate, tf.float32)
        new, slots = pure_apply(self.optimizer, slots, old, gradients, rate, beside=beside)
        variables = [*self.model_variables, *self.outer_variables, *self.optimizer.variables]
        values = [*new, *state, *new, *state, *slots]
        changes = [call_beside(tf.subtract, *pair) for pair in zip(new, old, strict=True)]
        norms = tf.transpose(tf.stack([self.parts.squares(each, self._weights) for each in (mean, changes)]))
        with tf.control_dependencies([norms]):
            stored = replica.assign(replica.own(variables), values)
        with tf.control_dependencies(stored):
            return tf.identity(norms)

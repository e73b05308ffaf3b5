"""Rounds of local steps: workers train by themselves, and what they have moved is exchanged (Douillard et al. 2023).

Between two rounds every worker has weights of its own, the *inner* weights, which its own steps change. At the end of a
round, worker k has moved by `d_k = outer - inner_k` and counts with `s_k`, its share of what the workers' losses
averaged over in the round: examples, or positions. The exchange sums `s_k d_k`, with the codec and the error feedback
of `--exchange`; the outer optimizer applies the sum to the *outer* weights, from which all workers go on. Batch
statistics are averaged with the same shares, exactly.

The model's variables hold the inner weights while steps run, and the outer weights at the stops between them, where
evaluation, hooks and checkpoints look at them. The other set lies in `outer` variables; the two are swapped, which
copies nothing: an assignment hands a buffer over.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from tfpar.collectives.agreement import WorkerAgreement
from tfpar.config import OuterConfig, TrainingError
from tfpar.exchange import Exchange, Traffic
from tfpar.optim.pure_update import pure_apply
from tfpar.outer import optimizers
from tfpar.parallel import replica

import keras
import numpy as np
import tensorflow as tf

_log = logging.getLogger(__name__)

Tensors = list[tf.Tensor]

# Rounds in a row to which a worker gives nothing, because its weights are not finite, before the run ends.
_LOST_ROUNDS = 3
# Bytes that each worker sends to each other one: of a step, what it reports (loss, count, divisor and flag), and of a
# round, its weight, its norm and its flag. float64.
_STEP_BYTES, _ROUND_BYTES = 32, 24


class RoundReport(NamedTuple):
    """What a round shows, the same on every worker.

    Attributes:
      drift: Root mean square of the workers' distances from their mean, L2, weighted by their shares.
      movement: L2 norm of the mean movement that was applied.
      update: L2 norm of the change of the outer weights.
      wire_bytes: Bytes that each worker has sent in the exchange.
    """

    drift: float
    movement: float
    update: float
    wire_bytes: int


class Rounds:
    """The outer weights of a run, and the end of its rounds. Every worker has one.

    Args:
      options: Length of a round, outer optimizer.
      weights: The model's trainable weights, created under the strategy.
      state: The model's state that workers average: floating-point, such as batch statistics.
      kept: The model's other state, of which each worker has its own.
      inner: The optimizer of the local steps.
      exchange: Built for the weights, with a group of its own.
      strategy: The running strategy.
      worker: Rank of this worker.
      workers: Number of workers.

    Attributes:
      steps: Local steps of a round.
      pending: Steps of the round under way, the same on every worker.
      weight: What this worker's losses have averaged over in them, where it has applied them.
      done: Rounds done, over all starts of the run.
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
    ) -> None:
        self.steps = options.local_steps
        self.pending, self.weight = 0, 0.0
        self.done = 0
        self.worker, self.workers = worker, workers
        self.inner, self.kept = inner, list(kept)
        self._options = options
        self._exchange, self._strategy = exchange, strategy
        self._local = len(strategy.extended.worker_devices)
        self.model_variables = [*weights, *state]
        self._weights, self._state = list(weights), list(state)
        with strategy.scope():
            self.outer_variables = [_copy_of(variable) for variable in self.model_variables]
            self.optimizer = optimizers.build(options, weights)
        self._shown = False
        self._lost = 0
        self._swap = _function(self._swap_all)
        self._norm = _function(self._movement_norm)
        self._keep = _function(functools.partial(self._copy, self.model_variables, self.outer_variables))
        self._take_back = _function(functools.partial(self._copy, self.outer_variables, self.model_variables))
        self.retrace()

    def retrace(self) -> None:
        """Makes the next round trace the exchange again, which has changed."""
        self._end = _function(self._exchange_and_apply)

    @property
    def state_count(self) -> int:
        """How many of `model_variables`, at their end, are state."""
        return len(self._state)

    @property
    def under_way(self) -> bool:
        """Whether a round has begun: there are steps that have not been exchanged."""
        return self.pending > 0

    def start(self) -> None:
        """Begins with the weights that the model has now, the same on every worker."""
        self.pending, self.weight = 0, 0.0
        self._shown, self._lost = False, 0
        self.begin()

    def begin(self) -> None:
        """Before local steps: where a round begins, the outer weights are what the model has; a hook may have assigned
        them since the last one."""
        if not self.under_way:
            self._keep()

    def note(self, steps: int, weight: float) -> None:
        """Counts local steps.

        Args:
          steps: How many, the same on every worker.
          weight: What their losses averaged over on this worker, over the steps that it has applied.
        """
        self.pending += steps
        self.weight += weight

    @contextlib.contextmanager
    def showing_outer(self) -> Iterator[None]:
        """While this is open, the model has the outer weights, also in the middle of a round."""
        swaps = self.under_way and not self._shown
        if swaps:
            self._toggle()
        yield
        if swaps and self._shown:
            self._toggle()

    def show_outer(self) -> None:
        """Leaves the model with the outer weights. The round under way goes on in another start, from a checkpoint."""
        if self.under_way and not self._shown:
            self._toggle()

    def end(self, agreement: WorkerAgreement, step: int) -> RoundReport | None:
        """Ends the round: exchanges what the workers have moved, and applies the mean. All workers call it together.

        A worker whose weights are no longer finite gives nothing, and goes on from the outer weights like all others.

        Args:
          agreement: Between the workers.
          step: Steps done, for messages.

        Returns:
          What it shows; None where no worker has anything to give.

        Raises:
          TrainingError: A worker had nothing to give three times in a row.
        """
        if self._shown:
            self._toggle()
        squared = float(self._norm().numpy()) ** 2
        finite = math.isfinite(squared)
        row = np.array([self.weight, squared, 1.0] if finite else [0.0, 0.0, 0.0])
        weights, squares, flags = np.stack(agreement.gather_arrays(row), axis=1)
        total = float(weights.sum())
        self.pending, self.weight = 0, 0.0
        self._note_lost(flags, step)
        report = None
        if total > 0.0:
            shares = weights / total
            movement, update = self._end(tf.constant(shares[self.worker], tf.float32)).numpy().tolist()
            drift = max(float(shares @ squares) - movement**2, 0.0) ** 0.5
            report = RoundReport(drift, movement, update, self.traffic_of_round.wire_bytes)
            self.done += 1
        else:
            self._take_back()
        if not finite:
            self._mend_inner()
        return report

    @property
    def traffic_of_round(self) -> Traffic:
        """Bytes of the exchange of one round."""
        sidecar_length = 1 + sum(math.prod(variable.shape) for variable in self._state)
        return self._exchange.traffic(self.workers, sidecar_length)

    def traffic(self, dense: Traffic, rounds: int = 1, steps: int = 0) -> Traffic:
        """Bytes of a step, in the mean over rounds.

        Args:
          dense: What a step would cost that exchanges gradients.
          rounds: Rounds done.
          steps: Steps done; 0: those of a whole round.
        """
        if self.workers == 1:
            return dense
        part, peers = rounds / (steps or self.steps), self.workers - 1
        one = self.traffic_of_round
        sent = (one.wire_bytes + _ROUND_BYTES * peers) * part + _STEP_BYTES * peers
        return Traffic(one.codec, one.pattern, round(one.payload_bytes * part), round(sent), dense.dense_bytes)

    def apply(self, movement: Sequence[np.ndarray], state: Sequence[np.ndarray]) -> None:
        """Applies a mean movement that was not exchanged, and takes a mean state; all workers alike.

        Args:
          movement: By which the workers have moved: `outer - inner`, for each weight.
          state: For each state, what it is now.
        """
        mean, values = [*map(tf.constant, movement)], [*map(tf.constant, state)]
        _function(lambda: self._strategy.run(lambda: self._apply(mean, values)))()
        self.done += 1

    def inner_values(self) -> list[np.ndarray]:
        """This worker's own weights and state, in the order of `model_variables`."""
        held = self.outer_variables if self._shown else self.model_variables
        return [np.array(variable.numpy(), copy=True, order="C") for variable in held]

    def resume_inner(self, values: Sequence[np.ndarray], pending: int, weight: float) -> None:
        """Goes on within a round, after `start`.

        Args:
          values: From `inner_values`.
          pending: Steps of the round.
          weight: What this worker's losses have averaged over in them.
        """
        for variable, value in zip(self.model_variables, values, strict=True):
            self.assign_here(variable, value)
        self.pending, self.weight = pending, weight

    def assign_here(self, variable: keras.Variable, value: Any) -> None:
        """Assigns to this worker's copies of a variable."""
        for copy in self._strategy.experimental_local_results(variable.value):
            copy.assign(tf.cast(value, copy.dtype))

    # What runs on devices.

    def _exchange_and_apply(self, share: tf.Tensor) -> tf.Tensor:
        """The end of a round, from this worker's share: float32 `[2]`, norms of mean movement and update."""
        return self._strategy.experimental_local_results(self._strategy.run(self._on_replica, args=(share,)))[0]

    def _on_replica(self, share: tf.Tensor) -> tf.Tensor:
        part = share / float(self._local)  # the exchange adds up the replicas of a worker, which hold the same
        inner, outer = replica.read(self.model_variables), replica.read(self.outer_variables)
        # Where the share is 0, values may be NaN.
        moved = [
            tf.math.multiply_no_nan(tf.cast(old, tf.float32) - tf.cast(new, tf.float32), part)
            for old, new in zip(outer, inner, strict=True)
        ]
        count = len(self._weights)
        vector = tf.concat([[part], *(tf.reshape(each, [-1]) for each in moved[count:])], axis=0)
        # An exchange that keeps what is not sent needs to know that there will be a step: there always is.
        mean, vector = self._exchange.reduce_sums(moved[:count], vector, lambda _: tf.constant(True))
        shapes = [variable.shape for variable in self._state]
        changes = tf.split(vector[1:], [math.prod(shape) for shape in shapes]) if shapes else []
        state = [
            tf.cast(tf.cast(old, tf.float32) - tf.reshape(change, shape), old.dtype)
            for old, change, shape in zip(outer[count:], changes, shapes, strict=True)
        ]
        return self._apply([tf.convert_to_tensor(each) for each in mean], state)

    def _apply(self, mean: Tensors, state: Tensors) -> tf.Tensor:
        """Takes the outer step on this replica, from a mean movement and a mean state."""
        count = len(self._weights)
        old, slots = replica.read(self.outer_variables[:count]), replica.read(self.optimizer.variables)
        gradients = [tf.cast(each, weight.dtype) for each, weight in zip(mean, old, strict=True)]
        rate = tf.constant(self._options.learning_rate, tf.float32)
        new, slots = pure_apply(self.optimizer, slots, old, gradients, rate)
        variables = [*self.model_variables, *self.outer_variables, *self.optimizer.variables]
        values = [*new, *state, *new, *state, *slots]
        norms = tf.stack([_norm(mean), _norm([after - before for after, before in zip(new, old, strict=True)])])
        with tf.control_dependencies([norms]):
            stored = replica.assign(replica.own(variables), values)
        with tf.control_dependencies(stored):
            return tf.identity(norms)

    def _movement_norm(self) -> tf.Tensor:
        """L2 norm of what this worker's weights have moved; not finite where a state is not."""
        pairs = zip(self._first(self.model_variables), self._first(self.outer_variables), strict=True)
        moved = [tf.cast(new, tf.float32) - tf.cast(old, tf.float32) for new, old in pairs]
        count = len(self._weights)
        return _norm(moved[:count]) + 0.0 * _norm(moved[count:])

    def _first(self, variables: Sequence[keras.Variable]) -> Tensors:
        return [self._strategy.experimental_local_results(each.value)[0].read_value() for each in variables]

    def _swap_all(self) -> None:
        local = self._strategy.experimental_local_results
        for one, other in zip(self.model_variables, self.outer_variables, strict=True):
            for mine, theirs in zip(local(one.value), local(other.value), strict=True):
                values = theirs.read_value(), mine.read_value()
                with tf.control_dependencies(values):
                    mine.assign(values[0], read_value=False)
                    theirs.assign(values[1], read_value=False)

    def _toggle(self) -> None:
        self._swap()
        self._shown = not self._shown

    def _copy(self, sources: Sequence[keras.Variable], targets: Sequence[keras.Variable]) -> None:
        for value, target in zip(self._first(sources), targets, strict=True):
            self.assign_here(target, value)

    def _mend_inner(self) -> None:
        """Takes what is not finite out of the inner optimizer's state: with it, the weights would be lost again."""
        for variable in self.inner.variables:
            if tf.as_dtype(variable.dtype).is_floating:
                value = np.asarray(variable.numpy())
                self.assign_here(variable, np.where(np.isfinite(value), value, np.zeros_like(value)))

    def _note_lost(self, flags: np.ndarray, step: int) -> None:
        lost = np.flatnonzero(flags == 0.0).tolist()
        self._lost = self._lost + 1 if lost else 0
        if not lost:
            return
        who = f"worker{'s' * (len(lost) > 1)} {', '.join(map(str, lost))}"
        text = f"the weights of {who} were not finite at the end of the round at step {step}"
        if self._lost >= _LOST_ROUNDS:
            raise TrainingError(
                f"{text}, {self._lost} rounds in a row. Lower --learning_rate, give --clip_norm, or look at the "
                "examples of these workers."
            )
        if self.worker == 0:
            _log.warning("%s: it has nothing to give, and goes on from the weights of all", text)


def _function(function: Callable[..., Any]) -> Any:
    compiled = tf.function(function, autograph=False)
    compiled._omit_frequent_tracing_warning = True  # TensorFlow 2.21 counts tracings by code, over all objects
    return compiled


def _copy_of(variable: keras.Variable) -> keras.Variable:
    name = variable.path.replace("/", "_")
    return keras.Variable(variable.numpy(), dtype=variable.dtype, trainable=False, name=f"outer_{name}")


def _norm(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """L2 norm over all elements, float32 scalar; 0 of none."""
    if not tensors:
        return tf.zeros([])
    return tf.sqrt(tf.add_n([2.0 * tf.nn.l2_loss(tf.cast(tensor, tf.float32)) for tensor in tensors]))

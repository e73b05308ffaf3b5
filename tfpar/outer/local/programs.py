"""The device programs of a fragment: they read its movement, sum it over the workers, and apply the mean.

Shapes: K is the number of workers; those that hold a replica between them count as one. Besides the movements of
weights, an exchange sums a vector exactly: the shares, the weighted squares of the distances, K flags of the workers
that contribute, and the movements of states.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from tfpar.exchange import Exchange
from tfpar.optim.pure_update import pure_apply
from tfpar.outer.local.parts import WHOLE, Parts, Tensors
from tfpar.outer.local.weights import TwoSets, function
from tfpar.parallel import replica
from tfpar.parallel.pipeline.devices import beside, call_beside
from tfpar.parallel.split import split_of
from tfpar.precision import difference

import keras
import numpy as np
import tensorflow as tf

# Scalars of the vector before the flags.
HEAD = 2

Summed = tuple[list[Tensors], tf.Tensor]


class FragmentPrograms:
    """The programs of one fragment, on all replicas of one worker.

    Args:
      sets: The weights and states of the whole model.
      places: Indices of the fragment's weights in `sets`, then those of its states.
      size: Number of weights among them.
      optimizer: The outer optimizer of these weights.
      learning_rate: The learning rate of the outer optimizer.
      exchange: The exchange that is built for these weights.
      strategy: The running strategy.
      worker: Rank of this worker.
      workers: Number of workers.
      parts: How a replica is divided.
    """

    def __init__(
        self,
        sets: TwoSets,
        places: Sequence[int],
        size: int,
        *,
        optimizer: keras.optimizers.Optimizer,
        learning_rate: float,
        exchange: Exchange,
        strategy: tf.distribute.Strategy,
        worker: int,
        workers: int,
        parts: Parts = WHOLE,
    ) -> None:
        self.model, self.outer = ([every[place] for place in places] for every in (sets.model, sets.outer))
        self.optimizer, self._parts = optimizer, parts
        self._size, self._rate, self._exchange = size, learning_rate, exchange
        self._strategy, self._worker, self._workers = strategy, worker, workers
        self._replicas = len(strategy.extended.worker_devices) // parts.programs
        self._shapes = [variable.shape for variable in self.model[size:]]
        self._read = function(lambda *given: strategy.run(self._read_on_replica, args=given))
        self._squared = function(lambda: sets.squared_movement(places[:size]))
        self._applies: dict[float, Any] = {}
        self.retrace()

    def retrace(self) -> None:
        """Traces the exchange again the next time, because it has changed."""
        self._sum = function(self._summed)

    @property
    def sidecar_length(self) -> int:
        """Number of scalars that are summed besides the movements of weights."""
        return HEAD + self._workers + sum(map(math.prod, self._shapes))

    def squared_movement(self) -> float:
        """Returns the squared L2 norm of the movement of those weights that this worker counts."""
        return float(self._squared().numpy())

    def read(self, share: float, squared: float, *, gives: bool) -> Any:
        """Returns the weighted movement of this worker, as arguments for `sums`.

        Args:
          share: The share of this worker.
          squared: The squared L2 norm of the movement of its replica.
          gives: Whether this worker contributes; if not, its values may be NaN.
        """
        numbers = [share, share * squared, 1.0] if gives else [0.0, 0.0, 0.0]
        return self._read(*(tf.constant(number, tf.float32) for number in numbers))

    def sums(self, given: Any) -> Any:
        """Returns a traced function that exchanges `given`, the result of `read`; any thread may call it.

        It returns the mean movement of each weight and state, by program, and the vector `[HEAD + K]` of the other
        sums.
        """
        # Traced here, because two threads must not trace at the same time.
        return functools.partial(self._sum.get_concrete_function(*given), *given)

    def apply(self, values: Sequence[Tensors], own_share: float) -> np.ndarray:
        """Takes the outer step, the same on all workers.

        Args:
          values: The mean movement of each weight and state, by program.
          own_share: The share of this worker's own weights in the weights from which it continues.

        Returns:
          The squared L2 norms of the mean movement of the weights, and of the change of the outer weights, as far as
          this worker counts them: float32 `[2]`.
        """
        if own_share not in self._applies:
            on_replica = functools.partial(self._apply_on_replica, own_share)
            self._applies[own_share] = function(lambda *values: self._strategy.run(on_replica, args=values))
        given = self._parts.distributed(self._strategy, values)
        norms = self._strategy.experimental_local_results(self._applies[own_share](*given))
        squares: np.ndarray = self._parts.summed_squares(norms).numpy()
        return squares

    def _read_on_replica(self, share: tf.Tensor, squared: tf.Tensor, flag: tf.Tensor) -> Tensors:
        """Returns this replica's parts of the weighted movement and of the vector of the other sums."""
        # An exchange adds up a worker's replicas.
        share, squared, flag = (number / float(self._replicas) for number in (share, squared, flag))
        moved = []
        for old, new in zip(replica.read(self.outer), replica.read(self.model), strict=True):
            with beside(new):  # if the share is 0, values may be NaN
                moved.append(tf.math.multiply_no_nan(difference(old, new), share))
        flags = flag * tf.one_hot(self._worker, self._workers)
        state = [tf.reshape(each, [-1]) for each in moved[self._size :]]
        return [*moved[: self._size], tf.concat([tf.stack([share, squared]), flags, *state], axis=0)]

    def _summed(self, *given: Any) -> Summed:
        *results, vector = self._strategy.run(self._sum_on_replica, args=given)
        values = []
        for variable, result in zip(self.model, results, strict=True):
            local = self._strategy.experimental_local_results(result)
            values.append([*local[: 1 if split_of(variable) is None else self._parts.programs]])
        return values, self._strategy.experimental_local_results(vector)[0]

    def _sum_on_replica(self, *given: tf.Tensor) -> Tensors:
        *moved, vector = given
        # An exchange with residuals needs to know whether a step follows; here one always does.
        sums, vector = self._exchange.reduce_sums(moved, vector, lambda _: tf.constant(True))
        vector, state = vector[: HEAD + self._workers], vector[HEAD + self._workers :]
        total = vector[0]
        # Shares add up to 1 up to rounding, unless a worker contributes nothing.
        factor = tf.where(tf.abs(total - 1.0) < 1e-4, 1.0, tf.math.divide_no_nan(1.0, total))
        changes = tf.split(state, [math.prod(shape) for shape in self._shapes]) if self._shapes else []
        changes = [tf.reshape(change, shape) for change, shape in zip(changes, self._shapes, strict=True)]
        values = map(tf.convert_to_tensor, [*sums, *changes])
        return [*(call_beside(tf.multiply, each, factor) for each in values), vector]

    def _apply_on_replica(self, own_share: float, *values: tf.Tensor) -> tf.Tensor:
        """Takes the outer step of a fragment on this replica; returns the squared norms of movement and change, of
        whole and of divided weights: float32 `[2, 2]`."""
        optimizer, size = self.optimizer, self._size
        old, slots = replica.read(self.outer), replica.read(optimizer.variables)
        mean = [tf.cast(each, weight.dtype) for each, weight in zip(values, old, strict=True)]
        rate = tf.constant(self._rate, tf.float32)
        new, slots = pure_apply(optimizer, slots, old[:size], mean[:size], rate, beside=beside)
        changes = [call_beside(tf.subtract, *pair) for pair in zip(new, old, strict=False)]
        squares = [self._parts.squares(each, self.model[:size]) for each in (list(values[:size]), changes)]
        norms = tf.transpose(tf.stack(squares))
        new = [*new, *(before - change for before, change in zip(old[size:], mean[size:], strict=True))]

        def mixed(mine: tf.Tensor, outer: tf.Tensor) -> tf.Tensor:
            return own_share * mine + (1.0 - own_share) * outer

        inner = [call_beside(mixed, *pair) for pair in zip(replica.read(self.model), new, strict=True)]
        with tf.control_dependencies([norms, *inner]):
            targets = replica.own([*self.model, *self.outer, *optimizer.variables])
            stored = replica.assign(targets, [*(inner if own_share else new), *new, *slots])
        with tf.control_dependencies(stored):
            return tf.identity(norms)

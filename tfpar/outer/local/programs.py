"""The device programs of a fragment: they read its movement, sum it over the workers, and apply the mean.

Shapes: K is the number of workers. Besides the movements of weights, an exchange sums a vector exactly: the shares, the
weighted squares of the distances, K flags of the workers that contribute, and the movements of states.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from tfpar.exchange import Exchange
from tfpar.optim.pure_update import pure_apply
from tfpar.outer.local.weights import Tensors, function, l2_norm
from tfpar.parallel import replica

import keras
import tensorflow as tf

# Scalars of the vector before the flags.
HEAD = 2


class FragmentPrograms:
    """The programs of one fragment, on all replicas of one worker.

    Args:
      model: The model's variables in the fragment: weights, then states.
      outer: The other set of these variables, see `TwoSets`.
      size: Number of weights among these variables.
      optimizer: The outer optimizer of these weights.
      learning_rate: The learning rate of the outer optimizer.
      exchange: The exchange that is built for these weights.
      strategy: The running strategy.
      worker: Rank of this worker.
      workers: Number of workers.
    """

    def __init__(
        self,
        model: Sequence[keras.Variable],
        outer: Sequence[keras.Variable],
        size: int,
        *,
        optimizer: keras.optimizers.Optimizer,
        learning_rate: float,
        exchange: Exchange,
        strategy: tf.distribute.Strategy,
        worker: int,
        workers: int,
    ) -> None:
        self.model, self.outer, self.optimizer = list(model), list(outer), optimizer
        self._size, self._learning_rate, self._exchange = size, learning_rate, exchange
        self._strategy, self._worker, self._workers = strategy, worker, workers
        self._local = len(strategy.extended.worker_devices)
        self._shapes = [variable.shape for variable in self.model[size:]]
        self._read = function(lambda share, flag: strategy.run(self._read_on_replica, args=(share, flag)))
        self._applies: dict[float, Any] = {}
        self.retrace()

    def retrace(self) -> None:
        """Traces the exchange again the next time, because it has changed."""
        self._sum = function(self._summed)

    @property
    def sidecar_length(self) -> int:
        """Number of scalars that are summed besides the movements of weights."""
        return HEAD + self._workers + sum(map(math.prod, self._shapes))

    def read(self, share: float, *, gives: bool) -> Any:
        """Returns the weighted movement of this worker, as arguments for `sums`.

        Args:
          share: The share of this worker.
          gives: Whether this worker contributes; if not, its values may be NaN.
        """
        return self._read(tf.constant(share if gives else 0.0, tf.float32), tf.constant(float(gives)))

    def sums(self, given: Any) -> Any:
        """Returns a traced function that exchanges `given`, the result of `read`; any thread may call it.

        It returns the mean movement of each weight and state, and the vector `[HEAD + K]` of the other sums.
        """
        # Traced here, because two threads must not trace at the same time.
        return functools.partial(self._sum.get_concrete_function(*given), *given)

    def apply(self, values: Tensors, own_share: float) -> tuple[float, float]:
        """Takes the outer step, the same on all workers.

        Args:
          values: The mean movement of each weight and state.
          own_share: The share of this worker's own weights in the weights from which it continues.

        Returns:
          The L2 norms of the mean movement of the weights, and of the change of the outer weights.
        """
        if own_share not in self._applies:
            on_replica = functools.partial(self._apply_on_replica, own_share)
            self._applies[own_share] = function(lambda *values: self._strategy.run(on_replica, args=values))
        norms = self._strategy.experimental_local_results(self._applies[own_share](*values))[0]
        movement, update = norms.numpy().tolist()
        return movement, update

    def _read_on_replica(self, share: tf.Tensor, flag: tf.Tensor) -> Tensors:
        """Returns this replica's parts of the weighted movement and of the vector of the other sums."""
        share, flag = share / float(self._local), flag / float(self._local)  # an exchange adds up a worker's replicas
        inner, outer = replica.read(self.model), replica.read(self.outer)
        moved = [tf.cast(old, tf.float32) - tf.cast(new, tf.float32) for old, new in zip(outer, inner, strict=True)]
        size = self._size
        squared = tf.math.multiply_no_nan(tf.square(l2_norm(moved[:size])), share)
        # If the share is 0, values may be NaN.
        moved = [tf.math.multiply_no_nan(each, share) for each in moved]
        flags = flag * tf.one_hot(self._worker, self._workers)
        state = [tf.reshape(each, [-1]) for each in moved[size:]]
        return [*moved[:size], tf.concat([tf.stack([share, squared]), flags, *state], axis=0)]

    def _summed(self, *given: Any) -> Tensors:
        results = self._strategy.run(self._sum_on_replica, args=given)
        return [self._strategy.experimental_local_results(each)[0] for each in results]

    def _sum_on_replica(self, *given: tf.Tensor) -> Tensors:
        *moved, vector = given
        # An exchange with residuals needs to know whether a step follows; here one always does.
        sums, vector = self._exchange.reduce_sums(moved, vector, lambda _: tf.constant(True))
        beside, state = vector[: HEAD + self._workers], vector[HEAD + self._workers :]
        total = beside[0]
        # Shares add up to 1 up to rounding, unless a worker contributes nothing.
        factor = tf.where(tf.abs(total - 1.0) < 1e-4, 1.0, tf.math.divide_no_nan(1.0, total))
        changes = tf.split(state, [math.prod(shape) for shape in self._shapes]) if self._shapes else []
        changes = [tf.reshape(change, shape) for change, shape in zip(changes, self._shapes, strict=True)]
        return [*(tf.convert_to_tensor(each) * factor for each in [*sums, *changes]), beside]

    def _apply_on_replica(self, own_share: float, *values: tf.Tensor) -> tf.Tensor:
        """Takes the outer step of a fragment on this replica; returns the norms of movement and update."""
        optimizer, size = self.optimizer, self._size
        old, slots = replica.read(self.outer), replica.read(optimizer.variables)
        mean = [tf.cast(each, weight.dtype) for each, weight in zip(values, old, strict=True)]
        rate = tf.constant(self._learning_rate, tf.float32)
        new, slots = pure_apply(optimizer, slots, old[:size], mean[:size], rate)
        norms = tf.stack([l2_norm(values[:size]), l2_norm([a - b for a, b in zip(new, old, strict=False)])])
        new = [*new, *(before - change for before, change in zip(old[size:], mean[size:], strict=True))]
        inner = [
            own_share * mine + (1.0 - own_share) * all_
            for mine, all_ in zip(replica.read(self.model), new, strict=True)
        ]
        with tf.control_dependencies([norms, *inner]):
            targets = replica.own([*self.model, *self.outer, *optimizer.variables])
            stored = replica.assign(targets, [*(inner if own_share else new), *new, *slots])
        with tf.control_dependencies(stored):
            return tf.identity(norms)

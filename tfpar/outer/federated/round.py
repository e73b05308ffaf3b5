"""A round on one replica: its clients train one after the other, and their messages are added up.

Pure functions of tensors, which one XLA program runs for all clients of the replica. Shapes: C clients of a replica, D
elements of all trainable weights, E elements of a residual.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from tfpar.outer.federated.client_update import LocalTraining, Trained
from tfpar.outer.federated.encoding import UpdateEncoding
from tfpar.outer.federated.population import RoundShare
from tfpar.training.objective import Tensors
from tfpar.training.seeds import fold_in

import tensorflow as tf

# The names of a round's sums besides the metrics, float32 scalars in this order.
COUNTS = ("mass", "clients", "norms", "clipped", "lost")


class Kept(NamedTuple):
    """The state that the clients of a replica keep between rounds.

    Attributes:
      variates: Float32 `[C, D]`: SCAFFOLD's c_i; `[C, 0]` without SCAFFOLD.
      residuals: Float32 `[C, E]`: the residuals of the codec; E is 0 without error feedback.
    """

    variates: tf.Tensor
    residuals: tf.Tensor


class RoundSums(NamedTuple):
    """Sums over the clients of a replica.

    Attributes:
      movement: Sum of `mass x (server's weights - client's weights)`, after decoding and clipping.
      state: Sum of `mass x change` of the model's floating-point state; zeros for other state.
      loss: Sum of the losses over all examples of all steps.
      count: Sum of these examples' weights.
      metrics: Sums of the metrics' state.
      counts: Float32 `[5]`, in the order of `COUNTS`.
    """

    movement: Tensors
    state: Tensors
    loss: tf.Tensor
    count: tf.Tensor
    metrics: Tensors
    counts: tf.Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class ClientRound:
    """The work of the clients of a round.

    Attributes:
      local: The local training of a client.
      encoding: The encoding of its movement.
      clip: L2 norm to which the server clips decoded movements; 0 for no limit.
      scaffold: Whether clients correct their drift with control variates.
    """

    local: LocalTraining
    encoding: UpdateEncoding
    clip: float
    scaffold: bool

    def run(
        self,
        params: Tensors,
        state: Tensors,
        share: RoundShare,
        rate: tf.Tensor,
        seed: tf.Tensor,
        variate: tf.Tensor,
        kept: Kept,
    ) -> tuple[RoundSums, Kept]:
        """Trains the clients of a replica.

        Args:
          params: The server's weights.
          state: The server's state of the model.
          share: The clients.
          rate: Learning rate of the clients, float32 scalar.
          seed: Int32 `[2]`, different for every round; the same on all replicas.
          variate: Float32 `[D]`: SCAFFOLD's c; `[0]` without SCAFFOLD.
          kept: The state of the clients.

        Returns:
          The sums, and the new state of the clients.
        """

        def body(place: tf.Tensor, total: RoundSums, kept: Kept) -> tuple[tf.Tensor, RoundSums, Kept]:
            sums, own = self._client(params, state, share, place, rate, seed, variate, kept)
            rows = Kept(*(_with_row(table, place, row) for table, row in zip(kept, own, strict=True)))
            return place + 1, tf.nest.map_structure(tf.add, total, sums), rows

        zeros = RoundSums(
            [tf.zeros(param.shape, tf.float32) for param in params],
            [tf.zeros(value.shape, tf.float32) for value in state],
            tf.zeros([]),
            tf.zeros([]),
            [tf.zeros(shape) for shape in self.local.metric_shapes],
            tf.zeros([len(COUNTS)]),
        )
        clients = tf.reduce_sum(tf.cast(share.client >= 0, tf.int32))
        _, total, kept = tf.while_loop(
            lambda place, *_: place < clients, body, (tf.constant(0), zeros, kept), parallel_iterations=1
        )
        return total, kept

    def _client(
        self,
        params: Tensors,
        state: Tensors,
        share: RoundShare,
        place: tf.Tensor,
        rate: tf.Tensor,
        seed: tf.Tensor,
        variate: tf.Tensor,
        kept: Kept,
    ) -> tuple[RoundSums, Kept]:
        """Returns the contribution of one client to the sums, and its new state."""
        data = share.data._replace(order=share.data.order[place], steps=share.data.steps[place])
        own = fold_in(seed, share.client[place])
        before = Kept(kept.variates[place], kept.residuals[place])
        shapes = [param.shape for param in params]
        correction = split(variate - before.variates, shapes) if self.scaffold else None
        trained = self.local.train(params, state, data, rate, fold_in(own, 0), correction)
        residual = before.residuals if self.encoding.feedback else None
        received, residual = self.encoding.through(trained.movement, residual, fold_in(own, 1))
        norm = tf.linalg.global_norm(received)
        # A variance may overflow while the weights and the loss, which are divided by its root, are finite.
        statistics = [tf.reduce_all(tf.math.is_finite(each)) for each in trained.state if each.dtype.is_floating]
        finite = tf.reduce_all([tf.math.is_finite(norm), tf.math.is_finite(trained.loss), *statistics])
        factor = self.clip / tf.maximum(norm, self.clip) if self.clip else tf.ones([])
        received = [tf.where(finite, each * factor, 0.0) for each in received]
        after = before
        if self.scaffold:
            # Option II of Karimireddy et al. 2020 (SCAFFOLD, equation 4): c_i - c + (x - y_i) / (K rate).
            scale = tf.math.divide_no_nan(1.0, tf.cast(data.steps, tf.float32) * rate)
            fresh = before.variates - variate + scale * joined(received)
            after = after._replace(variates=tf.where(finite & (scale > 0.0), fresh, before.variates))
        if residual is not None:
            after = after._replace(residuals=tf.where(finite, residual, before.residuals))
        return self._sums(state, trained, received, share.mass[place], norm, finite), after

    def _sums(
        self, state: Tensors, trained: Trained, received: Tensors, mass: tf.Tensor, norm: tf.Tensor, finite: tf.Tensor
    ) -> RoundSums:
        """Returns the contribution of one client: only the count of lost clients if it is not finite."""

        def counted(value: tf.Tensor) -> tf.Tensor:
            return tf.where(finite, value, tf.zeros_like(value))

        def change(old: tf.Tensor, new: tf.Tensor) -> tf.Tensor:
            if not old.dtype.is_floating:
                return tf.zeros(old.shape, tf.float32)
            return counted(mass * (tf.cast(new, tf.float32) - tf.cast(old, tf.float32)))

        clipped = tf.cast(norm > self.clip, tf.float32) if self.clip else tf.zeros([])
        counts = tf.stack([mass, 1.0, norm, clipped, 0.0])
        return RoundSums(
            [mass * each for each in received],
            [*map(change, state, trained.state)],
            counted(trained.loss),
            counted(trained.count),
            [*map(counted, trained.metrics)],
            tf.where(finite, counts, tf.constant([0.0, 0.0, 0.0, 0.0, 1.0])),
        )


def joined(tensors: Tensors) -> tf.Tensor:
    """Concatenates tensors to one vector `[D]`."""
    return tf.concat([tf.reshape(each, [-1]) for each in tensors], axis=0)


def split(vector: tf.Tensor, shapes: list[tf.TensorShape]) -> Tensors:
    """Splits a vector `[D]` into tensors."""
    parts = tf.split(vector, [math.prod(shape) for shape in shapes])
    return [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]


def _with_row(table: tf.Tensor, place: tf.Tensor, row: tf.Tensor) -> tf.Tensor:
    """Returns a table `[C, ...]` with one row replaced."""
    if not table.shape[1]:
        return table
    return tf.tensor_scatter_nd_update(table, [[place]], [row])

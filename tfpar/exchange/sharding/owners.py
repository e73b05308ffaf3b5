"""What reducers have in common with which only the owner of a shard has its sum."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tfpar_ops
from tfpar.exchange.gradients import Gradient
from tfpar.exchange.reducer import Reducer, ShouldApply, replica_context

import tensorflow as tf

# New values of the pieces of each vector, and of the tensors without an owner, from the sums of their gradients.
Update = Callable[..., tuple[list[list[tf.Tensor]], dict[int, tf.Tensor]]]


class Norms(NamedTuple):
    """How norms are computed.

    Attributes:
      of: The L2 norm over tensors.
      joined: The L2 norm over all devices of a replica, from those of the places of this worker.
    """

    of: Callable[[Sequence[tf.Tensor]], tf.Tensor]
    joined: Callable[[Sequence[tf.Tensor]], tf.Tensor]


# Returns the sums of this worker's shards, for each vector.
Scatter = Callable[[], list[tf.Tensor]]


class Scattered(NamedTuple):
    """A replica's record of gradients that were sent to their owners: of one micro-batch, or added up.

    Attributes:
      shards: For each vector the sum of this worker's shards over the workers.
      whole: This replica's gradients of the tensors without an owner, in the order of their indices.
      residuals: The residuals, after this and all earlier micro-batches of the step.
      finite: Bool scalar: whether all gradients of this replica were finite, in these micro-batches.
    """

    shards: list[tf.Tensor]
    whole: list[tf.Tensor]
    residuals: list[tf.Tensor]
    finite: tf.Tensor


class Sent(NamedTuple):
    """What `scatter` returned for the micro-batch before, for all replicas of this worker.

    Attributes:
      shards: See `Scattered`.
      residuals: See there.
    """

    shards: Any
    residuals: Any


class UpdateInputs(NamedTuple):
    """The arguments of `update_shards` besides the gradients, those of all replicas of this worker.

    Attributes:
      sidecar: See `OwnersReducer.update_shards`.
      weights: See there.
      wanted: Whether the norm is wanted.
      arguments: See there.
      should_apply: See there.
      reported: See there.
      update: See there.
      norms: See there.
    """

    sidecar: Any
    weights: Any
    wanted: Any
    arguments: Any
    should_apply: ShouldApply
    reported: Callable[[tf.Tensor], tf.Tensor]
    update: Update
    norms: Norms


class OwnersReducer(Reducer):
    """A reducer with which only the owner of a shard has its sum, and updates its weights with it."""

    def reduce(
        self, gradients: Sequence[Gradient], sidecar: tf.Tensor, should_apply: ShouldApply
    ) -> tuple[list[Gradient], tf.Tensor]:
        """Not supported: no worker has all sums."""
        raise NotImplementedError("with sharded optimizer state, call update_shards")

    def scatter(self, gradients: Sequence[tf.Tensor], before: Scattered | None, number: int) -> Scattered:
        """Sends the gradients of one micro-batch to their owners. Called in a replica context.

        No variable changes: pass the result to the next call, and after the last one to `update_shards`. Each bucket is
        sent as soon as its tensors are ready.

        Args:
          gradients: This replica's gradients, float32.
          before: What the call for the micro-batch before returned; None for the first.
          number: Of the micro-batch, from 0.
        """

        def merged(strategy: tf.distribute.Strategy, gradients: Any, shards: Any, residuals: Any) -> Any:
            return self._merged_scatter(strategy, gradients, Sent(shards, residuals) if before else None, number)

        finite = self._are_finite(gradients) & (before.finite if before else True)
        earlier = (before.shards, before.residuals) if before else ([], [])
        shards, residuals = replica_context().merge_call(merged, args=(list(gradients), *earlier))
        return Scattered(list(shards), [gradients[index] for index in self._without_owner], list(residuals), finite)

    def update_shards(
        self,
        gradients: Sequence[tf.Tensor] | Scattered,
        sidecar: tf.Tensor,
        weights: Sequence[tf.Tensor],
        should_apply: ShouldApply,
        reported: Callable[[tf.Tensor], tf.Tensor],
        update: Update,
        norms: Norms,
        wants_norm: tf.Tensor | None,
        arguments: Sequence[tf.Tensor],
    ) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor]:
        """Sums gradients, updates, gathers weights. Called in a replica context.

        Args:
          gradients: This replica's gradients, float32; or what `scatter` returned for the last micro-batch.
          sidecar: Float32 vector, summed exactly.
          weights: The weights, the same on every replica.
          should_apply: Tells from the summed sidecar whether to update.
          reported: Completes the summed sidecar with what other devices of the replica report. Runs once per worker.
          update: Runs once per worker and place in a replica: `(number of the place, sums of the pieces of each vector,
            sums of the other tensors by index, complete sidecar, norm, *arguments)` to new values of the same sums.
          norms: How norms are computed.
          wants_norm: Bool scalar: whether the norm of all sums is needed; None: always. Else it is zero.
          arguments: Further tensors for `update`.

        Returns:
          New weights, those of before if there was no update; the complete sidecar; the norm of all gradient sums. The
          same bits on every replica.
        """

        def merged(
            strategy: tf.distribute.Strategy, gradients: Any, sidecar: Any, weights: Any, wanted: Any, arguments: Any
        ) -> Any:
            inputs = UpdateInputs(sidecar, weights, wanted, arguments, should_apply, reported, update, norms)
            return self._merged_update(strategy, gradients, inputs)

        wanted = tf.constant(True) if wants_norm is None else wants_norm
        given = gradients if isinstance(gradients, Scattered) else list(gradients)
        return replica_context().merge_call(merged, args=(given, sidecar, list(weights), wanted, list(arguments)))

    def _are_finite(self, gradients: Sequence[tf.Tensor]) -> tf.Tensor:
        """Whether all gradients of a replica are finite: bool scalar."""
        return tfpar_ops.norm_squared(gradients)[1]

    @property
    @abc.abstractmethod
    def _without_owner(self) -> list[int]:
        """Indices of the tensors without an owner, those of a replica's other devices too."""

    @abc.abstractmethod
    def _merged_scatter(
        self, strategy: tf.distribute.Strategy, gradients: Any, before: Sent | None, number: int
    ) -> Any:
        """`scatter` for all replicas of this worker together; returns the shards and the residuals."""

    @abc.abstractmethod
    def _merged_update(self, strategy: tf.distribute.Strategy, gradients: Any, inputs: UpdateInputs) -> Any:
        """`update_shards` for all replicas of this worker together."""

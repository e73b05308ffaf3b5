"""The training step with sharded optimizer state: moves 3 to 5 of `TrainStep` in one exchange."""

from __future__ import annotations

from typing import Any

from tfpar.optim.pure_update import pure_apply
from tfpar.parallel import replica
from tfpar.training.objective import Tensors
from tfpar.training.sharding.optimizer import OwnShare
from tfpar.training.step import Reduced, TrainStep, compiled, should_apply

import tensorflow as tf


class ShardedStep(TrainStep):
    """A step in which each worker updates its own share of the weights, and gets the others' new weights.

    Args:
      share: This worker's share, of whose optimizer this is a step.
      *args: See `TrainStep`.
      **kwargs: See `TrainStep`.
    """

    def __init__(self, share: OwnShare, *args: Any, **kwargs: Any) -> None:
        self._share = share
        super().__init__(*args, **kwargs)

    def _make_programs(self) -> None:
        super()._make_programs()
        self._new_share = compiled(self._updated_share, self.plan.compiles_update)

    def _reduce_and_apply(
        self,
        gradients: Tensors,
        vector: tf.Tensor,
        norm: tf.Tensor,
        state: Tensors,
        assigned: dict[int, tf.Tensor],
        step: tf.Tensor,
        lr_multiplier: tf.Tensor,
        is_last: tf.Tensor | None,
    ) -> Reduced:
        del norm, assigned  # the norm is that of the sums; a model that assigns weights is refused
        weights = replica.read(self.core.model.trainable_variables)
        weights, vector, norm = self.exchange.update_shards(
            gradients,
            vector,
            weights,
            should_apply=should_apply,
            update=self._update_share,
            norm=self._norm,
            wants_norm=None if self._clip_norm else is_last,
            arguments=[step, lr_multiplier],
        )
        exchanged = self._replica_clock([vector, weights[-1]])
        done = tf.cond(
            should_apply(vector),
            lambda: self._store(weights, self.sidecar.state(vector, state)),
            lambda: tf.zeros([]),
        )
        return Reduced(vector, self._factor_and_norm(vector, norm)[1], exchanged, done)

    def _update_share(
        self,
        sums: list[Tensors],
        whole: dict[int, tf.Tensor],
        vector: tf.Tensor,
        norm: tf.Tensor,
        step: tf.Tensor,
        lr_multiplier: tf.Tensor,
    ) -> tuple[list[Tensors], dict[int, tf.Tensor]]:
        """Updates this worker's pieces and the weights that all update. Runs once per worker."""
        share = self._share
        pieces = [replica.first(variable) for variable in share.all_pieces]
        slots = [replica.first(variable) for variable in share.optimizer.variables]
        others = [replica.first(self.core.model.trainable_variables[index]) for index in share.whole]
        flat = [gradient for vector_sums in sums for gradient in vector_sums]
        gradients = [tf.reshape(gradient, piece.shape) for gradient, piece in zip(flat, pieces, strict=True)]
        gradients += [whole[index] for index in share.whole]
        factor, _ = self._factor_and_norm(vector, norm)
        params = [variable.read_value() for variable in [*pieces, *others]]
        state = [variable.read_value() for variable in slots]
        new, new_state = self._new_share(params, state, gradients, factor, step, lr_multiplier)
        stored = [
            variable.assign(value, read_value=False)
            for variable, value in zip([*pieces, *slots], [*new[: len(pieces)], *new_state], strict=True)
        ]
        with tf.control_dependencies(stored):
            values = [tf.identity(value) for value in new]
        mine, rest = iter(values[: len(pieces)]), values[len(pieces) :]
        by_vector = [[next(mine) for _ in vector_sums] for vector_sums in sums]
        return by_vector, dict(zip(share.whole, rest, strict=True))

    def _updated_share(
        self,
        params: Tensors,
        state: Tensors,
        gradients: Tensors,
        factor: tf.Tensor,
        step: tf.Tensor,
        lr_multiplier: tf.Tensor,
    ) -> tuple[Tensors, Tensors]:
        rate = self.learning_rate(step, lr_multiplier) if self._schedule is not None else None
        mean = [gradient * factor for gradient in gradients]
        return pure_apply(self.optimizer, state, params, mean, rate)

    def _store(self, weights: Tensors, state: Tensors) -> tf.Tensor:
        """Gives this replica the new weights and model state."""
        model = self.core.model
        copies = [*replica.own(model.trainable_variables), *replica.own(self._state)]
        with tf.control_dependencies(replica.assign(copies, [*weights, *self._without_seeds(state)])):
            return tf.ones([])

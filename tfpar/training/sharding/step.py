"""The training steps with sharded state: parts 3 to 5 of `TrainStep` in one exchange.

Those of pipelines are in `pipeline_step.py`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from tfpar.exchange.sharding.owners import Norms, Scattered
from tfpar.optim.pure_update import WholeTensors, pure_apply
from tfpar.parallel import replica
from tfpar.parallel.compilation import compiled
from tfpar.parallel.model_axis import Place
from tfpar.training import norms
from tfpar.training.objective import LocalSums, Tensors
from tfpar.training.sharding.optimizer import OwnShare
from tfpar.training.sharding.place_share import PlaceShare
from tfpar.training.sharding.replica_share import ReplicaShare
from tfpar.training.sidecar import Reduced
from tfpar.training.step import TrainStep
from tfpar.training.tensor_parallel.step import DividedStep
from tfpar.training.tensor_parallel.whole_tensors import DealtTensors

import keras
import tensorflow as tf


class ShardedStep(TrainStep):
    """A step in which each worker updates its own share of the weights, and receives the other new weights.

    Args:
      share: This worker's share, with its optimizer.
      *args: See `TrainStep`.
      **kwargs: See `TrainStep`.
    """

    def __init__(self, share: OwnShare, *args: Any, **kwargs: Any) -> None:
        self._share = share
        super().__init__(*args, **kwargs)

    def _make_programs(self) -> None:
        super()._make_programs()
        self._share_updates = {
            id(owner): compiled(
                functools.partial(self._update_variables, owner, self._whole_tensors(place, number)),
                self.plan.compiles_update,
            )
            for place in self._share.places
            for number, owner in enumerate(place.replicas)
        }

    def _whole_tensors(self, place: PlaceShare, number: int) -> WholeTensors | None:
        """What updates the tensors of which the optimizer of a replica, by its number, needs more than it has."""
        del place, number
        return None

    def _reduce_and_apply(
        self,
        gradients: Tensors,
        vector: tf.Tensor,
        norm: tf.Tensor,
        state: Tensors,
        assigned: dict[int, tf.Tensor],
        step: tf.Tensor,
        lr_multiplier: tf.Tensor,
        wants_norm: tf.Tensor | None,
    ) -> Reduced:
        del norm  # it is that of the sums
        self._share.check_assigned(assigned)
        weights = replica.read(self.core.model.trainable_variables)
        weights, vector, norm = self.exchange.update_shards(
            gradients,
            vector,
            weights,
            should_apply=self.decision,
            reported=self._reported,  # with the denominator, which the last stage alone may know
            update=self._update_share,
            norms=Norms(norms.l2_norm, self._joined_norm),
            wants_norm=None if self._clip_norm else wants_norm,
            # Read here, once: a schedule of the optimizer's own goes on with the update of its first place.
            arguments=[self.learning_rate(step, lr_multiplier)],
        )
        exchanged = self._replica_clock([vector, *weights])
        done = tf.cond(
            self.sidecar.should_apply(vector),
            lambda: self._store(weights, self.sidecar.state(vector, state)),
            lambda: tf.zeros([]),
        )
        return Reduced(vector, self._factor_and_norm(vector, norm)[1], exchanged, done)

    def _joined_norm(self, found: Sequence[tf.Tensor]) -> tf.Tensor:
        """The norm over all devices of a replica, from the norms of the places of this worker."""
        return tf.cast(tf.sqrt(self._squares_of_replica(found)), tf.float32)

    def _squares_of_replica(self, found: Sequence[tf.Tensor]) -> tf.Tensor:
        """The sum of squares over all devices of a replica, float64, from the norms of the places of this worker.
        Weights on several stages count on one."""
        return _sum_of_squares(norm for norm, place in zip(found, self._share.places, strict=True) if place.counts_here)

    def _update_share(
        self,
        place: int,
        sums: list[Tensors],
        whole: dict[int, tf.Tensor],
        vector: tf.Tensor,
        norm: tf.Tensor,
        rate: tf.Tensor,
    ) -> tuple[list[Tensors], dict[int, tf.Tensor]]:
        """Updates the pieces of this worker's replicas at one place, and the weights that all update. Runs once per
        worker and place."""
        share = self._share.places[place]
        factor, _ = self._factor_and_norm(vector, norm)
        without = {*self.core.unreached.indices(self.core.model.trainable_variables)}
        stays = [index in without for index in share.indices]
        new: list[Tensors] = [list(gradients) for gradients in sums]
        new_whole: dict[int, tf.Tensor] = {}
        for owner in share.replicas:
            indices = share.whole if owner is share.replicas[0] else []
            gradients = [
                None if stays[piece.index] else sums[number][index]
                for (number, index), piece in zip(owner.positions, owner.owned, strict=True)
            ]
            gradients_of_others = [None if stays[index] else whole[index] for index in indices]
            others = [share.variables[index] for index in indices], gradients_of_others
            with tf.device(owner.device):
                values = self._update_replica(owner, gradients, *others, factor, rate)
            for (number, index), value in zip(owner.positions, values, strict=False):
                new[number][index] = value
            new_whole |= dict(zip(indices, values[len(owner.positions) :], strict=True))
        return new, new_whole

    def _update_replica(
        self,
        owner: ReplicaShare,
        gradients: Sequence[tf.Tensor | None],
        others: Sequence[keras.Variable],
        gradients_of_others: Sequence[tf.Tensor | None],
        factor: tf.Tensor,
        rate: tf.Tensor,
    ) -> Tensors:
        """Updates the pieces of one replica; returns their new values and those of `others`, which it does not
        assign."""
        common = [replica.first(variable) for variable in owner.common_variables()]
        values = [replica.first(variable).read_value() for variable in others]
        state = [variable.read_value() for variable in common]
        new, state = self._share_updates[id(owner)](gradients, values, gradients_of_others, state, factor, rate)
        with tf.control_dependencies(replica.assign(common, state)):
            return [tf.identity(value) for value in new]

    def _update_variables(
        self,
        owner: ReplicaShare,
        whole: WholeTensors | None,
        gradients: Sequence[tf.Tensor | None],
        others: Tensors,
        gradients_of_others: Sequence[tf.Tensor | None],
        common: Tensors,
        factor: tf.Tensor,
        rate: tf.Tensor,
    ) -> tuple[Tensors, Tensors]:
        """Updates the pieces of one replica, and their slots, in place; see `_update_replica`.

        The other variables of the optimizer, which are small, may be on another device, whose variables no XLA program
        can change: `common` has their values.

        Returns:
          New values of the pieces and of `others`, and those of `common`.
        """
        pieces = [replica.first(variable) for variable in [*owner.variables, *owner.idle]]
        slots = [replica.first(variable) for variable in owner.optimizer.variables]
        elsewhere = {id(variable) for variable in owner.common_variables()}
        here = [id(variable) not in elsewhere for variable in owner.optimizer.variables]
        given = iter(common)
        state = [slot.read_value() if is_here else next(given) for slot, is_here in zip(slots, here, strict=True)]
        params = [piece.read_value() for piece in pieces]
        gradients = [*gradients, *(tf.zeros([1]) for _ in owner.idle)]
        gradients = [
            None if gradient is None else tf.reshape(gradient, piece.shape)
            for gradient, piece in zip(gradients, pieces, strict=True)
        ]
        new, new_state = pure_apply(
            *(owner.optimizer, state, [*params, *others], [*gradients, *gradients_of_others], rate),
            factor=factor,
            group_bytes=self.plan.update_group_bytes,
            whole=whole,
        )
        changed = [*pieces, *itertools.compress(slots, here)]
        stored = replica.assign(changed, [*new[: len(pieces)], *itertools.compress(new_state, here)])
        with tf.control_dependencies(stored):
            # An idle variable is there only if there are no others.
            return [tf.identity(value) for value in new[len(owner.idle) :]], [
                value for value, is_here in zip(new_state, here, strict=True) if not is_here
            ]

    def _store(self, weights: Tensors, state: Tensors) -> tf.Tensor:
        """Assigns the new weights and model state to this replica."""
        model = self.core.model
        copies = [*replica.own(model.trainable_variables), *replica.own(self._state)]
        with tf.control_dependencies(replica.assign(copies, [*weights, *self._without_seeds(state)])):
            return tf.ones([])


class ScatteringStep(ShardedStep):
    """A sharded step whose gradients go to their owners as the backward pass computes them (`--shard=gradients`).

    A replica holds the gradients of incomplete and unsent buckets, and sums micro-batches only for its own worker's
    shards.
    """

    def _accumulated(
        self, params: Tensors, state: Tensors, batch: Any, seed: tf.Tensor, scale: tf.Tensor, scales: tf.Tensor | None
    ) -> tuple[LocalSums, Scattered]:
        sent: Scattered | None = None

        def reduce(number: int, gradients: Tensors) -> Tensors:
            nonlocal sent
            gradients = self._of_replica(self._unscaled(gradients, scale))
            sent = self.exchange.scatter_shards(gradients, sent, number)
            summed = [*sent.shards, *sent.whole]
            self._ends_micro_batch(summed)
            return summed

        loss_scale = scale if self._scale_loss else None
        sums = self.core.accumulate(params, state, batch, seed, loss_scale, scales, reduce=reduce)
        assert sent is not None
        count = len(sent.shards)
        return sums, sent._replace(shards=sums.gradients[:count], whole=sums.gradients[count:])

    def _of_replica(self, gradients: Tensors) -> Tensors:
        """The gradients of a micro-batch, the same on all devices of a replica that have the same weights."""
        return gradients

    def _ends_micro_batch(self, summed: Tensors) -> None:
        """Called when the gradients of a micro-batch have been sent, with what is summed in their place."""

    def _own_norm(self, gradients: Scattered) -> tf.Tensor:
        norm = norms.l2_norm([*gradients.shards, *gradients.whole])
        return tf.where(gradients.finite, norm, float("nan"))  # a codec may have turned NaN into numbers


class DividedShardedStep(ShardedStep, DividedStep):
    """A sharded step of replicas whose layers are divided over a model axis.

    Args:
      share: This worker's share, with its optimizers.
      *args: See `DividedStep`.
      **kwargs: See `DividedStep`.
    """

    def _whole_tensors(self, place: PlaceShare, number: int) -> WholeTensors | None:
        """See `ShardedStep`. The devices of a replica own the same tensors of those that they divide."""
        if place.elementwise or not place.divided:
            return None
        axis, program = self._axis, number * self._share.programs + place.program
        return DealtTensors(place.replicas[number].optimizer, axis.size, lambda _: axis.on(program, place.stage))

    def _squares_of_replica(self, found: Sequence[tf.Tensor]) -> tf.Tensor:
        """If layers span workers, all of these have the whole weights, which count once."""
        if not self._axis.spans_workers:
            return super()._squares_of_replica(found)
        counted = [pair for pair in zip(found, self._share.places, strict=True) if pair[1].counts_here]
        of_parts = _sum_of_squares(norm for norm, place in counted if place.divided)
        return self._axis.sum_of_worker(of_parts) + _sum_of_squares(
            norm for norm, place in counted if not place.divided
        )


class DividedScatteringStep(ScatteringStep, DividedShardedStep):
    """A scattering step of replicas whose layers are divided over a model axis.

    Args:
      share: This worker's share, with its optimizers.
      *args: See `DividedStep`.
      **kwargs: See `DividedStep`.
    """

    def _of_replica(self, gradients: Tensors) -> Tensors:
        with self._axis.on_own_device() as place:
            return super()._agreed(place, gradients, tf.zeros([0]))[0]

    def _agreed(self, place: Place, gradients: Any, packed: tf.Tensor) -> tuple[Any, tf.Tensor]:
        """The sidecar of the first device; gradients have been sent already."""
        return gradients, place.sum(packed if place.rank == 0 else tf.zeros_like(packed))

    def _own_norm(self, gradients: Scattered) -> tf.Tensor:
        with self._axis.on_own_device() as place:
            squares = place.sum(_sum_of_squares([super()._own_norm(gradients)]))
        return tf.cast(tf.sqrt(squares), tf.float32)


def _sum_of_squares(parts: Iterable[tf.Tensor]) -> tf.Tensor:
    """In float64, in which no square of a float32 overflows."""
    return norms.sum_of_scalars([tf.zeros([], tf.float64), *(tf.square(tf.cast(part, tf.float64)) for part in parts)])

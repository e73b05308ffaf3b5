"""The exchange of sharded optimizer state where a replica has several devices, which divide its weights.

Each place in a replica has its own shards, of its parts of the weights, and exchanges them with the same place in the
other replicas, as `ShardedReducer` does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tfpar.collectives.group import Group
from tfpar.exchange.per_device import DevicesOfReplica, PlacesReducer, groups_of_places, per_device_reducer
from tfpar.exchange.reducer import ShouldApply, replica_context
from tfpar.exchange.registry import Spec
from tfpar.exchange.sharding.reducer import Norms, OwnersReducer, ShardedReducer, Update

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class _AtPlace:
    """What a step needs at one place.

    Attributes:
      number: Number of the place.
      device: Its device in this worker's first replica.
      reducer: Its reducer.
      sums: Gradients, summed over this worker's replicas.
      weights: Weights before the step.
      small: Sums over all replicas of the gradients without an owner, by their index at this place.
    """

    number: int
    device: str
    reducer: ShardedReducer
    sums: list[tf.Tensor]
    weights: list[tf.Tensor]
    small: dict[int, tf.Tensor]


class ShardedPlaces(OwnersReducer, PlacesReducer):
    """Sums gradients at their owners, which update their weights, and gathers the new weights, at each place."""

    _reducers: Sequence[ShardedReducer]
    _decisive = 0  # scalars of the sidecar that all but the first place sum

    def update_shards(
        self,
        gradients: Sequence[tf.Tensor],
        sidecar: tf.Tensor,
        weights: Sequence[tf.Tensor],
        should_apply: ShouldApply,
        update: Update,
        norms: Norms,
        wants_norm: tf.Tensor | None,
        arguments: Sequence[tf.Tensor],
    ) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor]:
        """Sums gradients, updates, gathers weights; see `ShardedReducer.update_shards`.

        The devices of a replica have the same sidecar, so that the first place decides for all whether to update.
        """

        def merged(
            strategy: tf.distribute.Strategy, gradients: Any, sidecar: Any, weights: Any, wanted: Any, arguments: Any
        ) -> Any:
            places, vectors = [], []
            for place in range(self.devices):
                with tf.device(self._devices[place]):
                    own = self._local_sum(strategy, sidecar, place) if place == 0 else tf.zeros([0])
                    at_place, vector = self._at(place, strategy, gradients, weights, own)
                places.append(at_place)
                vectors.append(vector)
            vector = vectors[0]
            given = [self._first(strategy, value, 0) for value in arguments]

            def apply() -> Any:
                return _applied(places, vector, update, norms, self._first(strategy, wanted, 0), given)

            new, size = tf.cond(should_apply(vector), apply, lambda: ([one.weights for one in places], tf.zeros([])))
            found = [dict(zip(*pair, strict=True)) for pair in zip(self._indices, new, strict=True)]
            by_program = self._by_program(strategy, weights, found)
            return self._dealt_out(strategy, [(values, vector, size) for values in by_program])

        wanted = tf.constant(True) if wants_norm is None else wants_norm
        values = (list(gradients), sidecar, list(weights), wanted, list(arguments))
        return replica_context().merge_call(merged, args=values)

    def _at(
        self, place: int, strategy: tf.distribute.Strategy, gradients: Any, weights: Any, sidecar: tf.Tensor
    ) -> tuple[_AtPlace, tf.Tensor]:
        """Sums a place's gradients over this worker's replicas, and those without an owner over all, with a sidecar."""
        reducer, indices = self._reducers[place], self._indices[place]
        sums = [self._local_sum(strategy, gradients[index], place) for index in indices]
        own = [self._first(strategy, weights[index], place) for index in indices]
        vector, small = reducer.reduce_whole([sums[index] for index in reducer.whole], sidecar)
        return _AtPlace(place, self._devices[place], reducer, sums, own, small), vector

    def _first(self, strategy: tf.distribute.Strategy, value: Any, place: int) -> tf.Tensor:
        """The value of a place in this worker's first replica."""
        return strategy.experimental_local_results(value)[self._programs[place]]


def _applied(
    places: Sequence[_AtPlace],
    sidecar: tf.Tensor,
    update: Update,
    norms: Norms,
    wanted: tf.Tensor,
    arguments: Sequence[tf.Tensor],
) -> tuple[list[list[tf.Tensor]], tf.Tensor]:
    """The new weights of each place, and the norm of all sums, if it is wanted."""
    shards: list[list[tf.Tensor]] = []
    for one in places:
        with tf.device(one.device):
            shards.append(one.reducer.scattered(one.sums))

    def of_all() -> tf.Tensor:
        found = []
        for one, sums in zip(places, shards, strict=True):
            with tf.device(one.device):
                found.append(one.reducer.norm_of(sums, one.small, norms))
        return norms.joined(found)

    size = tf.cond(wanted, of_all, lambda: tf.zeros([]))
    new = []
    for one, sums in zip(places, shards, strict=True):
        with tf.device(one.device):
            known = one.small, one.weights, update, (sidecar, size, *arguments)
            new.append(one.reducer.updated(one.number, sums, *known))
    return new, size


def reducer_of_places(
    spec: Spec,
    shapes: Sequence[tf.TensorShape],
    group: Group,
    strategy: tf.distribute.Strategy,
    seed: int,
    replica: DevicesOfReplica,
) -> PlacesReducer:
    """The exchange `spec` for every place in a replica, of sharded state if it has shards.

    Args:
      spec: The exchange.
      shapes: Static shapes of a device's variables.
      group: The workers that hold the same parts of a replica.
      strategy: The strategy of this worker's devices.
      seed: Seed of stochastic rounding.
      replica: How a replica is divided over them.
    """
    if not replica.shards:
        return per_device_reducer(spec, shapes, group, strategy, seed, replica)
    devices, groups = groups_of_places(group, strategy, replica)
    reducers = []
    for place, (own, device, indices) in enumerate(zip(groups, devices, replica.indices, strict=True)):
        own_shapes = [shapes[index] for index in indices]
        # One seed for all places: holders of the same weight, each at another place, must round it alike.
        reducers.append(ShardedReducer(spec, own_shapes, replica.shards[place], own, device, seed))
    return ShardedPlaces(reducers, replica, devices, groups)

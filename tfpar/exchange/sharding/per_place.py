"""The exchange of sharded optimizer state where a replica has several devices, which divide its weights.

Each place in a replica has its own shards, of its parts of the weights, and exchanges them with the same place in the
other replicas, as `ShardedReducer` does.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import tfpar_ops
from tfpar.collectives.group import Group
from tfpar.exchange.per_device import DevicesOfReplica, PlacesReducer, groups_of_places, per_device_reducer
from tfpar.exchange.registry import Spec
from tfpar.exchange.sharding.owners import Norms, OwnersReducer, Scatter, Scattered, Sent, Update, UpdateInputs
from tfpar.exchange.sharding.reducer import ShardedReducer
from tfpar.parallel.pipeline.devices import beside, by_device, call_beside

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class _AtPlace:
    """What a step needs at one place.

    Attributes:
      number: Number of the place.
      device: Its device in this worker's first replica.
      reducer: Its reducer.
      scatter: Returns the sums of this worker's shards.
      weights: Weights before the step.
      small: Sums over all replicas of the gradients without an owner, by their index at this place.
    """

    number: int
    device: str
    reducer: ShardedReducer
    scatter: Scatter
    weights: list[tf.Tensor]
    small: dict[int, tf.Tensor]


class ShardedPlaces(OwnersReducer, PlacesReducer):
    """Sums gradients at their owners, which update their weights, and gathers the new weights, at each place."""

    _reducers: Sequence[ShardedReducer]
    _decisive = 0  # scalars of the sidecar that all but the first place sum

    @property
    def _without_owner(self) -> list[int]:
        return [index for place in range(self.devices) for index in self._whole(place)]

    def _are_finite(self, gradients: Sequence[tf.Tensor]) -> tf.Tensor:
        """See `OwnersReducer`. Gradients stay on their devices."""
        found = []
        for own in by_device(gradients):
            with beside(own[0]):
                found.append(tfpar_ops.norm_squared(own)[1])
        return tf.reduce_all(tf.stack(found))

    def _merged_scatter(
        self, strategy: tf.distribute.Strategy, gradients: Any, before: Sent | None, number: int
    ) -> Any:
        """See `OwnersReducer`. A program of the first replica has the shards and residuals of its places; because all
        must have as many, empty tensors follow."""
        shards: list[list[tf.Tensor]] = []
        left: list[list[tf.Tensor]] = []
        known: list[tuple[list[tf.Tensor], ...]] = [()] * self.devices
        if before:
            earlier = zip(before, ([reducer.vectors for reducer in self._reducers], self._residuals), strict=True)
            known = list(zip(*(self._taken(strategy, *each) for each in earlier), strict=True))
        for place, reducer in enumerate(self._reducers):
            with tf.device(self._devices[place]):
                sums = [self._local_sum(strategy, gradients[index], place) for index in self._indices[place]]
                for found, values in zip(
                    (shards, left), reducer.scattered_aside(sums, number, *known[place]), strict=True
                ):
                    found.append(values)
        packed = zip(self._packed(shards), self._packed(left), strict=True)
        return self._for_first(strategy, list(packed))

    def _merged_update(self, strategy: tf.distribute.Strategy, gradients: Any, inputs: UpdateInputs) -> Any:
        """See `OwnersReducer`. The devices of a replica have the same sidecar, so that the first place decides for all
        whether to update."""
        places, vectors = [], []
        for place, (scatter, whole) in enumerate(self._of_places(strategy, gradients)):
            with tf.device(self._devices[place]):
                reducer, own = self._reducers[place], [inputs.weights[index] for index in self._indices[place]]
                first = self._local_sum(strategy, inputs.sidecar, place) if place == 0 else tf.zeros([0])
                vector, small = reducer.reduce_whole(whole, first)
                before = [self._first(strategy, value, place) for value in own]
            places.append(_AtPlace(place, self._devices[place], reducer, scatter, before, small))
            vectors.append(vector)
        if not isinstance(gradients, Scattered):
            for unit in self.units:
                unit.follow_sidecar(inputs.should_apply, vectors[0])
        with tf.device(self._devices[0]):
            vector = inputs.reported(vectors[0])
        given = [self._first(strategy, value, 0) for value in inputs.arguments]

        def apply() -> Any:
            wanted = self._first(strategy, inputs.wanted, 0)
            return _applied(places, vector, inputs.update, inputs.norms, wanted, given)

        new, size = tf.cond(inputs.should_apply(vector), apply, lambda: ([one.weights for one in places], tf.zeros([])))
        found = [dict(zip(*pair, strict=True)) for pair in zip(self._indices, new, strict=True)]
        by_program = self._by_program(strategy, inputs.weights, found)
        return self._dealt_out(strategy, [(values, vector, size) for values in by_program])

    def _of_places(self, strategy: tf.distribute.Strategy, gradients: Any) -> list[tuple[Scatter, list[tf.Tensor]]]:
        """For each place, a function that returns the sums of this worker's shards, once the step is applied, and the
        sums over this worker's replicas of the tensors without an owner."""
        found: list[tuple[Scatter, list[tf.Tensor]]] = []
        if not isinstance(gradients, Scattered):
            for place, reducer in enumerate(self._reducers):
                with tf.device(self._devices[place]):
                    sums = [self._local_sum(strategy, gradients[index], place) for index in self._indices[place]]
                    found.append((reducer.scatter_of(sums), [sums[index] for index in reducer.whole]))
            return found
        shards = self._taken(strategy, gradients.shards, [reducer.vectors for reducer in self._reducers])
        residuals = self._taken(strategy, gradients.residuals, self._residuals)
        whole = iter(gradients.whole)
        for place, reducer in enumerate(self._reducers):
            with tf.device(self._devices[place]):
                small = [self._local_sum(strategy, next(whole), place) for _ in self._whole(place)]
            found.append((functools.partial(reducer.known, shards[place], residuals[place]), small))
        return found

    def _for_first(self, strategy: tf.distribute.Strategy, by_program: Sequence[Any]) -> Any:
        """Results for the programs of this worker's first replica, in which it keeps its sums. Those of the others get
        empty tensors, which exist once the results do."""
        programs = len(strategy.extended.worker_devices)
        empty = tf.nest.map_structure(_nothing_of, list(by_program))

        def of_program(context: tf.distribute.distribution.ValueContext) -> Any:
            number = context.replica_id_in_sync_group % programs
            return (by_program if number < self._per_replica else empty)[number % self._per_replica]

        return strategy.experimental_distribute_values_from_function(of_program)

    def _whole(self, place: int) -> list[int]:
        """Indices of the tensors without an owner at a place, among all."""
        return [self._indices[place][index] for index in self._reducers[place].whole]

    @property
    def _residuals(self) -> list[int]:
        """Number of residuals of each place."""
        return [len(reducer.residuals()) for reducer in self._reducers]

    def _packed(self, by_place: Sequence[Sequence[tf.Tensor]]) -> list[list[tf.Tensor]]:
        """For each program, the tensors of its places, and empty ones up to the number that the largest has."""
        rows: list[list[tf.Tensor]] = [[] for _ in range(self._per_replica)]
        for program, tensors in zip(self._programs, by_place, strict=True):
            rows[program] += tensors
        most = max(map(len, rows))
        return [[*row, *(tf.zeros([0]) for _ in range(most - len(row)))] for row in rows]

    def _taken(
        self, strategy: tf.distribute.Strategy, packed: Sequence[Any], counts: Sequence[int]
    ) -> list[list[tf.Tensor]]:
        """For each place its tensors, of these counts, from the result of `_packed`."""
        taken = [0] * self._per_replica
        found = []
        for place, (program, count) in enumerate(zip(self._programs, counts, strict=True)):
            own = packed[taken[program] : taken[program] + count]
            taken[program] += count
            found.append([self._first(strategy, value, place) for value in own])
        return found

    def _first(self, strategy: tf.distribute.Strategy, value: Any, place: int) -> tf.Tensor:
        """The value of a place in this worker's first replica."""
        return strategy.experimental_local_results(value)[self._programs[place]]


def _nothing_of(value: tf.Tensor) -> tf.Tensor:
    return call_beside(lambda tensor: tf.reshape(tensor, [-1])[:0], value)


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
            shards.append(one.scatter())

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
        reducers.append(
            ShardedReducer(spec, own_shapes, replica.shards[place], own, device, seed, replica.micro_batches)
        )
    return ShardedPlaces(reducers, replica, devices, groups, shapes)

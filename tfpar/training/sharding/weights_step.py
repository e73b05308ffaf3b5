"""The training steps of replicas that hold shards of the weights (`--shard=weights`).

After the backward pass, the replica that updates a shard already has the sum of its gradients over all replicas. Only
the sidecar and the small weights that every replica has are left for the exchange.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from tfpar.exchange import Exchange
from tfpar.exchange.reducer import ShouldApply
from tfpar.optim.optimizers import ELEMENTWISE
from tfpar.parallel.model_axis import ModelAxis, Place
from tfpar.parallel.split import model_split_of, split_of
from tfpar.parallel.weight_shards import ReplicaAxis, is_sharded, replica_split_of
from tfpar.training.norms import squared_norm
from tfpar.training.objective import LocalSums, Tensors
from tfpar.training.step import TrainStep
from tfpar.training.tensor_parallel.step import DividedStep
from tfpar.training.tensor_parallel.whole_tensors import DealtTensors

import keras
import tensorflow as tf


def exchanged_places(variables: Sequence[keras.Variable]) -> list[int]:
    """Indices of the variables that are not in shards."""
    return [place for place, variable in enumerate(variables) if not is_sharded(variable)]


class GatheringStep(TrainStep):
    """A step whose forward and backward pass gather the weights of each block.

    Args:
      replica_axis: This worker's devices in all replicas.
      *args: See `TrainStep`.
      **kwargs: See `TrainStep`.
    """

    def __init__(self, replica_axis: ReplicaAxis, *args: Any, **kwargs: Any) -> None:
        self._replica_axis = replica_axis
        self._bytes_of = {"denominators": 0, "passes": 0, "update": 0}
        super().__init__(*args, **kwargs)
        self._exchanged = exchanged_places(self.core.model.trainable_variables)
        self.exchange: Any = _ExchangeOfSome(self.exchange, self._exchanged)

    def counted_weights(self) -> Tensors:
        """See `TrainStep`. Padding is zero."""
        values: Tensors = []
        for program, number in enumerate(self._replica_axis.numbers):
            for variable in self.core.model.trainable_variables:
                split = split_of(variable)
                if split.is_first(number) if split else number == 0:
                    values.append(self._local(variable.value)[program].read_value())
        return values

    def sum_over_parts(self, value: tf.Tensor) -> tf.Tensor:
        """See `TrainStep`."""
        return super().sum_over_parts(self._replica_axis.sum_of_worker(value))

    def _accumulated(self, *args: Any) -> tuple[LocalSums, Tensors]:
        """See `TrainStep`; every micro-batch is traced."""
        with self._counted("passes"):
            return super()._accumulated(*args)

    def _total_denominators(self, params: Tensors, state: Tensors, batch: Any) -> tf.Tensor:
        """See `TrainStep`. Traced before the passes that need them, this pass gathers weights, too."""
        with self._counted("denominators") as place:
            denominators = self._denominators(params, state, batch)
        return place.sum(denominators)

    @functools.cached_property
    def _dealt(self) -> DealtTensors | None:
        """The weights in shards of which the optimizer needs more than a replica has, if there may be any."""
        if type(self.optimizer) in ELEMENTWISE:
            return None
        axis = self._replica_axis
        return DealtTensors(self.optimizer, axis.size, lambda _: axis.on_own_device(), replica_split_of)

    def _pure_apply(self, *args: Any, **kwargs: Any) -> tuple[Tensors, Tensors]:
        with self._counted("update"):
            return super()._pure_apply(*args, **kwargs, whole=self._dealt)

    @contextlib.contextmanager
    def _counted(self, part: str) -> Iterator[Place]:
        """In this context, a part of the step is traced; counts what it sends to other replicas."""
        with self._replica_axis.on_own_device() as place:
            before = len(place.sent)
            yield place
            self._bytes_of[part] = sum(place.sent[before:])
            self._replica_axis.bytes_of_step = sum(self._bytes_of.values())

    def _norm_if_needed(self, gradients: Tensors, wants_norm: tf.Tensor | None) -> tf.Tensor:
        del wants_norm  # a branch would cost more than the sum of a scalar
        exchanged = {*self._exchanged}
        with self._replica_axis.on_own_device() as place:
            squares = place.sum(self._squared(gradients, [*{*range(len(gradients))} - exchanged]))
        return tf.cast(tf.sqrt(squares + self._squared(gradients, self._exchanged)), tf.float32)

    def _squared(self, gradients: Tensors, indices: Sequence[int]) -> tf.Tensor:
        """The squared norm of some gradients, over all devices of a replica."""
        return squared_norm([gradients[index] for index in indices])


class DividedGatheringStep(GatheringStep, DividedStep):
    """A gathering step of replicas whose layers are divided over a model axis.

    Args:
      replica_axis: See `GatheringStep`.
      axis: See `DividedStep`.
      *args: See `TrainStep`.
      **kwargs: See `TrainStep`.
    """

    def __init__(self, replica_axis: ReplicaAxis, axis: ModelAxis, *args: Any, **kwargs: Any) -> None:
        super().__init__(replica_axis, axis, *args, **kwargs)

    def _total_denominators(self, params: Tensors, state: Tensors, batch: Any) -> tf.Tensor:
        with self._axis.on_own_device():
            return super()._total_denominators(params, state, batch)

    def _squared(self, gradients: Tensors, indices: Sequence[int]) -> tf.Tensor:
        weights = self.core.model.trainable_variables
        divided = [index for index in indices if model_split_of(weights[index])]
        others = [index for index in indices if not model_split_of(weights[index])]
        with self._axis.on_own_device() as place:
            return place.sum(super()._squared(gradients, divided)) + super()._squared(gradients, others)


class _ExchangeOfSome:
    """An exchange of the gradients that are not in shards, called with all gradients."""

    def __init__(self, exchange: Exchange, places: list[int]) -> None:
        self._exchange, self._places = exchange, places
        self.state, self.first_ready_indices, self.early_units = exchange.state, list[int](), exchange.early_units

    def reduce_sums(
        self, gradients: Tensors, sidecar: tf.Tensor, should_apply: ShouldApply
    ) -> tuple[Tensors, tf.Tensor]:
        """See `Exchange.reduce_sums`; gradients of shards are sums already."""
        sums = list(gradients)
        found, sidecar = self._exchange.reduce_sums([gradients[each] for each in self._places], sidecar, should_apply)
        for place, value in zip(self._places, found, strict=True):
            sums[place] = value
        return sums, sidecar

"""The training step of replicas that hold parts of the weights (`--shard=weights`).

After the backward pass, the replica that updates a part already has the sum of its gradients over all replicas. Only
the sidecar and the small weights that every replica has whole are left for the exchange.
"""

from __future__ import annotations

from typing import Any

from tfpar.exchange import Exchange
from tfpar.exchange.reducer import ShouldApply
from tfpar.parallel.division import FlatSplit
from tfpar.parallel.model_axis import ModelAxis
from tfpar.parallel.split import split_of
from tfpar.training.norms import squared_norm
from tfpar.training.objective import LocalSums, Tensors
from tfpar.training.step import TrainStep

import keras
import tensorflow as tf


def whole_places(variables: list[keras.Variable]) -> list[int]:
    """Indices of the variables that every replica has whole."""
    return [place for place, variable in enumerate(variables) if split_of(variable) is None]


class GatheringStep(TrainStep):
    """A step whose forward and backward pass gather the weights of each block.

    Args:
      axis: All replicas.
      *args: See `TrainStep`.
      **kwargs: See `TrainStep`.
    """

    def __init__(self, axis: ModelAxis, *args: Any, **kwargs: Any) -> None:
        self._axis = axis
        super().__init__(*args, **kwargs)
        self._whole = whole_places(self.core.model.trainable_variables)
        self.exchange: Any = _ExchangeOfWhole(self.exchange, self._whole)

    def counted_weights(self) -> Tensors:
        """See `TrainStep`."""
        values: Tensors = []
        for program in range(self._axis.programs):
            with self._axis.on(program) as place:
                for variable in self.core.model.trainable_variables:
                    split, value = split_of(variable), self._local(variable.value)[program].read_value()
                    if isinstance(split, FlatSplit):
                        values.append(value[: split.own_elements(place.rank)])
                    elif place.rank == 0:
                        values.append(value)
        return values

    def sum_over_parts(self, value: tf.Tensor) -> tf.Tensor:
        """See `TrainStep`."""
        return self._axis.sum_of_worker(value)

    def _accumulated(self, *args: Any) -> tuple[LocalSums, Tensors]:
        with self._axis.on_own_device():
            return super()._accumulated(*args)

    def _total_denominators(self, params: Tensors, state: Tensors, batch: Any) -> tf.Tensor:
        with self._axis.on_own_device() as place:
            return place.sum(self._denominators(params, state, batch))

    def _norm_if_needed(self, gradients: Tensors, wants_norm: tf.Tensor | None) -> tf.Tensor:
        del wants_norm  # a branch would cost more than the sum of a scalar
        whole = [gradients[index] for index in self._whole]
        parts = [gradient for index, gradient in enumerate(gradients) if index not in set(self._whole)]
        with self._axis.on_own_device() as place:
            squares = place.sum(squared_norm(parts))
        return tf.cast(tf.sqrt(squares + squared_norm(whole)), tf.float32)


class _ExchangeOfWhole:
    """An exchange of only the gradients of whole weights, called with all gradients."""

    def __init__(self, exchange: Exchange, whole: list[int]) -> None:
        self._exchange, self._whole = exchange, whole
        self.state, self.first_ready_indices = exchange.state, list[int]()

    def reduce_sums(
        self, gradients: Tensors, sidecar: tf.Tensor, should_apply: ShouldApply
    ) -> tuple[Tensors, tf.Tensor]:
        """See `Exchange.reduce_sums`; gradients of parts are sums already."""
        sums = list(gradients)
        found, sidecar = self._exchange.reduce_sums([gradients[each] for each in self._whole], sidecar, should_apply)
        for place, value in zip(self._whole, found, strict=True):
            sums[place] = value
        return sums, sidecar

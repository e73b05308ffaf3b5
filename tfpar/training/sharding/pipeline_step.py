"""The training steps of pipelines with sharded state.

With `--shard=gradients`, a stage sends the gradients of each micro-batch to their owners when its backward pass is
over, and keeps the sums of its own shards alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfpar.exchange.sharding.owners import Scattered
from tfpar.parallel.held import held_by
from tfpar.parallel.pipeline.devices import beside, by_device
from tfpar.training.norms import squared_norm, sum_of_scalars
from tfpar.training.objective import LocalSums, Tensors
from tfpar.training.pipeline.over_workers import DividedOverWorkersStep, OverWorkersStep
from tfpar.training.pipeline.shared_weights import sum_of_ranks
from tfpar.training.pipeline.stages import Trace, current_trace
from tfpar.training.pipeline.step import DividedPipelineStep, PipelineStep
from tfpar.training.sharding.place_share import PlaceShare
from tfpar.training.sharding.step import DividedScatteringStep, DividedShardedStep, ScatteringStep, ShardedStep

import tensorflow as tf


class PipelineShardedStep(ShardedStep, PipelineStep):
    """A sharded step of replicas that are pipelines within a worker.

    Args:
      share: This worker's share, with its optimizers.
      *args: See `PipelineStep`.
      **kwargs: See `PipelineStep`.
    """


class DividedPipelineShardedStep(DividedShardedStep, DividedPipelineStep):
    """A sharded step of pipelines within a worker whose layers are divided as well.

    Args:
      share: This worker's share, with its optimizers.
      *args: See `DividedPipelineStep`.
      **kwargs: See `DividedPipelineStep`.
    """


class OverWorkersShardedStep(ShardedStep, OverWorkersStep):
    """A sharded step of pipelines over several workers.

    Args:
      share: This worker's share, with its optimizers.
      *args: See `OverWorkersStep`.
      **kwargs: See `OverWorkersStep`.
    """

    def _squares_of_replica(self, found: Sequence[tf.Tensor]) -> tf.Tensor:
        """See `ShardedStep`."""
        return self._sum(super()._squares_of_replica(found))


class DividedOverWorkersShardedStep(OverWorkersShardedStep, DividedShardedStep, DividedOverWorkersStep):
    """A sharded step of pipelines over several workers, whose devices divide the layers of the stages.

    Args:
      share: This worker's share, with its optimizers.
      *args: See `DividedOverWorkersStep`.
      **kwargs: See `DividedOverWorkersStep`.
    """


class PipelineScatteringStep(ScatteringStep, PipelineShardedStep):
    """A scattering step of replicas that are pipelines within a worker.

    Args:
      share: This worker's share, with its optimizers.
      *args: See `PipelineStep`.
      **kwargs: See `PipelineStep`.
    """

    def _accumulated(self, *args: Any) -> tuple[LocalSums, Scattered]:
        _trace().places_of_sums = [
            self._places[place.indices[0]] if place and place.indices else 0 for place in self._summed_here()
        ]
        return super()._accumulated(*args)

    def _summed_here(self) -> list[PlaceShare | None]:
        """See `OwnShare.scattered`."""
        return self._share.scattered(self._pipeline.devices.own_replica())

    def _ends_micro_batch(self, summed: Tensors) -> None:
        _trace().complete_backward_with(summed, self.core.model.trainable_variables)

    def _own_norm(self, gradients: Scattered) -> tf.Tensor:
        """See `TrainStep`. Each device sends one scalar."""
        squares = [tf.zeros([], tf.float64)]
        for own in by_device([*gradients.shards, *gradients.whole]):
            with beside(own[0]):
                squares.append(squared_norm(own))
        # A codec may have turned NaN into numbers.
        square = tf.where(gradients.finite, sum_of_scalars(squares), tf.constant(float("nan"), tf.float64))
        return tf.cast(tf.sqrt(self._over_workers(square)), tf.float32)

    def _over_workers(self, square: tf.Tensor) -> tf.Tensor:
        """The sum of a scalar over the workers of the replica."""
        return square


class DividedPipelineScatteringStep(DividedScatteringStep, PipelineScatteringStep, DividedPipelineShardedStep):
    """A scattering step of pipelines within a worker whose layers are divided as well.

    Args:
      share: This worker's share, with its optimizers.
      *args: See `DividedPipelineStep`.
      **kwargs: See `DividedPipelineStep`.
    """


class OverWorkersScatteringStep(PipelineScatteringStep, OverWorkersShardedStep):
    """A scattering step of pipelines over several workers.

    Args:
      share: This worker's share, with its optimizers.
      *args: See `OverWorkersStep`.
      **kwargs: See `OverWorkersStep`.
    """

    def _accumulated(self, *args: Any) -> tuple[LocalSums, Scattered]:
        """See `TrainStep`. The workers that hold a weight own the same shard of it, and add up their sums."""
        sums, sent = super()._accumulated(*args)
        messages, shards = _trace().messages_of_worker(), list(sent.shards)
        for number, place in enumerate(self._summed_here()):
            held = held_by(place.variables[0]) if place and place.variables else None
            if held and len(held.ranks) > 1:
                shards[number] = sum_of_ranks(shards[number], held.ranks, messages)
        with tf.control_dependencies(messages.sent):
            return sums._replace(loss=tf.identity(sums.loss)), sent._replace(shards=shards)

    def _over_workers(self, square: tf.Tensor) -> tf.Tensor:
        return self._sum(square)


class DividedOverWorkersScatteringStep(DividedScatteringStep, OverWorkersScatteringStep, DividedOverWorkersShardedStep):
    """A scattering step of pipelines over several workers, whose devices divide the layers of the stages.

    Args:
      share: This worker's share, with its optimizers.
      *args: See `DividedOverWorkersStep`.
      **kwargs: See `DividedOverWorkersStep`.
    """


def _trace() -> Trace:
    trace = current_trace()
    assert trace is not None
    return trace

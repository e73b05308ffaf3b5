"""The training step of replicas of several devices each.

The devices of a replica see the same examples and draw the same random numbers. Each keeps its own results for divided
weights; for everything else they agree on one result, because the sums of their threads may differ in the last bit, and
diverging copies would be different models.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

from tfpar.config import ConfigError
from tfpar.optim.optimizers import ELEMENTWISE
from tfpar.parallel import replica
from tfpar.parallel.model_axis import ModelAxis, Place
from tfpar.parallel.pipeline.devices import place_of
from tfpar.parallel.split import model_split_of, split_of
from tfpar.parallel.tensor.positions import has_gradient_in_parts
from tfpar.training.norms import squared_norm, sum_of_scalars
from tfpar.training.objective import Tensors
from tfpar.training.step import TrainStep
from tfpar.training.step_loop import StepReport
from tfpar.training.tensor_parallel.whole_tensors import DealtTensors

import keras
import tensorflow as tf


class DividedStep(TrainStep):
    """A step of replicas whose weights are divided.

    Args:
      axis: The devices of this worker's replicas.
      *args: See `TrainStep`.
      **kwargs: See `TrainStep`.
    """

    def __init__(self, axis: ModelAxis, *args: Any, **kwargs: Any) -> None:
        self._axis = axis
        super().__init__(*args, **kwargs)
        # Indices of the divided weights, and of the whole ones, on each device of a program.
        self._by_stage: list[tuple[list[int], list[int]]] = [([], []) for _ in range(axis.stages)]
        for index, variable in enumerate(self.core.model.trainable_variables):
            self._by_stage[place_of(variable) or 0][model_split_of(variable) is None].append(index)
        weights = enumerate(self.core.model.trainable_variables)
        self._summed = {index for index, variable in weights if has_gradient_in_parts(variable)}

    def _replica_step(self, *args: Any) -> StepReport:
        """See `TrainStep`; counts what the device sends to the others."""
        with self._axis.on_own_device() as place:
            before = len(place.sent)
            report = super()._replica_step(*args)
            if self._axis.stages == 1:  # otherwise one trace is called for every micro-batch
                self._axis.bytes_of_step = sum(place.sent[before:])
        return report

    def next_batch(self, iterator: Iterator[Any]) -> Any:
        """The next batch: all devices of a replica get the same."""
        return replica.next_batch(self.strategy, iterator, model_devices=self._axis.size)

    def counted_weights(self) -> Tensors:
        """See `TrainStep`."""
        return self._own_weights() if self._axis.spans_workers else super().counted_weights()

    def _own_weights(self) -> Tensors:
        """The parts of weights on this worker's devices; a whole weight is on the first device of the axis."""
        values: Tensors = []
        for program in range(self._axis.programs):
            with self._axis.on(program) as place:
                for variable in self.core.model.trainable_variables:
                    if self._counts_here(variable) and (split_of(variable) or place.rank == 0):
                        values.append(self._local(variable.value)[program].read_value())
        return values

    def sum_over_parts(self, value: tf.Tensor) -> tf.Tensor:
        """See `TrainStep`."""
        return self._axis.sum_of_worker(value) if self._axis.spans_workers else value

    def _make_programs(self) -> None:
        super()._make_programs()
        self._norm: Callable[[Tensors], tf.Tensor] = self._whole_norm

    def _replica_number(self, context: tf.distribute.ReplicaContext) -> tf.Tensor:
        return tf.convert_to_tensor(context.replica_id_in_sync_group) // self._axis.size

    def _total_denominators(self, params: Tensors, state: Tensors, batch: Any) -> tf.Tensor:
        with self._axis.on_own_device():
            return self.exchange.sum_vector(self._denominators(params, state, batch))

    def _contribution(
        self,
        params: Tensors,
        state: Tensors,
        batch: Any,
        seed_path: tuple[tf.Tensor, tf.Tensor],
        scale: tf.Tensor,
        scales: tf.Tensor | None,
    ) -> tuple[Tensors, tf.Tensor, Tensors, dict[int, tf.Tensor]]:
        with self._axis.on_own_device() as place:
            gradients, packed, state, assigned = super()._contribution(params, state, batch, seed_path, scale, scales)
            if assigned:
                name = self.core.model.trainable_variables[min(assigned)].path
                raise ConfigError(
                    f"--mesh: the model assigns {name} in its forward pass (as SpectralNormalization does), which "
                    "divided models cannot do. Use --mesh=data:... alone."
                )
            gradients, packed = self._agreed(place, gradients, packed)
            return gradients, packed, state, assigned

    def _agreed(self, place: Place, gradients: Tensors, packed: tf.Tensor) -> tuple[Tensors, tf.Tensor]:
        """Gradients and sidecar, with the same bits on every device for whole weights: the mean of all devices, or the
        sum if each has a part. One call per stage; that of the first stage includes the sidecar."""
        agreed = packed if place.rank == 0 else tf.zeros_like(packed)
        for stage, (_, whole) in enumerate(self._by_stage):
            with self._axis.on_own_device(stage) as there, tf.device(there.device):
                copies = [1 if index in self._summed else there.size for index in whole]
                parts = [tf.reshape(gradients[index], [-1]) / count for index, count in zip(whole, copies, strict=True)]
                sizes = [math.prod(part.shape) for part in parts]
                if stage == 0:
                    agreed, *means = tf.split(there.sum(tf.concat([agreed, *parts], axis=0)), [packed.shape[0], *sizes])
                else:
                    means = tf.split(there.sum(tf.concat(parts, axis=0)), sizes) if parts else []
                for index, mean in zip(whole, means, strict=True):
                    gradients[index] = tf.reshape(mean, gradients[index].shape)
        return gradients, agreed

    def _whole_norm(self, gradients: Tensors) -> tf.Tensor:
        """The norm over all devices' parts and, counted once, the whole weights; the same bits on each device."""
        return tf.cast(tf.sqrt(sum_of_scalars(self._squares(gradients))), tf.float32)

    def _squares(self, gradients: Tensors) -> Tensors:
        """The squared norms of divided and of whole weights, of every stage; the same bits on each device."""
        weights, squares = self.core.model.trainable_variables, []
        for stage, indices in enumerate(self._by_stage):
            divided, whole = ([gradients[one] for one in part if self._counts_here(weights[one])] for part in indices)
            with self._axis.on_own_device(stage) as place, tf.device(place.device):
                if divided:
                    squares.append(place.sum(squared_norm(divided)))
                if whole:
                    squares.append(squared_norm(whole))
        return squares

    @functools.cached_property
    def _dealt(self) -> DealtTensors | None:
        """The weights of which the optimizer needs more than a device has, if there may be any."""
        if type(self.optimizer) in ELEMENTWISE:
            return None
        axis = self._axis
        return DealtTensors(self.optimizer, axis.size, lambda weight: axis.on_own_device(place_of(weight) or 0))

    def _pure_apply(self, *args: Any, **kwargs: Any) -> tuple[Tensors, Tensors]:
        return super()._pure_apply(*args, **{"whole": self._dealt, **kwargs})

    def _counts_here(self, variable: keras.Variable) -> bool:
        """Whether this worker counts a variable in norms: one of several that hold the same does."""
        del variable
        return True

    def _norm_if_needed(self, gradients: Tensors, wants_norm: tf.Tensor | None) -> tf.Tensor:
        del wants_norm  # a branch would cost more than the sum of a scalar
        return self._whole_norm(gradients)

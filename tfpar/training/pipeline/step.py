"""The training step of replicas whose layers are on several devices, as stages of a pipeline."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

from tfpar.parallel.pipeline.devices import beside, call_beside, place_of
from tfpar.training.core import Core
from tfpar.training.norms import squared_norm, sum_of_scalars
from tfpar.training.objective import Forward, LocalSums, Tensors
from tfpar.training.pipeline.reached import confirm_reached
from tfpar.training.pipeline.stages import Pipeline, Trace, current_trace
from tfpar.training.step import TrainStep
from tfpar.training.tensor_parallel.step import DividedStep

import tensorflow as tf


class PipelineCore(Core):
    """A `Core` whose model runs in stages within the context of a pipeline. Operations on a tensor run on its
    device."""

    in_turn = False  # stages work on several micro-batches at the same time

    def loss_and_grads(self, *args: Any, **kwargs: Any) -> LocalSums:
        """See `Core`. The loss is computed on the device of the model's outputs."""
        trace = current_trace()
        if trace is None:
            return super().loss_and_grads(*args, **kwargs)
        trace.differentiates = True
        with tf.device(trace.devices[-1]):
            return super().loss_and_grads(*args, **kwargs)

    def backward(self, forward: Forward) -> LocalSums:
        """See `Core`. Gradients of a weight of several stages are added on the device of the first, which has it."""
        trace = current_trace()
        if trace is None:
            return super().backward(forward)
        with _sums_beside_last(trace.devices[-1]):
            return super().backward(forward)

    def devices_of_weights(self) -> Sequence[str]:
        """See `Core`."""
        trace = current_trace()
        if trace is None or len(trace.devices) == 1:
            return ()
        return [trace.devices[place_of(variable) or 0] for variable in self.model.trainable_variables]

    def each(self, tensors: Tensors, function: Callable[[tf.Tensor], tf.Tensor]) -> Tensors:
        """See `Core`."""
        return [call_beside(function, tensor) for tensor in tensors]

    def added(self, total: LocalSums, sums: LocalSums) -> LocalSums:
        """See `Core`."""
        # Without this dependency TensorFlow would keep the gradients of all micro-batches, and add them at the end.
        with tf.control_dependencies([total.loss]):
            gradients = [*map(functools.partial(call_beside, tf.add), total.gradients, sums.gradients)]
        if (trace := current_trace()) is not None:
            trace.complete_backward_with(gradients, self.model.trainable_variables)
        others = (each._replace(gradients=[]) for each in (total, sums))
        return super().added(*others)._replace(gradients=gradients)


def _sums_beside_last(device: str) -> contextlib.AbstractContextManager[Any]:
    """In this context the operations of a backward pass are on a device, unless they have one; but a sum of gradients
    is on the device of the last one, which is of the earliest stage that reads the tensor."""

    def device_of(operation: tf.Operation) -> str:
        beside_last = operation.inputs[-1].device if operation.type == "AddN" else ""
        return operation.device or beside_last or device

    # `tf.device` takes no functions.
    return tf.compat.v1.get_default_graph().device(device_of)


class PipelineStep(TrainStep):
    """A step of replicas that are pipelines.

    Args:
      pipeline: The stages and their devices.
      places: For each trainable variable, its place.
      *args: See `TrainStep`.
      **kwargs: See `TrainStep`.
    """

    def __init__(self, pipeline: Pipeline, places: Sequence[int], *args: Any, **kwargs: Any) -> None:
        self._pipeline, self._places = pipeline, list(places)
        super().__init__(*args, **kwargs)

    def _make_programs(self) -> None:
        super()._make_programs()
        self._norm: Callable[[Tensors], tf.Tensor] = self._norm_by_place

    def _total_denominators(self, params: Tensors, state: Tensors, batch: Any) -> tf.Tensor:
        with self._pipeline.on_own_replica():
            return super()._total_denominators(params, state, batch)

    def _contribution(self, *args: Any) -> Any:
        with self._pipeline.on_own_replica() as trace:
            found = super()._contribution(*args)
        if self._may_have_zeros(trace):
            confirm_reached(self.core, self._pipeline, *args)
        return found

    def _may_have_zeros(self, trace: Trace) -> bool:
        """Whether gradients may be zeros of weights that the loss does not reach."""
        return trace.has_unread_results

    def _pure_apply(self, *args: Any, **kwargs: Any) -> tuple[Tensors, Tensors]:
        return super()._pure_apply(*args, **kwargs, beside=beside)

    def _norm_by_place(self, gradients: Tensors) -> tf.Tensor:
        """The norm over all places, each of which sends one scalar."""
        devices = self._pipeline.devices.of_own_replica()
        squares = []
        for place, device in enumerate(devices):
            if own := [gradient for gradient, where in zip(gradients, self._places, strict=True) if where == place]:
                with tf.device(device):
                    squares.append(squared_norm(own))
        return tf.cast(tf.sqrt(sum_of_scalars(squares)), tf.float32)


class DividedPipelineStep(PipelineStep, DividedStep):
    """A step of pipelines whose layers are divided as well.

    Args:
      pipeline: The stages and their devices.
      places: For each trainable variable, its place.
      *args: See `DividedStep`.
      **kwargs: See `DividedStep`.
    """

    def _make_programs(self) -> None:
        super()._make_programs()
        self._norm: Callable[[Tensors], tf.Tensor] = self._whole_norm

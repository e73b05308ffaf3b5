"""The training step of replicas whose stages are on several workers.

Each worker has only the variables of its own stages. All of them read the examples; the last one computes the model's
outputs, and with them the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tfpar.config import ConfigError
from tfpar.optim.keras_draws import drawing
from tfpar.parallel.held import held_by
from tfpar.parallel.pipeline.devices import place_of
from tfpar.parallel.pipeline.turns import BACKWARD, FORWARD, Turn
from tfpar.training import sidecar
from tfpar.training.model.call import call_model, depends_on
from tfpar.training.norms import squared_norm, sum_of_scalars
from tfpar.training.objective import Batch, Forward, LocalSums, ObjectiveSums, Tensors
from tfpar.training.pipeline.between_workers import PipelineWorker
from tfpar.training.pipeline.shared_weights import sum_of_holders
from tfpar.training.pipeline.specs import as_if_here, zeros_like
from tfpar.training.pipeline.stages import Pipeline, Trace, current_trace
from tfpar.training.pipeline.step import PipelineCore, PipelineStep
from tfpar.training.seeds import fold_in
from tfpar.training.tensor_parallel.step import DividedStep

import keras
import tensorflow as tf


class OverWorkersCore(PipelineCore):
    """A `Core` whose model runs in stages on several workers, within the context of a pipeline."""

    def sums_of(
        self, params: Tensors, state: Tensors, batch: Batch, *, training: bool, scales: tf.Tensor | None = None
    ) -> ObjectiveSums:
        """See `Core`. Workers without the outputs return only the count and the losses of their layers."""
        trace = current_trace()
        if trace is None or trace.has_outputs:
            return super().sums_of(params, state, batch, training=training, scales=scales)
        x, _, weight = batch
        call = call_model(self.model, params, state, x, training=training)
        count = tf.reduce_sum(weight)
        losses = [tf.cast(tf.reduce_sum(value), tf.float32) for value in call.losses]
        metrics = [tf.zeros(variable.shape) for variable in self.objective.totals.variables]
        return ObjectiveSums(count * tf.add_n(losses) if losses else tf.zeros([]), count, call.state, metrics)

    def draw_seed(self, seed: tf.Tensor) -> tf.Tensor:
        """See `Core`. The layers of each worker draw other numbers."""
        seed, trace = super().draw_seed(seed), current_trace()
        return seed if trace is None else fold_in(seed, trace.messages_of_worker().worker.rank)

    def accumulate(
        self,
        params: Tensors,
        state: Tensors,
        batch: Batch,
        seed: tf.Tensor,
        loss_scale: tf.Tensor | None,
        scales: tf.Tensor | None = None,
        reduce: Callable[[int, Tensors], Tensors] | None = None,
    ) -> LocalSums:
        """See `Core`."""
        trace = current_trace()
        assert trace is not None
        messages = trace.messages_of_worker()
        trace.differentiates = True
        waiting: dict[int, Forward] = {}
        total: LocalSums | None = None
        order = messages.turns(batch[2].shape[0])
        for turn, number in _traced(order):
            messages.micro_batch = number
            with tf.device(trace.devices[-1]):
                if turn == FORWARD:
                    own = tf.nest.map_structure(lambda part, number=number: part[number], batch)
                    found = self.forward(params, state, own, fold_in(seed, number), loss_scale, scales)
                    waiting[number], state = found, found.sums.state
                else:
                    sums = self.backward(waiting.pop(number))
                    if reduce:
                        sums = sums._replace(gradients=reduce(number, self._shaped(sums.gradients)))
                    total = sums if total is None else self.added(total, sums)
        assert total is not None
        messages.run_in_order(order)
        gradients = list(total.gradients)
        for index, variable in enumerate(self.model.trainable_variables):
            held = held_by(variable)
            if held and held.here and len(held.ranks) > 1 and not reduce:
                gradients[index] = sum_of_holders(gradients[index], held, messages)
        with tf.control_dependencies(messages.sent):
            return total._replace(loss=tf.identity(total.loss), gradients=gradients, state=state)

    def _shaped(self, gradients: Tensors) -> Tensors:
        """Gradients with static shapes, which that of a table that only looks rows up has not."""
        pairs = zip(gradients, map(held_by, self.model.trainable_variables), strict=True)
        return [tf.ensure_shape(each, held.part_shape) if held and held.here else each for each, held in pairs]

    def gradients_of(self, forward: Forward) -> Tensors:
        """See `Core`. Sends the gradients of received tensors back to their workers."""
        trace = current_trace()
        assert trace is not None
        messages = trace.messages_of_worker()
        received = messages.received_tensors()
        sent, upstream = messages.upstream()
        sources = [*forward.params, *received]
        # The tape accepts every tensor once, but a tensor may be sent to several workers.
        targets, gradients = [forward.scaled], [tf.ones_like(forward.scaled)]
        for value, gradient in zip(sent, upstream, strict=True):
            known = next((place for place, each in enumerate(targets) if each is value), None)
            if known is None:
                targets.append(value)
                gradients.append(gradient)
            else:
                gradients[known] += gradient
        found = forward.tape.gradient(targets, sources, gradients)
        count = len(forward.params)
        messages.send_back(
            [
                tf.zeros_like(tensor) if gradient is None else tf.convert_to_tensor(gradient)
                for gradient, tensor in zip(found[count:], received, strict=True)
            ]
        )
        # Other workers know of weights that they have, too.
        elsewhere = [
            place for place, variable in enumerate(self.model.trainable_variables) if not _is_only_here(variable)
        ]
        devices = self.devices_of_weights()
        return self.unreached.dense(forward.params, range(count), found[:count], elsewhere, devices)

    def evaluate_with_outputs(self, params: Tensors, state: Tensors, batch: Batch) -> tuple[LocalSums, Any]:
        """See `Core`. The worker with the outputs counts the examples."""
        trace = current_trace()
        sums, outputs = super().evaluate_with_outputs(params, state, batch)
        if trace is None:
            return sums, outputs
        with tf.control_dependencies(trace.messages_of_worker().sent):
            sums = sums._replace(loss=tf.identity(sums.loss))
        return (sums, outputs) if trace.has_outputs else (sums._replace(count=tf.zeros([])), None)

    def predict(self, params: Tensors, state: Tensors, batch: Batch) -> Any:
        """See `Core`. Zeros on workers without the outputs."""
        trace = current_trace()
        outputs = super().predict(params, state, batch)
        if trace is None:
            return outputs
        with tf.control_dependencies(trace.messages_of_worker().sent):
            return tf.nest.map_structure(tf.identity, outputs)


class OverWorkersStep(PipelineStep):
    """A step of pipelines over several workers.

    Args:
      pipeline: The stages and their devices.
      places: The place of each trainable variable on this worker.
      *args: See `TrainStep`.
      **kwargs: See `TrainStep`.
    """

    def __init__(self, pipeline: Pipeline, places: Sequence[int], *args: Any, **kwargs: Any) -> None:
        assert pipeline.worker is not None
        self._worker: PipelineWorker = pipeline.worker
        super().__init__(pipeline, places, *args, **kwargs)

    def counted_weights(self) -> Tensors:
        """See `TrainStep`."""
        return [variable.value.read_value() for variable in self.core.model.trainable_variables if _counts(variable)]

    def sum_over_parts(self, value: tf.Tensor) -> tf.Tensor:
        """See `TrainStep`."""
        return super().sum_over_parts(self._sum(value))

    def _replica_number(self, context: tf.distribute.ReplicaContext) -> tf.Tensor:
        return tf.convert_to_tensor(context.replica_id_in_sync_group) // self._worker.peers.size

    def _may_have_zeros(self, trace: Trace) -> bool:
        # Other workers send zeros back for outputs that the loss does not read.
        return super()._may_have_zeros(trace) or len(self.core.model.outputs) > 1

    def _total_denominators(self, params: Tensors, state: Tensors, batch: Any) -> tf.Tensor:
        # If they depend only on examples and masks, every worker can find them by itself: TensorFlow prunes everything
        # else, and with it the weights of other workers.
        model = self.core.model
        with self._pipeline.on_no_device(), as_if_here(model):
            self._check_denominators(batch)
            params, state = (
                [value if _is_here(variable) else zeros_like(variable) for variable, value in zip(*pair, strict=True)]
                for pair in ((model.trainable_variables, params), (model.non_trainable_variables, state))
            )
            own = self.core.denominators(params, state, batch)
        return self.exchange.sum_vector(own)

    def _check_denominators(self, batch: Any) -> None:
        """Refuses denominators that depend on weights, which not all workers of the pipeline have.

        Raises:
          ConfigError: They do, for example through a mask that a layer computes.
        """
        model, terms = self.core.model, self.core.objective.totals.terms

        def trace(*parts: tf.Tensor) -> None:
            params, state = (
                [zeros_like(variable) for variable in variables]
                for variables in (model.trainable_variables, model.non_trainable_variables)
            )
            with drawing():
                sums = self.core.objective(params, state, tf.nest.pack_sequence_as(batch, parts), training=False)
            weights = {value.ref() for value in params}
            if any(depends_on(value, weights) for value in (sums.count, *sums.metrics[1 : 2 * terms : 2])):
                raise ConfigError(
                    "--mesh: the losses of this model are divided by different numbers, at least one of which depends "
                    "on weights, for example through a mask that a layer computes. A pipeline over several workers "
                    "cannot do that. Use one loss, or a pipeline within a worker."
                )

        specs = [tf.TensorSpec(part.shape[1:], part.dtype) for part in tf.nest.flatten(batch)]
        tf.function(trace, autograph=False).get_concrete_function(*specs)

    def _norm_by_place(self, gradients: Tensors) -> tf.Tensor:
        """The norm over all workers of the replica, the same bits on each."""
        by_place: dict[int, Tensors] = {}
        for variable, gradient in zip(self.core.model.trainable_variables, gradients, strict=True):
            if _counts(variable):
                by_place.setdefault(place_of(variable) or 0, []).append(gradient)
        squares = [tf.zeros([], tf.float64)]
        for place, own in by_place.items():
            with tf.device(self._pipeline.devices.of_replica(0)[place]):
                squares.append(squared_norm(own))
        return tf.cast(tf.sqrt(self._sum(sum_of_scalars(squares))), tf.float32)

    def _norm_if_needed(self, gradients: Tensors, wants_norm: tf.Tensor | None) -> tf.Tensor:
        del wants_norm  # a collective in one branch would need one in the other
        return self._norm_by_place(gradients)

    def _flagged(self, packed: tf.Tensor, norm: tf.Tensor) -> tf.Tensor:
        """See `TrainStep`. All workers must decide the same, but the last one alone may have a loss that is not finite
        while gradients are, and knows what the loss is divided by."""
        vector = super()._flagged(packed, norm)
        divisor = self.sidecar.denominator
        decisive = [sidecar.NON_FINITE] if divisor == sidecar.COUNT else [sidecar.NON_FINITE, divisor]
        flag, *divisors = tf.unstack(self._sum(tf.gather(vector, decisive)))
        vector = tf.concat([tf.minimum(flag, 1.0)[None], vector[sidecar.COUNT :]], axis=0)
        return tf.tensor_scatter_nd_update(vector, [[divisor]], divisors) if divisors else vector

    def _reported(self, vector: tf.Tensor) -> tf.Tensor:
        """The sidecar with loss and metrics of all stages of the replica. Flag, count and what the loss is divided by
        are the same on each."""
        length, divisor = self.sidecar.report_length, self.sidecar.denominator
        totals = self._sum(vector[sidecar.LOSS : length])
        vector = tf.concat([vector[: sidecar.LOSS], totals, vector[length:]], axis=0)
        if divisor == sidecar.COUNT:
            return vector
        return tf.tensor_scatter_nd_update(vector, [[divisor]], [vector[divisor] / self._worker.peers.size])

    def _sum(self, value: tf.Tensor) -> tf.Tensor:
        """The sum over the workers with the stages of the replica; the same bits on each."""
        with tf.device(self._pipeline.devices.host):
            return self._worker.all_reduce(value)


class DividedOverWorkersStep(OverWorkersStep, DividedStep):
    """A step of pipelines over several workers, whose devices divide the layers of the stages.

    Args:
      pipeline: The stages and their devices.
      places: The place of each trainable variable on this worker.
      *args: See `DividedStep`.
      **kwargs: See `DividedStep`.
    """

    def counted_weights(self) -> Tensors:
        """See `TrainStep`."""
        return self._own_weights()

    def _replica_number(self, context: tf.distribute.ReplicaContext) -> tf.Tensor:
        return super()._replica_number(context) // self._axis.size

    def _counts_here(self, variable: keras.Variable) -> bool:
        return _counts(variable)

    def _norm_by_place(self, gradients: Tensors) -> tf.Tensor:
        """The norm over all devices of the replica, the same bits on each."""
        squares = self._sum(sum_of_scalars([tf.zeros([], tf.float64), *self._squares(gradients)]))
        return tf.cast(tf.sqrt(squares), tf.float32)


def _traced(order: Sequence[Turn]) -> list[tuple[str, int]]:
    """The order in which passes of all chunks of a worker are traced.

    With one chunk it is the order in which they run, which TensorFlow keeps among stateful operations anyway. All
    chunks of a micro-batch are traced in one call of the model.
    """
    several = any(chunk for _, _, chunk in order)
    passes = list(dict.fromkeys((turn, number) for turn, number, _ in order))
    return sorted(passes, key=lambda one: (one[0] == BACKWARD, one[1])) if several else passes


def _is_here(variable: keras.Variable) -> bool:
    held = held_by(variable)
    return held is None or held.here


def _is_only_here(variable: keras.Variable) -> bool:
    held = held_by(variable)
    return held is None or (held.here and len(held.ranks) == 1)


def _counts(variable: Any) -> bool:
    held = held_by(variable)
    return held is None or held.counts_here

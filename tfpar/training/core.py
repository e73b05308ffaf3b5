"""Loss and gradients as a pure function.

Nothing here reads or assigns a variable, calls a collective or depends on a strategy: weights and state are tensor
arguments and results. That is why the same function runs under XLA, inside `strategy.run` of every strategy, on weights
sharded by DTensor, and on a stage of a pipeline.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from tfpar import precision
from tfpar.models import example_weights, uses_synchronized_statistics
from tfpar.optim.keras_draws import drawing
from tfpar.training.model.call import call_model, check_agreement, recording
from tfpar.training.model.unreached import Unreached
from tfpar.training.objective import Batch, Forward, LocalSums, Objective, ObjectiveSums, Tensors
from tfpar.training.objective import metrics as additive_metrics
from tfpar.training.objective.given import check_sums
from tfpar.training.seeds import fold_in, with_seed_states

import keras
import tensorflow as tf


@dataclasses.dataclass(frozen=True, eq=False)
class Core:
    """A model and its objective as pure functions.

    Attributes:
      model: A built Keras model.
      objective: The objective; `SupervisedObjective` for a loss on the model's outputs.
      augmentation: Keras layer applied to `x` in training, or None. Its only state is seed generators.
      model_metrics: Metrics that the model itself updates in its forward pass, see `model.own_metrics`.
      replicas: Replicas of the strategy. Where there are several, they must agree on the weights that a forward pass
        assigns.
      unrolls: Whether the loop over micro-batches is unrolled, because devices communicate within the model's layers.
      unreached: The trainable weights without a gradient, known once a backward pass was traced.
    """

    model: keras.Model
    objective: Objective
    augmentation: keras.layers.Layer | None = None
    model_metrics: Sequence[keras.metrics.Metric] = ()
    replicas: int = 1
    unrolls: bool = False
    unreached: Unreached = dataclasses.field(default_factory=Unreached)
    in_turn: ClassVar[bool] = True  # whether a micro-batch of an unrolled loop waits for the gradients of the previous

    def loss_and_grads(
        self,
        params: Tensors,
        state: Tensors,
        batch: Batch,
        seed: tf.Tensor,
        loss_scale: tf.Tensor | None,
        scales: tf.Tensor | None = None,
    ) -> LocalSums:
        """Weighted loss sum of one micro-batch and its gradient.

        Args:
          params: Values of `model.trainable_variables`, float32.
          state: Values of `model.non_trainable_variables`. Seed-generator states among them, and that of Keras'
            generator for draws without a seed, are replaced by ones derived from `seed`, so that randomness depends on
            `seed` alone.
          batch: `(x, y, weight)`: x `[m, ...]`, y `[m, ...]`, weight float32 `[m]`; padding has weight 0.
          seed: Int32 `[2]`, different for every (run, step, replica, micro-batch).
          loss_scale: Float32 scalar that the loss is multiplied by before the backward pass, or None for no scaling.
          scales: Factors of the loss terms, from `scales`, where the objective needs them.

        Returns:
          The sums; `gradients` still carry the loss scale. They are dense, even for embeddings: this is one XLA
          program, whose shapes are static, while the number of rows that a batch touches is not; and micro-batches add
          up in dense buffers. (`exchange/algorithms/sparse_rows.py` sends rows of gradients that are IndexedSlices.)
        """
        return self.backward(self.forward(params, state, batch, seed, loss_scale, scales))

    def forward(
        self,
        params: Tensors,
        state: Tensors,
        batch: Batch,
        seed: tf.Tensor,
        loss_scale: tf.Tensor | None,
        scales: tf.Tensor | None = None,
    ) -> Forward:
        """The forward pass of `loss_and_grads`, with the same arguments."""
        x, y, weight = batch
        state = with_seed_states(self.model.non_trainable_variables, state, seed, salt=0)
        if self.augmentation is not None:
            variables = self.augmentation.non_trainable_variables
            seeds = with_seed_states(variables, [None] * len(variables), seed, salt=1)
            with drawing(fold_in(seed, 2)):
                x, _ = self.augmentation.stateless_call([], seeds, x, training=True)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(params)
            with drawing(self.draw_seed(seed)), example_weights(weight), recording(tape, self.model_metrics) as record:
                sums = self.sums_of(params, state, (x, y, weight), training=True, scales=scales)
            # Float8 layers also keep statistics of gradients. These are the gradients of a mean, as in `fit`.
            divided = loss_scale is not None or bool(self.overwritten)
            scale = 1.0 if loss_scale is None else loss_scale
            divisor = precision.loss_divisor(weight, counted=bool(self.overwritten)) if divided else None
            scaled = sums.loss if divisor is None else sums.loss * (scale / divisor)
        if self.replicas > 1:
            check_agreement(self.model, record, (*tf.nest.flatten(batch), seed), state, sums.state)
        return Forward(tape, params, record, sums, scaled, divisor)

    def draw_seed(self, seed: tf.Tensor) -> tf.Tensor:
        """The seed of what the model and its loss draw without a seed of their own, from that of a micro-batch."""
        return fold_in(seed, 3)

    def sums_of(
        self, params: Tensors, state: Tensors, batch: Batch, *, training: bool, scales: tf.Tensor | None = None
    ) -> ObjectiveSums:
        """The objective's sums for a micro-batch; see `Objective`."""
        given = {} if scales is None else {"scales": scales}  # only an objective that needs scales must take them
        return check_sums(self.objective(params, state, batch, training=training, **given), self.objective)

    def backward(self, forward: Forward) -> LocalSums:
        """The backward pass of `loss_and_grads`."""
        _, _, record, sums, _, divisor = forward
        gradients = self.gradients_of(forward)
        overwritten = [gradients[place] for place in self.overwritten]
        for place, value in zip(self.overwritten, overwritten, strict=True):
            gradients[place] = tf.zeros_like(value)
        if divisor is not None:
            gradients = self.each(gradients, lambda gradient: gradient * divisor)
        gradients = self.each(gradients, lambda gradient: tf.cast(gradient, tf.float32))
        metrics = [*sums.metrics, *_of_examples(record.float_sums, sums.count)]
        return LocalSums(sums.loss, sums.count, gradients, sums.state, metrics, record.assigned, overwritten)

    def gradients_of(self, forward: Forward) -> Tensors:
        """Dense gradients of a scaled loss; for a weight that the forward pass assigns, the sum over all its values."""
        leaves = [leaf for _, leaf in forward.record.leaves]
        sources = [*forward.params, *leaves]
        found = forward.tape.gradient(forward.scaled, sources)
        places = [*range(len(forward.params)), *(place for place, _ in forward.record.leaves)]
        return self.unreached.dense(forward.params, places, found, devices=self.devices_of_weights())

    def devices_of_weights(self) -> Sequence[str]:
        """The names of the devices of the trainable weights; empty if all are on one."""
        return ()

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
        """`loss_and_grads` summed over the micro-batches of a step, in float32.

        Args:
          params: As for `loss_and_grads`.
          state: As for `loss_and_grads`; each micro-batch starts from the state after the previous one.
          batch: `(x, y, weight)` with a leading micro-batch axis: `[A, m, ...]`, weight `[A, m]`.
          seed: Int32 `[2]`; micro-batch `a` uses `seed` folded with `a`.
          loss_scale: As for `loss_and_grads`.
          scales: As for `loss_and_grads`; the same for all micro-batches of the step.
          reduce: `(number, gradients)` of a micro-batch to the tensors that are summed in place of its gradients.
        """
        accumulate_steps = batch[2].shape[0]

        def one(index: Any, current: Tensors, assigned: Mapping[int, tf.Tensor]) -> LocalSums:
            micro_batch = tf.nest.map_structure(lambda part: part[index], batch)
            weights = [assigned.get(place, param) for place, param in enumerate(params)]
            sums = self.loss_and_grads(weights, current, micro_batch, fold_in(seed, index), loss_scale, scales)
            return sums._replace(gradients=reduce(index, sums.gradients)) if reduce else sums

        if accumulate_steps == 1 or self.unrolls or reduce or uses_synchronized_statistics(self.model):
            # A reduction between replicas inside the forward pass cannot run in a while loop (TensorFlow 2.21,
            # MirroredStrategy's merge_call), so there the loop over micro-batches is unrolled.
            total = one(0, state, {})
            for index in range(1, accumulate_steps):
                with tf.control_dependencies(total.gradients if self.in_turn else []):
                    total = self.added(total, one(index, total.state, total.assigned))
            return total

        assigned: dict[int, tf.Tensor] = {}
        while True:
            try:
                return self._accumulate_in_loop(accumulate_steps, one, params, state, assigned)
            except _NewlyAssignedError as found:
                # These variables are known only after the body was traced, so it is traced again with them in the loop.
                assigned = {place: params[place] for place in sorted({*assigned, *found.places})}

    def _accumulate_in_loop(
        self,
        accumulate_steps: int,
        one: Callable[[Any, Tensors, Mapping[int, tf.Tensor]], LocalSums],
        params: Tensors,
        state: Tensors,
        assigned: dict[int, tf.Tensor],
    ) -> LocalSums:
        """The sum over the micro-batches, in a while loop.

        Args:
          accumulate_steps: Micro-batches.
          one: `(index, state, assigned weights) -> sums` of one micro-batch.
          params: As for `loss_and_grads`.
          state: As for `loss_and_grads`.
          assigned: The weights that the forward pass assigns, with the values that they have before.

        Raises:
          _NewlyAssignedError: The forward pass assigns others too.
        """

        def body(index: tf.Tensor, total: LocalSums) -> tuple[tf.Tensor, LocalSums]:
            sums = one(index, total.state, total.assigned)
            if sums.assigned.keys() - assigned.keys():
                raise _NewlyAssignedError(sums.assigned)
            return index + 1, self.added(total, sums)

        zeros = LocalSums(
            loss=tf.zeros([]),
            count=tf.zeros([]),
            gradients=[tf.zeros(param.shape, tf.float32) for param in params],
            state=[tf.convert_to_tensor(value) for value in state],
            metrics=[tf.zeros(variable.shape, tf.float32) for variable in self.metric_variables],
            assigned=assigned,
            overwritten=[tf.zeros(params[place].shape, params[place].dtype) for place in self.overwritten],
        )
        _, total = tf.while_loop(
            lambda index, _: index < accumulate_steps, body, (tf.constant(0), zeros), parallel_iterations=1
        )
        return total

    def each(self, tensors: Tensors, function: Callable[[tf.Tensor], tf.Tensor]) -> Tensors:
        """A function of each gradient."""
        return [*map(function, tensors)]

    def added(self, total: LocalSums, sums: LocalSums) -> LocalSums:
        """Adds a micro-batch. The last values of the model's state and of assigned weights are kept."""
        parts = (each._replace(state=[], assigned={}, overwritten=[]) for each in (total, sums))
        added = tf.nest.map_structure(tf.add, *parts)
        overwritten = [*map(tf.maximum, total.overwritten, sums.overwritten)]
        return added._replace(state=sums.state, assigned={**total.assigned, **sums.assigned}, overwritten=overwritten)

    def accumulate_alone(self, params: Tensors, state: Tensors, batch: Batch, seed: tf.Tensor) -> LocalSums:
        """`accumulate` without a loss scale, for a step to which no other replica contributes, as in asynchronous
        training.

        Args:
          params: As for `loss_and_grads`.
          state: As for `accumulate`.
          batch: As for `accumulate`.
          seed: As for `accumulate`.
        """
        totals = self.objective.totals
        scales = totals.scales(self.denominators(params, state, batch)) if totals.needs_scales else None
        return self.accumulate(params, state, batch, seed, None, scales)

    def evaluate(self, params: Tensors, state: Tensors, batch: Batch) -> LocalSums:
        """Weighted loss sum and metric sums in inference mode, without gradients.

        Args:
          params: As for `loss_and_grads`.
          state: As for `loss_and_grads`; not changed.
          batch: `(x, y, weight)` with a leading axis of one micro-batch.
        """
        return self.evaluate_with_outputs(params, state, batch)[0]

    def evaluate_with_outputs(self, params: Tensors, state: Tensors, batch: Batch) -> tuple[LocalSums, Any]:
        """`evaluate`, and the model's outputs `[m, ...]`, in its structure."""
        with drawing(), recording(metrics=self.model_metrics) as record:
            sums = self.sums_of(params, state, tf.nest.map_structure(lambda part: part[0], batch), training=False)
        metrics = [*sums.metrics, *_of_examples(record.float_sums, sums.count)]
        return LocalSums(sums.loss, sums.count, [], [], metrics, {}, []), record.outputs

    @property
    def overwritten(self) -> list[int]:
        """Indices of the trainable variables whose gradient is their new value (`Variable.overwrite_with_gradient`).

        They are the scales and maxima of float8 layers (Keras 3.15). Their gradients are not exchanged: replicas take
        the mean of the new values, weighted by examples, and micro-batches take the maximum, as Keras does.
        """
        variables = enumerate(self.model.trainable_variables)
        return [place for place, variable in variables if variable.overwrite_with_gradient]

    @property
    def traveling_variables(self) -> list[keras.Variable]:
        """The variables that replicas average besides gradients: the model's state, and the overwritten variables."""
        trainable = self.model.trainable_variables
        return [*self.model.non_trainable_variables, *(trainable[place] for place in self.overwritten)]

    def predict(self, params: Tensors, state: Tensors, batch: Batch) -> Any:
        """The model's outputs in inference mode.

        Args:
          params: As for `loss_and_grads`.
          state: As for `loss_and_grads`; not changed.
          batch: `(x, y, weight)` with a leading axis of one micro-batch; y and weight are not read.

        Returns:
          Tensors `[m, ...]` in the structure of the model's outputs; float32 where the model computes in 16 bits.
        """
        x = tf.nest.map_structure(lambda part: part[0], batch[0])
        outputs = call_model(self.model, params, state, x, training=False).outputs
        half = (tf.float16, tf.bfloat16)
        return tf.nest.map_structure(lambda part: tf.cast(part, tf.float32) if part.dtype in half else part, outputs)

    def denominators(self, params: Tensors, state: Tensors, batch: Batch) -> tf.Tensor:
        """The denominators of the loss terms, summed over micro-batches: float32 `[1 + K]`, the count first.

        They depend only on data and masks. The rest of the model is not needed for them, and is not run.

        Args:
          params: As for `loss_and_grads`.
          state: As for `loss_and_grads`; not changed.
          batch: `(x, y, weight)` with a leading micro-batch axis, as for `accumulate`.
        """
        terms, micro_batches = self.objective.totals.terms, batch[2].shape[0]

        def added(index: Any, total: tf.Tensor) -> tf.Tensor:
            micro_batch = tf.nest.map_structure(lambda part: part[index], batch)
            with drawing():
                sums = self.objective(params, state, micro_batch, training=False)
            return total + tf.stack([sums.count, *sums.metrics[1 : 2 * terms : 2]])

        total = tf.zeros([1 + terms])
        if self.unrolls:
            for index in range(micro_batches):
                total = added(index, total)
            return total
        _, total = tf.while_loop(
            lambda index, _: index < micro_batches,
            lambda index, total: (index + 1, added(index, total)),
            (tf.constant(0), total),
        )
        return total

    def denominator(self, sums: LocalSums) -> tf.Tensor:
        """The divisor that turns loss and gradient sums of one replica into means: float32 scalar."""
        return sums.metrics[1] if self.objective.totals.own_denominator else sums.count

    @property
    def metric_variables(self) -> list[keras.Variable]:
        """The state of all metrics, in the order of `LocalSums.metrics`."""
        return [*self.objective.totals.variables, *additive_metrics.variables(self.model_metrics)]

    def metric_results(self, sums: Sequence[Any]) -> dict[str, Any]:
        """Metric values by name from summed metric state of training, arrays in the order of `metric_variables`."""
        size = len(self.objective.totals.variables)
        return self.objective.totals.results(sums[:size]) | self._model_metric_results(sums[size:])

    def evaluation_results(
        self,
        loss: Any,
        count: Any,
        sums: Sequence[Any],
        without: Sequence[str] = (),
        weighted_losses: Mapping[str, float] | None = None,
    ) -> dict[str, Any]:
        """`loss`, `examples` and metrics by name from the sums of an evaluation.

        Args:
          loss: Sum of `LocalSums.loss`.
          count: Sum of `LocalSums.count`. If it is 0, because all examples were skipped, the loss is NaN.
          sums: Sums of `LocalSums.metrics`.
          without: Names of metrics that the model updates itself, to leave out.
          weighted_losses: From `Totals.weighted_losses` of all batches, for losses that are not means over examples.
        """
        totals = self.objective.totals
        own, of_model = sums[: len(totals.variables)], sums[len(totals.variables) :]
        results = totals.evaluation(loss, count, own) if count else {"loss": math.nan} | totals.results(own)
        if count and weighted_losses:
            results |= {name: value / float(count) for name, value in weighted_losses.items()}
        first = {"loss": results["loss"], "examples": float(count)}
        return first | results | self._model_metric_results(of_model, without)

    def _model_metric_results(self, sums: Sequence[Any], without: Sequence[str] = ()) -> dict[str, Any]:
        """Values of the model's own metrics, without those that the model did not update in these calls."""
        metrics, state = additive_metrics.updated(self.model_metrics, sums)
        return additive_metrics.results({metric.name: metric for metric in metrics}, state, without)


class _NewlyAssignedError(Exception):
    """The forward pass assigns trainable variables that the loop over micro-batches does not carry yet."""

    def __init__(self, places: Iterable[int]) -> None:
        super().__init__()
        self.places = set(places)


def _of_examples(sums: Tensors, count: tf.Tensor) -> Tensors:
    """The sums of the model's own metrics, or zeros if no example counts, because a replica may get only padding.

    What a metric makes of padding, which is zeros, may be no number.
    """
    return [tf.where(count > 0.0, each, tf.zeros_like(each)) for each in sums]

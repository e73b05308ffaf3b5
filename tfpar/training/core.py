"""Loss and gradients as a pure function.

Nothing here reads or assigns a variable, calls a collective or knows a strategy: weights and state come in as
tensors and leave as tensors. That is why the same function runs under XLA, inside `strategy.run` of every
strategy, on weights sharded by DTensor, and on a stage of a pipeline.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from tfpar.models import example_weights, uses_synchronized_statistics
from tfpar.optim.keras_internals import is_seed_state
from tfpar.training.objective import Batch, Objective, Tensors

import keras
import tensorflow as tf


class LocalSums(NamedTuple):
    """What one replica contributes to a step. Sums, not means, so that contributions of any size add up.

    Attributes:
      loss: Float32 scalar: sum over examples of weight x loss.
      count: Float32 scalar: sum of the example weights.
      gradients: Float32, shaped like the parameters: gradient of `loss`, times the loss scale.
      state: The model's non-trainable variables after the micro-batches.
      metrics: Additive metric state gathered from these examples, a flat list over all metrics.
    """

    loss: tf.Tensor
    count: tf.Tensor
    gradients: Tensors
    state: Tensors
    metrics: Tensors


@dataclasses.dataclass(frozen=True, eq=False)
class Core:
    """A model and what it is trained for, seen as pure functions.

    Attributes:
      model: A built Keras model.
      objective: What is minimised; `SupervisedObjective` for a loss on the model's outputs.
      augmentation: Keras layer applied to `x` in training, or None. Its only state is seed generators.
    """

    model: keras.Model
    objective: Objective
    augmentation: keras.layers.Layer | None = None

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
          state: Values of `model.non_trainable_variables`. Seed-generator states among them are replaced by
            ones derived from `seed`, so that randomness depends on `seed` alone.
          batch: `(x, y, weight)`: x `[m, ...]`, y `[m, ...]`, weight float32 `[m]`; padding has weight 0.
          seed: Int32 `[2]`, different for every (run, step, replica, micro-batch).
          loss_scale: Float32 scalar that the loss is multiplied by before the backward pass, or None for none.
          scales: Factors of the loss terms, from `scales`, where the objective needs them.

        Returns:
          The sums; `gradients` still carry the loss scale. They are dense, those of embeddings too: this is one XLA
          program, whose shapes are static, while the number of rows that a batch touches is not; and micro-batches add
          up in dense buffers. (`exchange/algorithms/sparse_rows.py` sends rows of gradients that are IndexedSlices.)
        """
        x, y, weight = batch
        state = _seeded(self.model.non_trainable_variables, state, seed, salt=0)
        if self.augmentation is not None:
            variables = self.augmentation.non_trainable_variables
            seeds = _seeded(variables, [None] * len(variables), seed, salt=1)
            x, _ = self.augmentation.stateless_call([], seeds, x, training=True)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(params)
            with example_weights(weight):
                sums = self.objective(params, state, (x, y, weight), training=True, scales=scales)
            scaled = sums.loss if loss_scale is None else sums.loss * (loss_scale / _loss_divisor(weight))
        gradients = tape.gradient(scaled, params, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        if loss_scale is not None:
            gradients = [gradient * _loss_divisor(weight) for gradient in map(tf.convert_to_tensor, gradients)]
        gradients = [tf.cast(tf.convert_to_tensor(gradient), tf.float32) for gradient in gradients]
        return LocalSums(sums.loss, sums.count, gradients, sums.state, sums.metrics)

    def accumulate(
        self,
        params: Tensors,
        state: Tensors,
        batch: Batch,
        seed: tf.Tensor,
        loss_scale: tf.Tensor | None,
        scales: tf.Tensor | None = None,
    ) -> LocalSums:
        """`loss_and_grads` summed over the micro-batches of a step, in float32.

        Args:
          params: As for `loss_and_grads`.
          state: As for `loss_and_grads`; each micro-batch sees the state that the one before it left.
          batch: `(x, y, weight)` with a leading micro-batch axis: `[A, m, ...]`, weight `[A, m]`.
          seed: Int32 `[2]`; micro-batch `a` uses `seed` folded with `a`.
          loss_scale: As for `loss_and_grads`.
          scales: As for `loss_and_grads`; the same for all micro-batches of the step.
        """
        accumulate_steps = batch[2].shape[0]

        def one(index: Any, current: Tensors) -> LocalSums:
            micro_batch = tf.nest.map_structure(lambda part: part[index], batch)
            return self.loss_and_grads(params, current, micro_batch, _fold_in(seed, index), loss_scale, scales)

        def add(total: LocalSums, sums: LocalSums) -> LocalSums:
            added = tf.nest.map_structure(tf.add, total._replace(state=[]), sums._replace(state=[]))
            return added._replace(state=sums.state)

        if accumulate_steps == 1 or uses_synchronized_statistics(self.model):
            # A reduction between replicas inside the forward pass cannot run in a while loop (TensorFlow 2.21,
            # MirroredStrategy's merge_call), so there the micro-batches are laid out one after the other.
            total = one(0, state)
            for index in range(1, accumulate_steps):
                total = add(total, one(index, total.state))
            return total

        def body(index: tf.Tensor, total: LocalSums) -> tuple[tf.Tensor, LocalSums]:
            return index + 1, add(total, one(index, total.state))

        zeros = LocalSums(
            loss=tf.zeros([]),
            count=tf.zeros([]),
            gradients=[tf.zeros(param.shape, tf.float32) for param in params],
            state=[tf.convert_to_tensor(value) for value in state],
            metrics=[tf.zeros(variable.shape, tf.float32) for variable in self.metric_variables],
        )
        _, total = tf.while_loop(
            lambda index, _: index < accumulate_steps, body, (tf.constant(0), zeros), parallel_iterations=1
        )
        return total

    def accumulate_alone(self, params: Tensors, state: Tensors, batch: Batch, seed: tf.Tensor) -> LocalSums:
        """`accumulate` without loss scale where no other replica adds to the sums, as in an asynchronous step.

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
        sums = self.objective(params, state, tf.nest.map_structure(lambda part: part[0], batch), training=False)
        return LocalSums(sums.loss, sums.count, [], [], sums.metrics)

    def denominators(self, params: Tensors, state: Tensors, batch: Batch) -> tf.Tensor:
        """The numbers that loss terms are divided by, summed over micro-batches: float32 `[1 + K]`, the count first.

        They depend on data and masks alone. What else the model computes is not needed for them, and is not run.

        Args:
          params: As for `loss_and_grads`.
          state: As for `loss_and_grads`; not changed.
          batch: `(x, y, weight)` with a leading micro-batch axis, as for `accumulate`.
        """
        terms = self.objective.totals.terms

        def body(index: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            micro_batch = tf.nest.map_structure(lambda part: part[index], batch)
            sums = self.objective(params, state, micro_batch, training=False)
            return index + 1, total + tf.stack([sums.count, *sums.metrics[1 : 2 * terms : 2]])

        _, total = tf.while_loop(
            lambda index, _: index < batch[2].shape[0], body, (tf.constant(0), tf.zeros([1 + terms]))
        )
        return total

    def denominator(self, sums: LocalSums) -> tf.Tensor:
        """What the loss and the gradients of one replica's sums are divided by to be means: float32 scalar."""
        return sums.metrics[1] if self.objective.totals.own_denominator else sums.count

    @property
    def metric_variables(self) -> list[keras.Variable]:
        """The state of all metrics, in the order of `LocalSums.metrics`."""
        return list(self.objective.totals.variables)

    def metric_results(self, sums: Sequence[Any]) -> dict[str, float]:
        """Metric values by name from summed metric state of training, arrays in the order of `metric_variables`."""
        return self.objective.totals.results(sums)

    def evaluation_results(self, loss: Any, count: Any, sums: Sequence[Any]) -> dict[str, float]:
        """`loss`, `examples` and metrics by name from the sums of an evaluation.

        Args:
          loss: Sum of `LocalSums.loss`.
          count: Sum of `LocalSums.count`. Without any example, where all were skipped, there is no loss: it is NaN.
          sums: Sums of `LocalSums.metrics`.
        """
        totals = self.objective.totals
        results = totals.evaluation(loss, count, sums) if count else {"loss": math.nan} | totals.results(sums)
        return {"loss": results["loss"], "examples": float(count)} | results


def _seeded(variables: Sequence[keras.Variable], state: Sequence[Any], seed: tf.Tensor, *, salt: int) -> Tensors:
    """`state` with every seed-generator state drawn from `seed`."""
    positions = [index for index, variable in enumerate(variables) if is_seed_state(variable)]
    result = list(state)
    if positions:
        draws = tf.random.stateless_uniform(
            [len(positions), 2], _fold_in(seed, salt), minval=None, maxval=None, dtype=tf.int32, alg="philox"
        )
        for row, position in enumerate(positions):
            result[position] = tf.bitcast(draws[row], tf.uint32)
    return result


def _fold_in(seed: tf.Tensor, data: Any) -> tf.Tensor:
    return tf.random.fold_in(seed, data, alg="philox")


def _loss_divisor(weight: tf.Tensor) -> float:
    """Largest power of two up to the micro-batch size.

    Gradients are sums over examples, a micro-batch times larger than the means that loss scales are made for;
    dividing the float16 backward pass by this and multiplying afterwards is exact.
    """
    return float(1 << (int(weight.shape[0]).bit_length() - 1))

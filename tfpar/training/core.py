"""Loss and gradients as a pure function.

Nothing here reads or assigns a variable, calls a collective or knows a strategy: weights and state come in as
tensors and leave as tensors. That is why the same function runs under XLA, inside `strategy.run` of every
strategy, on weights sharded by DTensor, and on a stage of a pipeline.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tfpar.config import ConfigError
from tfpar.models import example_weights, uses_synchronized_statistics

import keras
import numpy as np
import tensorflow as tf
from keras.src.losses.loss import squeeze_or_expand_to_same_rank

Tensors = list[tf.Tensor]
Batch = tuple[Any, Any, tf.Tensor]


class LocalSums(NamedTuple):
    """What one replica contributes to an update. Sums, not means, so that contributions of any size add up.

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
    """The model, its loss and its metrics, seen as pure functions.

    Attributes:
      model: A built Keras model.
      loss: `loss(y, outputs)` -> loss per example (any trailing dims are averaged); see `per_example_loss`.
      metrics: Keras metrics whose state is a sum (all state zero after a reset), such as means and counts.
      augmentation: Keras layer applied to `x` in training, or None. Its only state is seed generators.
    """

    model: keras.Model
    loss: Callable[[Any, Any], tf.Tensor]
    metrics: Sequence[keras.metrics.Metric] = ()
    augmentation: keras.layers.Layer | None = None

    def loss_and_grads(
        self, params: Tensors, state: Tensors, batch: Batch, seed: tf.Tensor, loss_scale: tf.Tensor | None
    ) -> LocalSums:
        """Weighted loss sum of one micro-batch and its gradient.

        Args:
          params: Values of `model.trainable_variables`, float32.
          state: Values of `model.non_trainable_variables`. Seed-generator states among them are replaced by
            ones derived from `seed`, so that randomness depends on `seed` alone.
          batch: `(x, y, weight)`: x `[m, ...]`, y `[m, ...]`, weight float32 `[m]`; padding has weight 0.
          seed: Int32 `[2]`, different for every (run, step, replica, micro-batch).
          loss_scale: Float32 scalar that the loss is multiplied by before the backward pass, or None for none.

        Returns:
          The sums; `gradients` still carry the loss scale. They are dense, those of embeddings too: this is one XLA
          program, whose shapes are static, while the number of rows that a batch touches is not; and micro-batches add
          up in dense buffers. (`exchange/algorithms/sparse_rows.py` sends rows of gradients that are IndexedSlices.)
        """
        x, y, weight = batch
        state = self._seeded(self.model.non_trainable_variables, state, seed, salt=0)
        if self.augmentation is not None:
            variables = self.augmentation.non_trainable_variables
            x, _ = self.augmentation.stateless_call(
                [], self._seeded(variables, [None] * len(variables), seed, salt=1), x, training=True
            )
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(params)
            with example_weights(weight):
                outputs, new_state, extra = self.model.stateless_call(
                    params, state, x, training=True, return_losses=True
                )
            loss, count = self._weighted_loss(y, outputs, weight, extra)
            scaled = loss if loss_scale is None else loss * (loss_scale / _loss_divisor(weight))
        gradients = tape.gradient(scaled, params, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        if loss_scale is not None:
            gradients = [gradient * _loss_divisor(weight) for gradient in map(tf.convert_to_tensor, gradients)]
        gradients = [tf.cast(tf.convert_to_tensor(gradient), tf.float32) for gradient in gradients]
        return LocalSums(loss, count, gradients, list(new_state), self._metric_sums(y, outputs, weight))

    def accumulate(
        self, params: Tensors, state: Tensors, batch: Batch, seed: tf.Tensor, loss_scale: tf.Tensor | None
    ) -> LocalSums:
        """`loss_and_grads` summed over the micro-batches of an update, in float32.

        Args:
          params: As for `loss_and_grads`.
          state: As for `loss_and_grads`; each micro-batch sees the state that the one before it left.
          batch: `(x, y, weight)` with a leading micro-batch axis: `[A, m, ...]`, weight `[A, m]`.
          seed: Int32 `[2]`; micro-batch `a` uses `seed` folded with `a`.
          loss_scale: As for `loss_and_grads`.
        """
        accumulate_steps = batch[2].shape[0]

        def one(index: Any, current: Tensors) -> LocalSums:
            micro_batch = tf.nest.map_structure(lambda part: part[index], batch)
            return self.loss_and_grads(params, current, micro_batch, _fold_in(seed, index), loss_scale)

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

    def evaluate(self, params: Tensors, state: Tensors, batch: Batch) -> LocalSums:
        """Weighted loss sum and metric sums in inference mode, without gradients.

        Args:
          params: As for `loss_and_grads`.
          state: As for `loss_and_grads`; returned unchanged.
          batch: `(x, y, weight)` with a leading axis of one micro-batch.
        """
        x, y, weight = tf.nest.map_structure(lambda part: part[0], batch)
        outputs, _, extra = self.model.stateless_call(params, state, x, training=False, return_losses=True)
        loss, count = self._weighted_loss(y, outputs, weight, extra)
        return LocalSums(loss, count, [], [], self._metric_sums(y, outputs, weight))

    @property
    def metric_variables(self) -> list[keras.Variable]:
        """The state of all metrics, in the order of `LocalSums.metrics`."""
        return [variable for metric in self.metrics for variable in metric.variables]

    def metric_results(self, sums: Sequence[Any]) -> dict[str, float]:
        """Metric values from summed metric state.

        Args:
          sums: Arrays in the order of `metric_variables`.

        Returns:
          Value by metric name. A metric with several values gives one entry `name/key` each, a vector `name/0` and so
          on.
        """
        results: dict[str, float] = {}
        position = 0
        for metric in self.metrics:
            values = [
                tf.cast(value, variable.dtype)
                for variable, value in zip(
                    metric.variables, sums[position : position + len(metric.variables)], strict=True
                )
            ]
            position += len(metric.variables)
            value = metric.stateless_result(values)
            parts = value if isinstance(value, dict) else {"": value}
            for key, part in parts.items():
                name, flat = f"{metric.name}/{key}" if key else metric.name, np.ravel(part)
                if np.ndim(part) == 0:
                    results[name] = float(flat[0])
                else:
                    results |= {f"{name}/{place}": float(number) for place, number in enumerate(flat)}
        return results

    def _weighted_loss(
        self, y: Any, outputs: Any, weight: tf.Tensor, extra: Sequence[tf.Tensor]
    ) -> tuple[tf.Tensor, tf.Tensor]:
        if any(getattr(output, "_keras_mask", None) is not None for output in tf.nest.flatten(outputs)):
            raise ConfigError(
                f"the outputs of model {self.model.name!r} carry a mask (mask_zero=True, Masking), which would have to "
                "count in the loss: here it goes by examples, each with the mean over all its positions. Leave the "
                "mask out and give a loss (y, outputs) -> [m] that takes its own mean over the positions that count."
            )
        values = tf.cast(self.loss(y, outputs), tf.float32)
        if values.shape.rank is None or values.shape.rank < 1:
            raise ConfigError(
                f"the loss returned a value of shape {values.shape}: it must keep one value per example (Keras losses: "
                "reduction=None), because uneven batches are weighted by example."
            )
        if not values.shape[:1].is_compatible_with(weight.shape):
            raise ConfigError(
                f"the loss returned {values.shape[0]} values for {weight.shape[0]} examples; it must keep one for each."
            )
        if values.shape.rank > 1:
            values = tf.reduce_mean(values, axis=list(range(1, values.shape.rank)))
        count = tf.reduce_sum(weight)
        # A padded example repeats a real one, so its loss is finite unless the real one's is not: 0 x NaN stays NaN.
        loss = tf.reduce_sum(values * weight)
        if extra:  # add_loss and regularisers are per batch: times the count, they survive the division once.
            loss += count * tf.add_n([tf.cast(tf.reduce_sum(value), tf.float32) for value in extra])
        return loss, count

    def _metric_sums(self, y: Any, outputs: Any, weight: tf.Tensor) -> Tensors:
        sums: Tensors = []
        for metric in self.metrics:
            zeros = [tf.zeros(variable.shape, variable.dtype) for variable in metric.variables]
            updated = metric.stateless_update_state(zeros, y, outputs, sample_weight=weight)
            sums += [tf.cast(value, tf.float32) for value in updated]
        return sums

    @staticmethod
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


def frozen_weights(model: keras.Model) -> list[keras.Variable]:
    """Weights made to learn, of layers with `trainable=False`: among the model's non-trainable variables, but no state.

    Keras 3.15 tells them apart in private only: a layer's `_trainable_variables` are those made to learn.
    """
    learning = {id(variable) for variable in model.trainable_variables}
    made = [variable for layer in model._flatten_layers() for variable in layer._trainable_variables]
    return [variable for variable in made if id(variable) not in learning]


def is_seed_state(variable: keras.Variable) -> bool:
    """Whether this is the state of a `keras.random.SeedGenerator` (Keras 3: uint32 `[2]` of that name)."""
    return variable.name == "seed_generator_state" and tuple(variable.shape) == (2,)


def per_example_loss(loss: Any) -> Callable[[Any, Any], tf.Tensor]:
    """Turns what Keras accepts as a loss into a function that keeps one value per example.

    Args:
      loss: A Keras loss, its name, or a function `(y, outputs) -> values [m, ...]`.

    Raises:
      ConfigError: A name Keras does not know.
    """
    try:
        resolved = keras.losses.get(loss)
    except ValueError as error:
        raise ConfigError(f"loss={loss!r} is not known to Keras: {error}") from error
    if resolved is None or not callable(resolved):
        raise ConfigError(f"loss={loss!r} is not a loss: give a Keras loss, its name, or a function (y, outputs).")
    if isinstance(resolved, keras.losses.Loss) and resolved.get_config().get("ignore_class") is not None:
        raise ConfigError(
            "loss: ignore_class would count positions, while here examples are what is weighted, each with the mean "
            "over all its positions. Give a loss (y, outputs) -> [m] that takes its own mean over those that count."
        )
    function = resolved.call if isinstance(resolved, keras.losses.Loss) else functools.partial(_aligned, resolved)
    # Losses are computed in float32 whatever the model computes in.
    return lambda y, outputs: function(y, tf.nest.map_structure(lambda part: tf.cast(part, tf.float32), outputs))


def _aligned(function: Callable[[Any, Any], tf.Tensor], y: Any, outputs: Any) -> tf.Tensor:
    """Calls a loss function as Keras' `compile` does: labels `[m]` and outputs `[m, 1]` (or the other way) alike."""
    if isinstance(y, tf.Tensor) and isinstance(outputs, tf.Tensor):
        y, outputs = squeeze_or_expand_to_same_rank(y, outputs)
    return function(y, outputs)


def takes_class_numbers(loss: Any) -> bool:
    """Whether a loss reads labels as positions in the last dim of the outputs, every one of them.

    Args:
      loss: As for `per_example_loss`.
    """
    resolved = keras.losses.get(loss)
    if isinstance(resolved, keras.losses.SparseCategoricalCrossentropy):
        return resolved.get_config().get("axis", -1) == -1
    return resolved is keras.losses.sparse_categorical_crossentropy


def build_metrics(
    metrics: Sequence[Any], loss: Any = None, output_shape: Sequence[int | None] | None = None
) -> list[keras.metrics.Metric]:
    """Keras metrics from names, instances or functions, checked to be additive.

    Args:
      metrics: Names (`"sparse_categorical_accuracy"`), metric instances, or functions `(y, outputs) -> [m]`.
        `"accuracy"` is the accuracy that belongs to the loss, as in Keras' `compile`.
      loss: As for `per_example_loss`; tells what `"accuracy"` is.
      output_shape: Shape of the model's only output, for metrics such as `F1Score` that make their state when they
        first see outputs; None where it is not known.

    Raises:
      ConfigError: A metric whose state is not a sum, an unknown name, or one name for two.
    """
    built: list[keras.metrics.Metric] = []
    for item in metrics:
        try:
            metric = accuracy(loss) if item == "accuracy" else keras.metrics.get(item)
        except ValueError as error:
            raise ConfigError(f"metrics: {item!r} is not known to Keras: {error}") from error
        if not isinstance(metric, keras.metrics.Metric):
            metric = keras.metrics.MeanMetricWrapper(metric, name=getattr(metric, "__name__", "metric"))
        if not metric.variables:
            _make_state(metric, output_shape)
        if any(bool(keras.ops.any(variable != 0)) for variable in metric.variables):
            raise ConfigError(
                f"metrics: the state of {metric.name!r} does not start at zero, so it is no sum over examples and "
                "cannot be combined across replicas. Use a metric that counts or averages."
            )
        if any(metric.name == other.name for other in built):
            raise ConfigError(f"metrics: two are called {metric.name!r}. Give one of them another name=....")
        built.append(metric)
    return built


def _make_state(metric: keras.metrics.Metric, output_shape: Sequence[int | None] | None) -> None:
    """Lets a metric make the state that it makes for the first outputs it sees."""
    try:
        if not output_shape or not all(isinstance(size, int) for size in output_shape[1:]):
            raise ValueError(f"the model's outputs have no shape that is known (found {output_shape})")
        seen = tf.zeros([1, *output_shape[1:]])
        metric.update_state(seen, seen)
        metric.reset_state()
    except (ValueError, TypeError, tf.errors.InvalidArgumentError) as error:
        raise ConfigError(
            f"metrics: {metric.name!r} makes its state from the outputs it sees, which fails for this model: {error}"
        ) from error


def accuracy(loss: Any) -> keras.metrics.Metric:
    """The accuracy that belongs to a cross-entropy, named `accuracy`.

    Args:
      loss: As for `per_example_loss`.

    Raises:
      ConfigError: The loss is none of Keras' cross-entropies.
    """
    resolved = keras.losses.get(loss)
    kind = getattr(resolved, "__name__", type(resolved).__name__).replace("_", "").lower()
    if kind == "sparsecategoricalcrossentropy":
        return keras.metrics.SparseCategoricalAccuracy(name="accuracy")
    if kind == "categoricalcrossentropy":
        return keras.metrics.CategoricalAccuracy(name="accuracy")
    if kind == "binarycrossentropy":
        logits = isinstance(resolved, keras.losses.Loss) and resolved.get_config().get("from_logits")
        return keras.metrics.BinaryAccuracy(name="accuracy", threshold=0.0 if logits else 0.5)
    raise ConfigError(
        f"metrics: what 'accuracy' is cannot be told from loss={loss!r}. Name one of Keras' metrics, e.g. "
        "'sparse_categorical_accuracy' for labels that are numbers of classes."
    )


def _fold_in(seed: tf.Tensor, data: Any) -> tf.Tensor:
    return tf.random.fold_in(seed, data, alg="philox")


def _loss_divisor(weight: tf.Tensor) -> float:
    """Largest power of two up to the micro-batch size.

    Gradients are sums over examples, a micro-batch times larger than the means that loss scales are made for;
    dividing the float16 backward pass by this and multiplying afterwards is exact.
    """
    return float(1 << (int(weight.shape[0]).bit_length() - 1))

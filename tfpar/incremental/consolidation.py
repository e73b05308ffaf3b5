"""Elastic weight consolidation (Kirkpatrick et al. 2017, Overcoming catastrophic forgetting in neural networks).

After each task, every weight has a value θ* and a diagonal Fisher information F, which measures how much the outputs
depend on the weight. Later tasks add λ/2 Σ F (θ - θ*)² to the loss for every earlier task (equation 3). The sum of
these parabolas is one parabola, for which two arrays per weight are stored: Σ F and Σ F θ*.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence

from tfpar.checkpoint.arrays import read_arrays, write_arrays
from tfpar.inputs.bad_records import fetch_with_mask
from tfpar.inputs.source import Source
from tfpar.training.model.call import call_model

import keras
import numpy as np
import tensorflow as tf


class Consolidation:
    """The sum of the parabolas of all earlier tasks.

    Args:
      information: Σ F of each trainable weight, float32.
      pulls: Σ F θ* of each trainable weight, float32.
    """

    def __init__(self, information: Sequence[np.ndarray], pulls: Sequence[np.ndarray]) -> None:
        self.information, self.pulls = list(information), list(pulls)

    def with_task(self, information: Sequence[np.ndarray], weights: Sequence[np.ndarray]) -> Consolidation:
        """Returns this sum with another task added.

        Args:
          information: F of the task.
          weights: The weights after the task, θ*. If the head has grown, the earlier sums are zero for the new weights.
        """
        pulls = [each * weight for each, weight in zip(information, weights, strict=True)]
        if not self.information:
            return Consolidation(information, pulls)
        return Consolidation(
            [padded(old, new.shape) + new for old, new in zip(self.information, information, strict=True)],
            [padded(old, new.shape) + new for old, new in zip(self.pulls, pulls, strict=True)],
        )

    def hold(self, model: keras.Model, strength: float) -> None:
        """Adds the penalty to a model's losses, in the form of weight regularizers.

        Args:
          model: A model with its weights in the same order; new weights of a grown head are not penalised.
          strength: λ.
        """
        for place, weight in enumerate(model.trainable_variables if self.information else ()):
            information = padded(self.information[place], tuple(weight.shape))
            pull = padded(self.pulls[place], tuple(weight.shape))
            anchor = np.divide(pull, information, out=np.zeros_like(pull), where=information > 0.0)
            weight.regularizer = Penalty(information, anchor, strength, weight.regularizer)

    def save(self, path: pathlib.Path) -> None:
        """Writes the sum to a file, atomically."""
        named = {f"information/{place}": each for place, each in enumerate(self.information)}
        named |= {f"pull/{place}": each for place, each in enumerate(self.pulls)}
        temporary = path.with_name(f".{path.name}")
        write_arrays(temporary, named)
        os.replace(temporary, path)

    @classmethod
    def load(cls, path: pathlib.Path) -> Consolidation:
        """Reads a file that `save` wrote."""
        named = read_arrays(path)
        places = range(len(named) // 2)
        return cls([named[f"information/{place}"] for place in places], [named[f"pull/{place}"] for place in places])


class Penalty:
    """λ/2 Σ F (θ - θ*)², plus the weight's own regularizer.

    Args:
      information: F.
      anchor: θ*.
      strength: λ.
      other: The layer's own regularizer, or None.
    """

    def __init__(
        self, information: np.ndarray, anchor: np.ndarray, strength: float, other: keras.Regularizer | None
    ) -> None:
        self._information, self._anchor, self._strength = information, anchor, strength
        self._other = other.other if isinstance(other, Penalty) else other

    @property
    def other(self) -> keras.Regularizer | None:
        """The layer's own regularizer."""
        return self._other

    def __call__(self, weight: tf.Tensor) -> tf.Tensor:
        away = tf.cast(weight, tf.float32) - self._anchor
        penalty = 0.5 * self._strength * tf.reduce_sum(self._information * away * away)
        return penalty if self._other is None else penalty + tf.cast(self._other(weight), tf.float32)


def fisher_information(model: keras.Model, source: Source, indices: np.ndarray, *, seed: int) -> list[np.ndarray]:
    """Returns the diagonal Fisher information of the weights: the mean square of ∂ log p(y|x) / ∂θ, y drawn from p.

    Args:
      model: A classifier that returns logits.
      source: The examples.
      indices: Indices of the examples to use; each needs a separate pass, because squares of sums are not sums of
        squares.
      seed: Seed for drawing classes.

    Returns:
      One float32 array per trainable variable, of its shape.
    """
    weights = [tf.convert_to_tensor(variable) for variable in model.trainable_variables]
    state = [tf.convert_to_tensor(variable) for variable in model.non_trainable_variables]

    def squares(place: tf.Tensor, index: tf.Tensor) -> list[tf.Tensor]:
        """Returns the squares of an example, and 1; zeros for one that is to be skipped."""
        if source.skip:
            x, _, usable = fetch_with_mask(source, index[tf.newaxis])
        else:
            (x, _), usable = source.fetch(index[tf.newaxis]), tf.ones([1], tf.bool)
        with tf.GradientTape() as tape:
            tape.watch(weights)
            logits = call_model(model, weights, state, x, training=False).outputs
            scores = tf.cast(tf.stop_gradient(logits), tf.float32)
            noise = tf.random.stateless_uniform(tf.shape(scores), [seed & 0x7FFFFFFF, place], 1e-6, 1.0 - 1e-6)
            label = tf.argmax(scores - tf.math.log(-tf.math.log(noise)), axis=-1)  # a draw from p (Gumbel-max)
            loss = tf.nn.sparse_softmax_cross_entropy_with_logits(label, tf.cast(logits, tf.float32))
        gradients = tape.gradient(loss, weights, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        every = [*(tf.cast(tf.convert_to_tensor(each), tf.float32) ** 2 for each in gradients), tf.ones([])]
        return [tf.where(usable[0], each, tf.zeros_like(each)) for each in every]

    @tf.function(autograph=False)
    def total(every: tf.Tensor) -> list[tf.Tensor]:
        zeros = [*(tf.zeros(weight.shape) for weight in weights), tf.zeros([])]
        return tf.while_loop(
            lambda place, _: place < tf.size(every),
            lambda place, sums: (
                place + 1,
                [one + other for one, other in zip(sums, squares(place, every[place]), strict=True)],
            ),
            (tf.constant(0), zeros),
            parallel_iterations=1,
        )[1]

    total._omit_frequent_tracing_warning = True  # called once per task; see `TrainStep`
    *sums, count = (each.numpy() for each in total(tf.constant(indices, tf.int64)))
    return [each / max(count, np.float32(1.0)) for each in sums]


def padded(array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Returns the array padded with zeros at the end of each dim, for the weights of new outputs."""
    if array.shape == tuple(shape):  # NumPy pads no single number
        return array
    return np.pad(array, [(0, size - old) for size, old in zip(shape, array.shape, strict=True)])

"""What a client does in a round: it trains the server's weights on its own examples.

Pure functions of tensors, which one XLA program runs for all clients of a device. Shapes: M examples of the largest
client, T local steps at most, B examples of a step.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from tfpar.optim.pure_update import pure_apply
from tfpar.training.core import Core
from tfpar.training.objective import Tensors
from tfpar.training.seeds import fold_in

import keras
import numpy as np
import tensorflow as tf


class ClientData(NamedTuple):
    """The examples of a client, and how it goes through them.

    Attributes:
      x: `[M, ...]`, or a structure of such tensors; rows after the client's own examples are padding.
      y: `[M, ...]`, likewise.
      weight: Float32 `[M]`: 1, or 0 for padding and examples that cannot be used.
      order: Int32 `[T, B]`: places of the examples of each step; -1 for none.
      steps: Int32 scalar: how many steps the client takes.
    """

    x: Any
    y: Any
    weight: tf.Tensor
    order: tf.Tensor
    steps: tf.Tensor


class Trained(NamedTuple):
    """What a client has after its steps.

    Attributes:
      movement: The server's weights less the client's, float32: the direction of a gradient.
      state: The model's state, such as batch statistics.
      loss: Loss sum over all examples of all steps.
      count: Sum of their weights.
      metrics: Sums of the metrics' state.
    """

    movement: Tensors
    state: Tensors
    loss: tf.Tensor
    count: tf.Tensor
    metrics: Tensors


class _LoopState(NamedTuple):
    params: Tensors
    state: Tensors
    slots: Tensors
    loss: tf.Tensor
    count: tf.Tensor
    metrics: Tensors


@dataclasses.dataclass(frozen=True, eq=False)
class LocalTraining:
    """How clients train.

    Attributes:
      core: Model and objective.
      optimizer: Built for the model's weights; each client begins each round with a new one like it.
      initial_slots: The values of its variables before its first step.
      prox: mu of FedProx: `mu (w - server's w)` is added to each gradient (Li et al. 2020, "Federated Optimization in
        Heterogeneous Networks", equation 2).
      clip_norm: L2 norm to which a step's gradient is clipped; 0 for none.
      metric_shapes: Shapes of the metrics' state.
    """

    core: Core
    optimizer: keras.optimizers.Optimizer
    initial_slots: tuple[np.ndarray, ...]
    prox: float
    clip_norm: float
    metric_shapes: tuple[tuple[int, ...], ...]

    def train(
        self,
        params: Tensors,
        state: Tensors,
        data: ClientData,
        rate: tf.Tensor,
        seed: tf.Tensor,
        correction: Tensors | None,
    ) -> Trained:
        """Trains one client.

        Args:
          params: The server's weights.
          state: The server's state of the model.
          data: The client's examples.
          rate: Learning rate, float32 scalar.
          seed: Int32 `[2]`, different for every client and round.
          correction: Added to each gradient: SCAFFOLD's c - c_i; None for none.
        """
        held = _LoopState(
            [tf.identity(param) for param in params],
            [tf.identity(value) for value in state],
            [tf.constant(slot) for slot in self.initial_slots],
            tf.zeros([]),
            tf.zeros([]),
            [tf.zeros(shape) for shape in self.metric_shapes],
        )
        _, held = tf.while_loop(
            lambda index, _: index < data.steps,
            lambda index, held: (index + 1, self._step(held, params, data, index, rate, seed, correction)),
            (tf.constant(0), held),
            parallel_iterations=1,
        )
        movement = [
            tf.cast(old, tf.float32) - tf.cast(new, tf.float32) for old, new in zip(params, held.params, strict=True)
        ]
        return Trained(movement, held.state, held.loss, held.count, held.metrics)

    def _step(
        self,
        held: _LoopState,
        params: Tensors,
        data: ClientData,
        index: tf.Tensor,
        rate: tf.Tensor,
        seed: tf.Tensor,
        correction: Tensors | None,
    ) -> _LoopState:
        """One local step; `params` are the server's weights."""
        places = data.order[index]
        rows = tf.maximum(places, 0)
        x, y = (tf.nest.map_structure(lambda part: tf.gather(part, rows)[tf.newaxis], each) for each in data[:2])
        weight = tf.gather(data.weight, rows) * tf.cast(places >= 0, tf.float32)
        sums = self.core.accumulate_alone(held.params, held.state, (x, y, weight[tf.newaxis]), fold_in(seed, index))
        divisor = tf.maximum(self.core.denominator(sums), 1e-30)
        gradients = [gradient / divisor for gradient in sums.gradients]
        if self.prox:
            gradients = [
                gradient + self.prox * (own - server)
                for gradient, own, server in zip(gradients, held.params, params, strict=True)
            ]
        if correction is not None:
            gradients = [*map(tf.add, gradients, correction)]
        if self.clip_norm:
            norm = tf.linalg.global_norm(gradients)
            gradients = [gradient * (self.clip_norm / tf.maximum(norm, self.clip_norm)) for gradient in gradients]
        start = [sums.assigned.get(place, param) for place, param in enumerate(held.params)]
        new, slots = pure_apply(self.optimizer, held.slots, start, gradients, rate)
        return _LoopState(
            new,
            sums.state,
            slots,
            held.loss + sums.loss,
            held.count + sums.count,
            [*map(tf.add, held.metrics, sums.metrics)],
        )

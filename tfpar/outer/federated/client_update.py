"""The work of a client in a round: it trains the server's weights on its own examples.

Pure functions of tensors, which one XLA program runs for all clients of a device. Shapes: M examples of the
clients of a device, at most T local steps, B examples of a step.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any, NamedTuple

from tfpar.optim.pure_update import pure_apply
from tfpar.training.core import Core
from tfpar.training.model.adapting import frozen_weights
from tfpar.training.objective import Tensors
from tfpar.training.seeds import fold_in
from tfpar.training.sidecar import Sidecar

import keras
import numpy as np
import tensorflow as tf


class ClientData(NamedTuple):
    """The examples of a client, and the order in which it uses them.

    Attributes:
      x: `[M, ...]`, or a structure of such tensors; rows that no step uses are padding, or of other clients.
      y: Like `x`.
      weight: Float32 `[M]`: 1, or 0 for padding and unusable examples.
      order: Int32 `[T, B]`: indices into `x` of the examples of each step; -1 for none.
      steps: Int32 scalar: number of steps that the client takes.
    """

    x: Any
    y: Any
    weight: tf.Tensor
    order: tf.Tensor
    steps: tf.Tensor


class Trained(NamedTuple):
    """The results of a client's steps.

    Attributes:
      movement: The server's weights minus the client's, float32; it has the sign of a gradient.
      state: The model's state, such as batch statistics.
      loss: Sum of the losses over all examples of all steps.
      count: Sum of these examples' weights.
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
    """The local training of clients.

    Attributes:
      core: Model and objective.
      optimizer: Optimizer that is built for the model's weights; each client starts each round with a fresh state.
      initial_slots: The values of the optimizer's variables before its first step.
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
          correction: SCAFFOLD's c - c_i, which is added to each gradient; None for none.
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
        """Takes one local step; `params` are the server's weights."""
        places = data.order[index]
        # Not the first row, which may be that of another client, and not finite.
        rows = tf.where(places < 0, places[0], places)
        x, y = (tf.nest.map_structure(lambda part: tf.gather(part, rows)[tf.newaxis], each) for each in data[:2])
        weight = tf.gather(data.weight, rows) * tf.cast(places >= 0, tf.float32)
        sums = self.core.accumulate_alone(held.params, held.state, (x, y, weight[tf.newaxis]), fold_in(seed, index))
        factor = tf.math.divide_no_nan(1.0, self.core.denominator(sums))
        gradients = [gradient * factor for gradient in sums.gradients]
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
        reached = self.core.unreached.left_out(gradients, self.core.model.trainable_variables)
        new, slots = pure_apply(self.optimizer, held.slots, start, reached, rate)
        return _LoopState(
            new,
            sums.state,
            slots,
            held.loss + sums.loss,
            held.count + sums.count,
            [*map(tf.add, held.metrics, sums.metrics)],
        )


def averaged_state(model: keras.Model) -> list[int]:
    """Returns the indices of the non-trainable variables that are averaged over clients: floating-point state, such as
    batch statistics. Frozen weights and seeds are not."""
    # As for two replicas, even if one has all clients.
    averaged = Sidecar.of(model.non_trainable_variables, [], 2, frozen_weights(model)).averaged
    return [place for place, is_averaged in enumerate(averaged) if is_averaged]


def frozen_digest(model: keras.Model) -> str:
    """Returns a digest of the values of the frozen weights, in the order of the model; empty if there are none."""
    weights = frozen_weights(model)
    digest = hashlib.sha256()
    for weight in weights:
        digest.update(np.ascontiguousarray(weight).tobytes())
    return digest.hexdigest() if weights else ""

"""One training step, the same on every strategy whose replicas move together.

`TrainStep._replica_step` shows the six moves in order:

1. loss and gradients of this replica's micro-batches (`Core`, pure, under XLA);
2. their sum over the micro-batches, in float32 (`Core.accumulate`);
3. one exchange of gradient sums and sidecar;
4. clipping of the reduced gradient;
5. the optimizer's update, the same bits on every replica (pure, under XLA);
6. schedule and loss scale.

`TrainStep.run` does any number of steps in one call from Python.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tfpar.exchange import Exchange
from tfpar.precision import LossScale
from tfpar.precision import update as update_loss_scale
from tfpar.training import replica
from tfpar.training.core import Core, Tensors
from tfpar.training.optimizers import pure_apply
from tfpar.training.sidecar import Sidecar

import keras
import tensorflow as tf

# Columns of `Steps.durations`, seconds.
DURATIONS = ("input_wait", "compute", "exchange", "update", "total")


class Norms(NamedTuple):
    """L2 norms over all trainable weights. Float32 scalars; zero where they were not asked for."""

    gradient: tf.Tensor
    parameter: tf.Tensor
    update: tf.Tensor


class Steps(NamedTuple):
    """What several steps report.

    Attributes:
      loss: Float32 `[n]`: mean loss over the examples of each update.
      count: Float32 `[n]`: examples of each update.
      finite: Bool `[n]`: whether the update was applied.
      durations: Float64 `[n, 5]`, seconds: see `DURATIONS`. All zero if not `timed`.
      metrics: Metric state summed over the steps.
      norms: Norms at the last step.
      learning_rate: Float32 scalar: of the last step.
      loss_scale: The loss scale after the last step.
    """

    loss: tf.Tensor
    count: tf.Tensor
    finite: tf.Tensor
    durations: tf.Tensor
    metrics: Tensors
    norms: Norms
    learning_rate: tf.Tensor
    loss_scale: LossScale


class _Update(NamedTuple):
    """New values of everything an update changes, and its report.

    `report` is one float32 vector, because each tensor that leaves an XLA program or goes round a loop costs
    microseconds: loss, count, finite, gradient norm, and the metric state, flat.
    """

    params: Tensors
    optimizer: Tensors
    state: Tensors
    loss_scale: LossScale
    report: tf.Tensor


_REPORTED = 4


class TrainStep:
    """Runs training steps on a synchronous strategy.

    Args:
      core: Model, loss and metrics.
      optimizer: A built Keras optimizer.
      exchange: Gradient exchange, built for the model's trainable variables.
      strategy: The strategy that the model was created under.
      schedule: Learning rate at a step (int64 scalar tensor -> float32 scalar), or None to leave it to the optimizer.
      seed: Seed of dropout and augmentation.
      jit_compile: Compile forward, backward and update with XLA.
      clip_norm: Global L2 norm that the reduced mean gradient is clipped to; 0 for none.
      scale_loss: Whether the loss scale is in use (mixed_float16).
      growth_steps: Finite steps after which the loss scale doubles.
      whole_program: Make each replica's step one XLA program, exchange and assignments included. That is what a TPU
        does anyway (the default there); elsewhere it works where nothing is exchanged, with a single replica.
      timed: Take the time of every step. Must be off where op determinism is on: TensorFlow 2.21 then refuses its
        clock (the Timestamp kernel).
    """

    def __init__(
        self,
        core: Core,
        optimizer: keras.optimizers.Optimizer,
        exchange: Exchange,
        strategy: tf.distribute.Strategy,
        *,
        schedule: Callable[[tf.Tensor], tf.Tensor] | None,
        seed: int,
        jit_compile: bool,
        clip_norm: float = 0.0,
        scale_loss: bool = False,
        growth_steps: int = 2000,
        whole_program: bool | None = None,
        timed: bool = True,
    ) -> None:
        self.core = core
        self.optimizer = optimizer
        self.exchange = exchange
        self.strategy = strategy
        self.sidecar = Sidecar.of(
            core.model.non_trainable_variables, core.metric_variables, strategy.num_replicas_in_sync
        )
        self._schedule = schedule
        self._seed = seed
        self._clip_norm = clip_norm
        self._scale_loss = scale_loss
        self._growth_steps = growth_steps
        on_tpu = isinstance(strategy, tf.distribute.TPUStrategy)
        alone = strategy.num_replicas_in_sync == 1
        self._whole_program = on_tpu or (alone and jit_compile) if whole_program is None else whole_program
        self._timed = timed
        compiled = functools.partial(tf.function, jit_compile=True, autograph=False)
        wrap = compiled if jit_compile and not self._whole_program else (lambda function: function)
        self._contribute = wrap(self._contribution)
        self._finish = wrap(self._update)
        # Without peers there is nothing between the two, and one XLA program does the whole step.
        self._whole = wrap(self._contribution_and_update) if strategy.num_replicas_in_sync == 1 else None
        # TPUStrategy.run compiles what it is given by itself.
        self._step = compiled(self._replica_step) if self._whole_program and not on_tpu else self._replica_step
        self.run = tf.function(self._run, autograph=False, reduce_retracing=True)

    def _run(
        self,
        iterator: Iterator[Any],
        first_step: tf.Tensor,
        steps: tf.Tensor,
        loss_scale: LossScale,
        rate_factor: tf.Tensor,
        measure: tf.Tensor,
    ) -> Steps:
        """Runs `steps` updates.

        Args:
          iterator: Distributed iterator over elements `(x, y, weight)`, see `tfpar.inputs.Pipeline.dataset`.
          first_step: Int64 scalar: number of the first update; seeds and schedule depend on it.
          steps: Int32 scalar: updates to run.
          loss_scale: The loss scale to start with.
          rate_factor: Float32 scalar that the scheduled learning rate is multiplied by.
          measure: Bool scalar: compute norms at the last step.
        """
        shapes = [tuple(variable.shape) for variable in self.core.metric_variables]
        sizes = [math.prod(shape) for shape in shapes]
        reports = tf.TensorArray(tf.float32, size=steps, element_shape=[_REPORTED + sum(sizes)])
        stamps = tf.TensorArray(tf.float64, size=steps, element_shape=[4])

        def body(index: tf.Tensor, fetched: tf.Tensor, now: tf.Tensor, *carried: Any) -> tuple[Any, ...]:
            reports, stamps, norms, loss_scale = carried
            step = first_step + tf.cast(index, tf.int64)
            # Iterations may overlap in this much: batches are fetched one after the other, ahead of the updates.
            with tf.control_dependencies([fetched]):
                batch = next(iterator)
            fetched = self._clock(tf.nest.flatten(self._local(batch)))
            last = measure & tf.equal(index, steps - 1)
            with tf.control_dependencies([fetched, now]):
                before = tf.cond(last, self._flat_params, lambda: tf.zeros([0]))
            with tf.control_dependencies([before]):
                rate = self._learning_rate(step, rate_factor)
                results = self.strategy.run(self._step, args=(batch, step, rate, loss_scale, last))
            report, new_scale, computed, exchanged, _ = [
                tf.nest.map_structure(lambda part: self._local(part)[0], result) for result in results
            ]
            done = tf.reduce_max(tf.stack(self._local(results[-1])))
            if self._whole_program:  # an XLA program has no clock: its whole time counts as computing
                done = computed = exchanged = self._clock([report])
            stamps = stamps.write(index, tf.stack([fetched, computed, exchanged, done]))
            with tf.control_dependencies([done]):
                norms = tf.cond(last, lambda: self._norms(before), lambda: norms)
            loss_scale = new_scale if self._scale_loss else loss_scale
            return index + 1, fetched, done, reports.write(index, report), stamps, norms, loss_scale

        began = self._clock([])
        start = (tf.constant(0), began, began, reports, stamps, tf.zeros([2]), loss_scale)
        _, _, _, reports, stamps, norms, loss_scale = tf.while_loop(lambda index, *_: index < steps, body, start)
        table = reports.stack()
        state = tf.split(tf.reduce_sum(table[:, _REPORTED:], axis=0), sizes) if sizes else []
        return Steps(
            table[:, 0],
            table[:, 1],
            table[:, 2] > 0,
            _durations(began, stamps.stack()),
            [tf.reshape(part, shape) for part, shape in zip(state, shapes, strict=True)],
            Norms(table[-1, 3], norms[0], norms[1]),
            self._learning_rate(first_step + tf.cast(steps - 1, tf.int64), rate_factor),
            loss_scale,
        )

    def _flat_params(self) -> tf.Tensor:
        """A copy of all trainable weights as one vector."""
        local = [self._local(variable.value)[0] for variable in self.core.model.trainable_variables]
        return tf.concat([tf.reshape(variable, [-1]) for variable in local], axis=0)

    def _norms(self, before: tf.Tensor) -> tf.Tensor:
        """Norms of the weights and of their last update. Outside XLA: inside, old weights would have to be copied."""
        now = self._flat_params()
        return tf.stack([tf.norm(now), tf.norm(now - before)])

    def _local(self, value: Any) -> tuple[Any, ...]:
        return self.strategy.experimental_local_results(value)

    def _replica_step(
        self, batch: Any, step: tf.Tensor, rate: tf.Tensor, loss_scale: LossScale, measure: tf.Tensor
    ) -> tuple[tf.Tensor, LossScale, tf.Tensor, tf.Tensor, tf.Tensor]:
        model = self.core.model
        params = replica.read(model.trainable_variables)
        state = replica.read(model.non_trainable_variables)
        optimizer = replica.read(self.optimizer.variables)
        replica_id = tf.distribute.get_replica_context().replica_id_in_sync_group
        where = (step, tf.convert_to_tensor(replica_id))

        if self._whole is not None:
            update = self._whole(params, state, optimizer, batch, where, rate, loss_scale)
            computed = exchanged = self._replica_clock([update.report])
        else:
            gradients, sidecar, new_state, _ = self._contribute(params, state, batch, where, loss_scale)
            computed = self._replica_clock([sidecar])
            gradients, sidecar = self.exchange.reduce_sums(gradients, sidecar)
            exchanged = self._replica_clock([sidecar, gradients[-1]])
            norm = tf.cond(
                measure | (self._clip_norm > 0), lambda: tf.linalg.global_norm(gradients), lambda: tf.zeros([])
            )
            update = self._finish(params, state, optimizer, gradients, sidecar, new_state, norm, rate, loss_scale)

        stored = replica.assign(
            [*model.trainable_variables, *model.non_trainable_variables, *self.optimizer.variables],
            [*update.params, *update.state, *update.optimizer],
        )
        return update.report, update.loss_scale, computed, exchanged, self._replica_clock(stored)

    def _contribution(
        self, params: Tensors, state: Tensors, batch: Any, where: tuple[tf.Tensor, tf.Tensor], loss_scale: LossScale
    ) -> tuple[Tensors, tf.Tensor, Tensors, tf.Tensor]:
        """Moves 1 and 2: this replica's gradient sums and sidecar, its model state, its gradient's norm."""
        seed = tf.constant([self._seed & 0x7FFFFFFF, self._seed >> 31], tf.int32)
        for part in where:
            seed = tf.random.fold_in(seed, tf.cast(part, tf.int32), alg="philox")
        sums = self.core.accumulate(params, state, batch, seed, loss_scale.scale if self._scale_loss else None)
        sidecar, norm_squared = self.sidecar.pack(sums)
        return sums.gradients, sidecar, sums.state, tf.sqrt(norm_squared)

    def _update(
        self,
        params: Tensors,
        state: Tensors,
        optimizer: Tensors,
        gradients: Tensors,
        sidecar: tf.Tensor,
        new_state: Tensors,
        norm: tf.Tensor,
        rate: tf.Tensor,
        loss_scale: LossScale,
    ) -> _Update:
        """Moves 4 to 6, on gradients that are the same on every replica; `norm` is that of their sum."""
        reduced = self.sidecar.unpack(sidecar, new_state)
        count = tf.maximum(reduced.count, 1e-30)
        divisor = count * loss_scale.scale if self._scale_loss else count

        factor = 1.0 / divisor
        norm *= factor
        if self._clip_norm:
            clip = self._clip_norm / tf.maximum(norm, self._clip_norm)
            factor, norm = factor * clip, norm * clip
        mean = [gradient * factor for gradient in gradients]
        learning_rate = rate if self._schedule is not None else None
        new_params, new_optimizer = pure_apply(self.optimizer, optimizer, params, mean, learning_rate)
        # Selecting costs nothing inside a fused update; an XLA conditional would copy what it passes through.
        new_params, new_optimizer, new_state = tf.nest.map_structure(
            lambda new, old: tf.where(reduced.finite, new, old),
            (new_params, new_optimizer, reduced.state),
            (params, optimizer, state),
        )

        if self._scale_loss:
            loss_scale = update_loss_scale(loss_scale, reduced.finite, self._growth_steps)
        finite = tf.cast(reduced.finite, tf.float32)
        # The metric state of a skipped step may hold NaN; it must not poison the window.
        metrics = [tf.reshape(tf.where(reduced.finite, value, 0.0), [-1]) for value in reduced.metrics]
        report = tf.concat([tf.stack([reduced.loss / count, reduced.count, finite, norm]), *metrics], axis=0)
        return _Update(new_params, new_optimizer, new_state, loss_scale, report)

    def _contribution_and_update(
        self,
        params: Tensors,
        state: Tensors,
        optimizer: Tensors,
        batch: Any,
        where: tuple[tf.Tensor, tf.Tensor],
        rate: tf.Tensor,
        loss_scale: LossScale,
    ) -> _Update:
        gradients, sidecar, new_state, norm = self._contribution(params, state, batch, where, loss_scale)
        return self._update(params, state, optimizer, gradients, sidecar, new_state, norm, rate, loss_scale)

    def _learning_rate(self, step: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
        if self._schedule is not None:
            return tf.cast(self._schedule(step), tf.float32) * factor
        return tf.cast(self.optimizer.learning_rate, tf.float32)

    def _replica_clock(self, after: list[Any]) -> tf.Tensor:
        return tf.zeros([], tf.float64) if self._whole_program else self._clock(after)

    def _clock(self, after: list[Any]) -> tf.Tensor:
        """Host time in seconds (float64 scalar) once everything in `after` exists; zero where there is no clock."""
        if not self._timed:
            with tf.control_dependencies(after):  # no time, but still the order
                return tf.identity(tf.zeros([], tf.float64))
        with tf.device("/device:CPU:0"), tf.control_dependencies(after):
            return tf.timestamp()


def _durations(began: tf.Tensor, stamps: tf.Tensor) -> tf.Tensor:
    """Seconds `[n, 5]` from the times `[n, 4]` at which batch, gradients, exchange and update were done."""
    fetched, computed, exchanged, done = tf.unstack(stamps, axis=1)
    before = tf.concat([[began], done[:-1]], axis=0)
    start = tf.maximum(fetched, before)  # a batch may have been there before the update before was done
    return tf.stack([start - before, computed - start, exchanged - computed, done - exchanged, done - before], axis=1)

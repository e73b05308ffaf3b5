"""One training step, the same on every strategy whose replicas move together.

`TrainStep._replica_step` shows the six moves in order:

1. loss and gradients of this replica's micro-batches (`Core`, pure, under XLA);
2. their sum over the micro-batches, in float32 (`Core.accumulate`);
3. one exchange of gradient sums and sidecar;
4. clipping of the reduced gradient;
5. the optimizer's update, the same bits on every replica (pure, under XLA);
6. schedule and loss scale.

Under XLA a replica with no peers, and one on a TPU, does all of it in one program; elsewhere 1, 2 and 5 are one each.
`TrainStep.run` does any number of steps in one call from Python.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tfpar.collectives.tensorflow import independent
from tfpar.exchange import Exchange
from tfpar.monitor import timings
from tfpar.optim.optimizers import pure_apply
from tfpar.parallel import replica
from tfpar.precision import LossScale
from tfpar.precision import update as update_loss_scale
from tfpar.training import norms, sidecar
from tfpar.training.core import Core, Tensors, frozen_weights, is_seed_state
from tfpar.training.seeds import step_seed
from tfpar.training.sidecar import Sidecar

import keras
import tensorflow as tf


class Norms(NamedTuple):
    """L2 norms over all trainable weights, that of the gradient before clipping.

    Float32 scalars; zero where they were not asked for.
    """

    gradient: tf.Tensor
    parameter: tf.Tensor
    update: tf.Tensor


class Steps(NamedTuple):
    """What several steps report.

    Attributes:
      loss: Float32 `[n]`: mean loss over the examples of each update; NaN if it has none.
      count: Float32 `[n]`: examples of each update.
      finite: Bool `[n]`: whether the update was applied: all replicas were finite, and there were examples.
      durations: Float64 `[n, 6]`, seconds: see `timings.COLUMNS`. All zero if not `timed`.
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


class _Outcome(NamedTuple):
    """What one step gives on a replica; empty where there is nothing to tell.

    Attributes:
      report: Norm of the mean gradient, and the front of the summed sidecar.
      loss_scale: The new loss scale, if one is in use.
      times: When the first gradient that leaves early, all gradients, exchange and update were done, in seconds.
    """

    report: tf.Tensor
    loss_scale: LossScale | tuple[()]
    times: tuple[tf.Tensor, ...]


class _Reduced(NamedTuple):
    """What a replica makes its update of; all but `state` is the same on every replica.

    Attributes:
      gradients: Gradient sums over all replicas.
      vector: The summed sidecar.
      state: The model state that this replica has computed.
      factor: What makes the gradient sums the gradient to apply: their mean, clipped.
      step: Int64 scalar: number of the update.
      rate_factor: Float32 scalar that the scheduled learning rate is multiplied by.
    """

    gradients: Tensors
    vector: tf.Tensor
    state: Tensors
    factor: tf.Tensor
    step: tf.Tensor
    rate_factor: tf.Tensor


class _Carried(NamedTuple):
    """What one step of a loop hands to the next; times in seconds."""

    batch: Any
    fetched: tf.Tensor
    done: tf.Tensor
    reports: tf.TensorArray
    stamps: tf.TensorArray
    loss_scale: LossScale | tuple[()]  # empty where none is in use


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
        timed: bool = True,
    ) -> None:
        self.core = core
        self.optimizer = optimizer
        self.exchange = exchange
        self.strategy = strategy
        self.sidecar = Sidecar.of(
            core.model.non_trainable_variables,
            core.metric_variables,
            strategy.num_replicas_in_sync,
            frozen=frozen_weights(core.model),
        )
        self._schedule = schedule
        self._seed = seed
        self._clip_norm = clip_norm
        self._scale_loss = scale_loss
        self._growth_steps = growth_steps
        on_tpu = isinstance(strategy, tf.distribute.TPUStrategy)
        self._whole_program = on_tpu or (jit_compile and strategy.num_replicas_in_sync == 1)
        self._timed = timed
        # Seed states are never stored: every step derives its own.
        self._state = [variable for variable in core.model.non_trainable_variables if not is_seed_state(variable)]
        compiled = functools.partial(tf.function, jit_compile=True, autograph=False)
        wrap = compiled if jit_compile and not self._whole_program else (lambda function: function)
        # Two XLA programs a step where something is exchanged, which XLA cannot hold. They take tensors, so that all
        # replicas of a process share one compilation; where a process has one, the second changes variables in place.
        devices = strategy.extended.worker_devices
        alone = len(devices) == 1
        self._contribute = wrap(self._contribution)
        self._new_values = self._updated if alone else wrap(self._updated)
        self._apply = wrap(self._apply_update) if alone else self._apply_update
        # The batch of the next step is fetched beside a step, not in its own turn: iterations do not overlap in
        # TensorFlow 2.21, which starts none before the one before has run all that has effects. What a loop carries
        # lies on one device, so that batches for several GPUs would be copied to the first of them.
        self._fetches_ahead = not on_tpu and (alone or all("CPU" in device for device in devices))
        # TPUStrategy.run compiles what it is given by itself.
        self._whole_step = compiled(self._measured_step) if jit_compile and not on_tpu else self._measured_step
        self._norm_squared = norms.squared_in_xla if self._whole_program else norms.squared
        self.run = tf.function(self._run, autograph=False, reduce_retracing=True)
        # TensorFlow 2.21 counts tracings by code, over all objects: a program of several short runs would be warned of
        # tracings that each of them needs once.
        self.run._omit_frequent_tracing_warning = True

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
        began = self._clock([])
        reports = tf.TensorArray(tf.float32, size=steps, element_shape=[1 + self.sidecar.report_length])
        stamps = tf.TensorArray(tf.float64, size=steps, element_shape=[5])

        def body(index: tf.Tensor, carried: _Carried, measured: tf.Tensor) -> tuple[tf.Tensor, _Carried]:
            step = first_step + tf.cast(index, tf.int64)
            if self._fetches_ahead:
                batch, fetched = carried.batch, carried.fetched
                following = tf.cond(index + 1 < steps, lambda: next(iterator), lambda: batch)
                arrived = self._clock(self._all_local(following))
            else:
                batch, following = next(iterator), ()
                fetched = arrived = self._clock(self._all_local(batch))
            with tf.control_dependencies([carried.done]):
                scale = carried.loss_scale or loss_scale
                report, new_scale, times = self._all_replicas(batch, step, rate_factor, scale, measured)
            return index + 1, _Carried(
                following,
                arrived,
                times[-1],
                carried.reports.write(index, report),
                carried.stamps.write(index, tf.stack([fetched, *times])),
                new_scale,
            )

        def part(number: tf.Tensor, index: tf.Tensor, before: tf.Tensor, carried: _Carried) -> tuple[Any, ...]:
            last = tf.equal(number, 1)
            stop = tf.where(last, steps, steps - tf.cast(measure, tf.int32))
            index, carried = tf.while_loop(
                lambda index, _: index < stop,
                lambda index, carried: body(index, carried, measure & last),
                (index, carried),
            )
            with tf.control_dependencies([carried.done]):
                before = tf.cond(measure & ~last, self._flat_params, lambda: before)
            with tf.control_dependencies([before]):
                carried = carried._replace(done=tf.identity(carried.done))
            return number + 1, index, before, carried

        # In two parts, of which the second has the step to be measured: what is measured around it costs the others
        # nothing, not even a branch. And in a loop over the two, as the step of many replicas takes seconds to trace.
        batch = next(iterator) if self._fetches_ahead else ()
        fetched = self._clock(self._all_local(batch))
        start = _Carried(batch, fetched, began, reports, stamps, loss_scale if self._scale_loss else ())
        values = (tf.constant(0), tf.constant(0), tf.zeros([0]), start)
        shapes = (None, None, tf.TensorShape([None]), tf.nest.map_structure(lambda _: None, start))
        *_, before, carried = tf.while_loop(lambda number, *_: number < 2, part, values, shape_invariants=shapes)
        with tf.control_dependencies([carried.done]):
            sizes = tf.cond(measure, lambda: self._norms(before), lambda: tf.zeros([2]))

        table = carried.reports.stack()
        gradient_norm, sums = table[:, 0], table[:, 1:]
        count = sums[:, sidecar.COUNT]
        return Steps(
            loss=sums[:, sidecar.LOSS] / count,
            count=count,
            finite=tf.equal(sums[:, sidecar.NON_FINITE], 0.0) & (count > 0.0),
            durations=timings.durations(began, carried.stamps.stack()),
            metrics=self.sidecar.metrics(sums),
            norms=Norms(gradient_norm[-1], sizes[0], sizes[1]),
            learning_rate=self._learning_rate(first_step + tf.cast(steps - 1, tf.int64), rate_factor),
            loss_scale=carried.loss_scale or loss_scale,
        )

    def _all_replicas(
        self, batch: Any, step: tf.Tensor, rate_factor: tf.Tensor, loss_scale: LossScale, measure: tf.Tensor
    ) -> _Outcome:
        """One step on every replica. The update is done when the last replica's is."""
        if self._whole_program:
            results = self.strategy.run(self._whole_step, args=(batch, step, rate_factor, loss_scale))
        else:
            results = self.strategy.run(self._replica_step, args=(batch, step, rate_factor, loss_scale, measure))
        local = [self._local(part) for part in tf.nest.flatten(results)]
        outcome: _Outcome = tf.nest.pack_sequence_as(results, [part[0] for part in local])
        if self._whole_program:  # an XLA program has no clock: its whole time counts as computing
            return outcome._replace(times=(self._clock([part[0] for part in local]),) * 4)
        done = local[-1]
        last = tf.reduce_max(tf.stack(done)) if len(done) > 1 else done[0]
        return outcome._replace(times=(*outcome.times[:-1], last))

    def _flat_params(self) -> tf.Tensor:
        """A copy of all trainable weights as one vector."""
        local = [self._local(variable.value)[0] for variable in self.core.model.trainable_variables]
        return tf.concat([tf.cast(tf.reshape(variable, [-1]), tf.float32) for variable in local], axis=0)

    def _norms(self, before: tf.Tensor) -> tf.Tensor:
        """Norms of the weights and of their last update. Outside XLA: inside, old weights would have to be copied."""
        now = self._flat_params()
        return tf.stack([tf.norm(now), tf.norm(now - before)])

    def _all_local(self, batch: Any) -> list[tf.Tensor]:
        """The tensors of a batch on all devices of this process."""
        return [part for value in tf.nest.flatten(batch) for part in self._local(value)]

    def _local(self, value: Any) -> tuple[Any, ...]:
        return self.strategy.experimental_local_results(value)

    def _replica_step(
        self, batch: Any, step: tf.Tensor, rate_factor: tf.Tensor, loss_scale: LossScale, measure: tf.Tensor | None
    ) -> _Outcome:
        context = tf.distribute.get_replica_context()
        model = self.core.model

        # 1, 2: loss and gradients of the micro-batches, summed here.
        where = (step, tf.convert_to_tensor(context.replica_id_in_sync_group))
        params, state = replica.read(model.trainable_variables), replica.read(model.non_trainable_variables)
        gradients, packed, state = self._contribute(params, state, batch, where, loss_scale.scale)
        norm_squared = self._norm_squared(gradients)
        vector = Sidecar.flag(packed, norm_squared)
        early = [gradients[number] for number in self.exchange.leaves_first]
        computed = self._replica_clock([vector])
        first = self._replica_clock(early) if early else computed

        # 3: one exchange, which also tells whether all replicas are finite.
        gradients, vector = self.exchange.reduce_sums(gradients, vector, _to_be_applied)
        exchanged = self._replica_clock([vector, gradients[-1]])
        finite = tf.equal(vector[sidecar.NON_FINITE], 0.0)

        # 4: the reduced gradient's mean, clipped: one factor.
        if context.num_replicas_in_sync > 1 or self.exchange.state:  # else it is this replica's own
            reduced = functools.partial(self._norm_squared, gradients)
            always = measure is None or self._clip_norm
            norm_squared = reduced() if always else tf.cond(measure, reduced, lambda: tf.zeros([]))
        factor = 1.0 / tf.maximum(vector[sidecar.COUNT], 1e-30)
        norm = tf.sqrt(norm_squared) * factor
        if self._clip_norm:
            factor = factor * (self._clip_norm / tf.maximum(norm, self._clip_norm))

        # 5, 6: the update, or none, also where all examples were skipped; the loss scale.
        apply = _to_be_applied(vector)
        update = functools.partial(self._apply, _Reduced(gradients, vector, state, factor, step, rate_factor))
        done = tf.cond(apply, update, lambda: tf.identity(factor))
        new_scale = update_loss_scale(loss_scale, finite, self._growth_steps) if self._scale_loss else ()
        with tf.control_dependencies([done]):  # where this is no XLA program, there is a report before
            report = tf.concat([[norm], vector[: self.sidecar.report_length]], axis=0)
        times = () if self._whole_program else (first, computed, exchanged, self._clock([done]))
        return _Outcome(report, new_scale, times)

    def _measured_step(self, batch: Any, step: tf.Tensor, rate_factor: tf.Tensor, loss_scale: LossScale) -> _Outcome:
        """The step that takes its gradient's norm every time: within XLA that is cheaper than a branch."""
        return self._replica_step(batch, step, rate_factor, loss_scale, None)

    def _contribution(
        self, params: Tensors, state: Tensors, batch: Any, where: tuple[tf.Tensor, tf.Tensor], scale: tf.Tensor
    ) -> tuple[Tensors, tf.Tensor, Tensors]:
        """This replica's gradient sums, its part of the sidecar, and what the model's new state builds on."""
        seed = step_seed(self._seed, *where)
        sums = self.core.accumulate(params, state, batch, seed, scale if self._scale_loss else None)
        gradients = sums.gradients
        if self._scale_loss:  # residuals of the exchange are kept from step to step, and the scale changes
            gradients = [gradient / scale for gradient in gradients]
        return gradients, self.sidecar.pack(sums, state), self.sidecar.base(state, sums.state)

    def _apply_update(self, reduced: _Reduced) -> tf.Tensor:
        """Updates this replica's variables; returns the factor when that is done."""
        model = self.core.model
        groups = [model.trainable_variables, self.optimizer.variables, self._state]
        params, optimizer, state = (replica.own(variables) for variables in groups)
        weights, slots = ([copy.read_value() for copy in copies] for copies in (params, optimizer))
        new = self._new_values(weights, slots, reduced)
        stored = replica.assign([*params, *optimizer, *state], [value for group in new for value in group])
        with tf.control_dependencies(stored):
            return tf.identity(reduced.factor)

    def _updated(self, params: Tensors, optimizer: Tensors, reduced: _Reduced) -> tuple[Tensors, Tensors, Tensors]:
        """New weights, optimizer state and model state."""
        mean = [gradient * reduced.factor for gradient in reduced.gradients]
        rate = self._learning_rate(reduced.step, reduced.rate_factor) if self._schedule is not None else None
        new_params, new_optimizer = pure_apply(self.optimizer, optimizer, params, mean, rate)
        state = self.sidecar.state(reduced.vector, reduced.state)
        every = zip(self.core.model.non_trainable_variables, state, strict=True)
        return new_params, new_optimizer, [value for variable, value in every if not is_seed_state(variable)]

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
            return independent(tf.timestamp())


def _to_be_applied(vector: tf.Tensor) -> tf.Tensor:
    """Whether the summed sidecar calls for an update: all replicas are finite, and there are examples."""
    return tf.equal(vector[sidecar.NON_FINITE], 0.0) & (vector[sidecar.COUNT] > 0.0)

"""One training step, the same on every strategy whose replicas take steps together.

`TrainStep._replica_step` shows the six parts in order:

1. loss and gradients of this replica's micro-batches (`Core`, pure, under XLA);
2. their sum over the micro-batches, in float32 (`Core.accumulate`);
3. one exchange of gradient sums and sidecar;
4. clipping of the reduced gradient;
5. the optimizer's update, the same bits on every replica, in place (under XLA);
6. schedule and loss scale.

Which of them are XLA programs is decided in `compilation.py`; the loop over steps is in `step_loop.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tfpar.collectives.replicas import sum_over_replicas
from tfpar.collectives.tensorflow import run_unordered
from tfpar.exchange import Exchange
from tfpar.optim.keras_internals import is_seed_state
from tfpar.optim.pure_update import pure_apply
from tfpar.parallel import replica
from tfpar.parallel.compilation import compilation_plan, compiled
from tfpar.parallel.split import whole_tensor
from tfpar.precision import LossScale
from tfpar.precision import update as update_loss_scale
from tfpar.training import norms, sidecar
from tfpar.training.core import Core
from tfpar.training.objective import LocalSums, Tensors
from tfpar.training.seeds import step_seed
from tfpar.training.sidecar import Reduced, Sidecar, follow_examples
from tfpar.training.step_loop import StepReport, StepsResult, run_steps

import keras
import tensorflow as tf


class TrainStep:
    """Training steps on a synchronous strategy. `_replica_step` is one step; `run` runs any number of them."""

    waits_for_host: bool = False  # whether a step waits for data from the host, so that it is not one XLA program
    decision = property(lambda self: self.sidecar.decision, doc="Whether a step is applied, for the exchange.")

    def _replica_step(
        self, batch: Any, step: tf.Tensor, lr_multiplier: tf.Tensor, loss_scale: LossScale, wants_norm: tf.Tensor | None
    ) -> StepReport:
        """One step on one replica. The norm is computed if `wants_norm`, and always if that is None."""
        model = self.core.model

        # 1, 2: loss and gradients of the micro-batches, summed here.
        seed_path = (step, self._replica_number(tf.distribute.get_replica_context()))
        params, state = replica.read(model.trainable_variables), replica.read(model.non_trainable_variables)
        scales = self._loss_scales(params, state, batch)
        follow_examples(self.decision, self.exchange, lambda: self._total_denominators(params, state, batch)[0])
        gradients, packed, state, assigned = self._contribute(params, state, batch, seed_path, loss_scale.scale, scales)
        norm, replicas = self._own_norm(gradients), self.replicas
        vector = self._flagged(packed, norm * float(replicas) if replicas > 1 else norm)
        early = [gradients[index] for index in self.exchange.first_ready_indices]
        computed = self._replica_clock([vector])
        first = self._replica_clock(early) if early else computed

        # 3, 4, 5: one exchange, clipping, the optimizer's update.
        vector, norm, exchanged, done = self._reduce_and_apply(
            gradients, vector, norm, state, assigned, step, lr_multiplier, wants_norm
        )

        # 6: the loss scale. (The schedule's learning rate is part of the update.)
        if self._scale_loss:
            finite = tf.equal(vector[sidecar.NON_FINITE], 0.0)
            loss_scale = update_loss_scale(loss_scale, finite, self._growth_steps)
        with tf.control_dependencies([done]):  # outside XLA, the report would be available earlier
            sums = tf.concat([[norm], vector[: self.sidecar.report_length]], axis=0)
        times = () if self.plan.single_xla_program else (first, computed, exchanged, self.clock([done]))
        return StepReport(sums, loss_scale, times)

    def _reduce_and_apply(
        self,
        gradients: Tensors,
        vector: tf.Tensor,
        norm: tf.Tensor,
        state: Tensors,
        assigned: dict[int, tf.Tensor],
        step: tf.Tensor,
        lr_multiplier: tf.Tensor,
        wants_norm: tf.Tensor | None,
    ) -> Reduced:
        """Parts 3 to 5, from this replica's gradient sums, their norm, and its part of the sidecar."""
        # 3: one exchange, which also determines whether all replicas are finite.
        gradients, vector = self.exchange.reduce_sums(gradients, vector, self.decision)
        vector = self._reported(vector)
        exchanged = self._replica_clock([vector, *gradients])

        # 4: the reduced gradient's mean, clipped: one factor.
        if self.replicas > 1 or self.exchange.state:
            norm = self._norm_if_needed(gradients, wants_norm)  # otherwise it is this replica's own norm
        factor, norm = self._factor_and_norm(vector, norm)

        # 5: the optimizer's update, unless a replica is non-finite or there is nothing to learn from.
        gradients = self.core.unreached.left_out(gradients, self.core.model.trainable_variables)
        reduced = _ReducedGradients(gradients, vector, state, assigned, factor, step, lr_multiplier)
        done = tf.cond(self.sidecar.should_apply(vector), lambda: self._apply(reduced), lambda: tf.identity(factor))
        return Reduced(vector, norm, exchanged, done)

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
        compiles_update: bool = False,
        clip_norm: float = 0.0,
        scale_loss: bool = False,
        growth_steps: int = 2000,
        timed: bool = True,
    ) -> None:
        """Plans the step, which the first call of `run` traces.

        Args:
          core: The model and its objective.
          optimizer: A built Keras optimizer.
          exchange: Gradient exchange, built for the model's trainable variables.
          strategy: The strategy that the model was created under.
          schedule: Learning rate at a step (int64 scalar tensor -> float32 scalar), or None for the optimizer's own.
          seed: Seed of dropout and augmentation.
          jit_compile: Compile forward, backward and update with XLA.
          compiles_update: Compile the update even if forward and backward are not compiled.
          clip_norm: Global L2 norm that the reduced mean gradient is clipped to; 0 for none.
          scale_loss: Whether the loss scale is in use (mixed_float16).
          growth_steps: Finite steps after which the loss scale doubles.
          timed: Measure the time of every step. Must be off if op determinism is on, because TensorFlow 2.21 then
            refuses its clock (the Timestamp kernel).
        """
        self.core, self.optimizer, self.exchange, self.strategy = core, optimizer, exchange, strategy
        self.sidecar = Sidecar.of_core(core, self.replicas)
        self.plan = compilation_plan(
            replicas=self.replicas,
            local_devices=self._local_devices(),
            on_tpu=isinstance(strategy, tf.distribute.TPUStrategy),
            jit_compile=jit_compile,
            compiles_update=compiles_update,
            waits_for_host=self.waits_for_host,
        )
        self._schedule = schedule
        self._seed, self._clip_norm, self._scale_loss = seed, clip_norm, scale_loss
        self._growth_steps, self._timed = growth_steps, timed
        # Seed states are never stored: every step derives its own.
        self._state = [variable for variable in core.model.non_trainable_variables if not is_seed_state(variable)]
        self._make_programs()
        self.run = tf.function(self._run, autograph=False, reduce_retracing=True)
        # TensorFlow 2.21 counts traces by code, over all objects: a program with several short runs would get warnings
        # about traces that each run needs once.
        self.run._omit_frequent_tracing_warning = True

    def _make_programs(self) -> None:
        """Compiles the methods as planned, and replaces the plain ones."""
        plan = self.plan
        self._contribute = compiled(self._contribution, plan.compiles_gradients)
        self._denominators = compiled(self.core.denominators, plan.compiles_gradients)
        # A function for each replica, because it refers to the replica's own variables, which it changes in place: new
        # values as outputs would need as much memory as weights and optimizer state.
        count = len(self._local_devices())
        self._updates = [compiled(self._apply_update, plan.compiles_update, apart=count > 1) for _ in range(count)]
        self._whole_step = compiled(self._single_program, plan.single_xla_program and not plan.strategy_compiles)
        squared = norms.squared_in_xla if plan.single_xla_program else None
        self._norm: Callable[[Tensors], tf.Tensor] = functools.partial(norms.l2_norm, squared=squared)

    def _run(
        self,
        iterator: Iterator[Any],
        first_step: tf.Tensor,
        steps: tf.Tensor,
        loss_scale: LossScale,
        lr_multiplier: tf.Tensor,
        wants_norms: tf.Tensor | bool = True,
    ) -> StepsResult:
        """Runs `steps` training steps, see `run_steps`."""
        return run_steps(self, iterator, first_step, steps, loss_scale, lr_multiplier, wants_norms)

    def run_on_replicas(
        self, batch: Any, step: tf.Tensor, lr_multiplier: tf.Tensor, loss_scale: LossScale, wants_norm: tf.Tensor
    ) -> StepReport:
        """One step on every replica of this process. It is done when the last replica is.

        Args:
          batch: Distributed `(x, y, weight)`, each with a leading micro-batch axis.
          step: Int64 scalar: number of the step.
          lr_multiplier: Float32 scalar that the scheduled learning rate is multiplied by.
          loss_scale: The loss scale of this step.
          wants_norm: Bool scalar: whether norms are requested.

        Returns:
          The report of the first replica, with four times.
        """
        if self.plan.single_xla_program:
            results = self.strategy.run(self._whole_step, args=(batch, step, lr_multiplier, loss_scale))
        else:
            results = self.strategy.run(self._replica_step, args=(batch, step, lr_multiplier, loss_scale, wants_norm))
        local = [self._local(part) for part in tf.nest.flatten(results)]
        report: StepReport = tf.nest.pack_sequence_as(results, [part[0] for part in local])
        if self.plan.single_xla_program:  # an XLA program has no clock: its whole time counts as computing
            return report._replace(times=(self.clock([part[0] for part in local]),) * 4)
        last = tf.reduce_max(tf.stack(local[-1])) if len(local[-1]) > 1 else local[-1][0]
        return report._replace(times=(*report.times[:-1], last))

    replicas = property(lambda self: self.strategy.num_replicas_in_sync, doc="Replicas that move together.")

    def next_batch(self, iterator: Iterator[Any]) -> Any:
        """The next batch for the replicas of this process."""
        return replica.next_batch(self.strategy, iterator)

    def counted_weights(self) -> Tensors:
        """The values of the trainable weights that this process counts in their norm."""
        variables = self.core.model.trainable_variables
        return [whole_tensor(variable, self._local(variable.value)[0]) for variable in variables]

    def sum_over_parts(self, value: tf.Tensor) -> tf.Tensor:
        """The sum of a scalar over the processes that count different weights."""
        return value

    def learning_rate(self, step: tf.Tensor, lr_multiplier: tf.Tensor) -> tf.Tensor:
        """The learning rate of a step (int64 scalar): a float32 scalar, from the schedule or the optimizer itself."""
        if self._schedule is not None:
            return tf.cast(self._schedule(step), tf.float32) * lr_multiplier
        return tf.cast(self.optimizer.learning_rate, tf.float32)

    def local_tensors(self, batch: Any) -> Tensors:
        """The tensors of a distributed batch on all devices of this process."""
        return [part for value in tf.nest.flatten(batch) for part in self._local(value)]

    def clock(self, after: list[Any]) -> tf.Tensor:
        """Host time in seconds (float64 scalar) once everything in `after` exists; zero if the step is not timed."""
        if not self._timed:
            with tf.control_dependencies(after):  # no time is taken, but the order is kept
                return tf.identity(tf.zeros([], tf.float64))
        with tf.device("/device:CPU:0"), tf.control_dependencies(after):
            return run_unordered(tf.timestamp())

    def _replica_number(self, context: tf.distribute.ReplicaContext) -> tf.Tensor:
        """Index of this replica among those of all workers: int32 scalar. Seeds depend on it."""
        return tf.convert_to_tensor(context.replica_id_in_sync_group)

    def _replica_clock(self, after: list[Any]) -> tf.Tensor:
        return tf.zeros([], tf.float64) if self.plan.single_xla_program else self.clock(after)

    def _local(self, value: Any) -> tuple[Any, ...]:
        return self.strategy.experimental_local_results(value)

    def _single_program(
        self, batch: Any, step: tf.Tensor, lr_multiplier: tf.Tensor, loss_scale: LossScale
    ) -> StepReport:
        """The step that always computes its gradient's norm: within XLA that is cheaper than a branch."""
        return self._replica_step(batch, step, lr_multiplier, loss_scale, None)

    def _loss_scales(self, params: Tensors, state: Tensors, batch: Any) -> tf.Tensor | None:
        """The factors of loss terms that have different denominators; None if all have the same.

        A sum of gradients cannot be divided by several numbers, so these are summed over the replicas beforehand.
        """
        totals = self.core.objective.totals
        if not totals.needs_scales:
            return None
        return totals.scales(self._total_denominators(params, state, batch))

    def _total_denominators(self, params: Tensors, state: Tensors, batch: Any) -> tf.Tensor:
        """`Core.denominators`, summed over all replicas."""
        return sum_over_replicas(self._denominators(params, state, batch))

    def _contribution(
        self,
        params: Tensors,
        state: Tensors,
        batch: Any,
        seed_path: tuple[tf.Tensor, tf.Tensor],
        scale: tf.Tensor,
        scales: tf.Tensor | None,
    ) -> tuple[Tensors, tf.Tensor, Tensors, dict[int, tf.Tensor]]:
        """This replica's gradient sums, its part of the sidecar, the base of the new state, and assigned weights."""
        seed = step_seed(self._seed, *seed_path)
        sums, gradients = self._accumulated(params, state, batch, seed, scale, scales)
        before = [*state, *(params[place] for place in self.core.overwritten)]
        sums = sums._replace(state=[*sums.state, *sums.overwritten])
        return gradients, self.sidecar.pack(sums, before), self.sidecar.base(before, sums.state), sums.assigned

    def _accumulated(
        self, params: Tensors, state: Tensors, batch: Any, seed: tf.Tensor, scale: tf.Tensor, scales: tf.Tensor | None
    ) -> tuple[LocalSums, Any]:
        """The sums over the micro-batches, and their gradients without the loss scale."""
        sums = self.core.accumulate(params, state, batch, seed, scale if self._scale_loss else None, scales)
        return sums, self._unscaled(sums.gradients, scale)

    def _unscaled(self, gradients: Tensors, scale: tf.Tensor) -> Tensors:
        # Residuals of the exchange are kept from step to step, and the loss scale changes.
        return self.core.each(gradients, lambda gradient: gradient / scale) if self._scale_loss else gradients

    def _own_norm(self, gradients: Any) -> tf.Tensor:
        """Norm of this replica's contribution; not finite if some of it is not."""
        return self._norm(gradients)

    def _flagged(self, packed: tf.Tensor, norm: tf.Tensor) -> tf.Tensor:
        """This replica's part of the sidecar, see `Sidecar.flag`."""
        return Sidecar.flag(packed, norm)

    def _reported(self, vector: tf.Tensor) -> tf.Tensor:
        """The summed sidecar, with the reports of the replica's other devices."""
        return vector

    def _factor_and_norm(self, vector: tf.Tensor, norm: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The factor from gradient sums to their clipped mean, and the norm of the mean before clipping.

        Args:
          vector: The summed sidecar.
          norm: Norm of the gradient sums.
        """
        # The denominator is zero if nothing counted, and may be negative: a sum of sample weights.
        factor = tf.math.divide_no_nan(1.0, vector[self.sidecar.denominator])
        norm = norm * tf.abs(factor)
        if self._clip_norm:
            factor = factor * (self._clip_norm / tf.maximum(norm, self._clip_norm))
        return factor, norm

    def _norm_if_needed(self, gradients: Tensors, wants_norm: tf.Tensor | None) -> tf.Tensor:
        """The norm if clipping or the report of this step needs it; otherwise zero."""
        if wants_norm is None or self._clip_norm:
            return self._norm(gradients)
        return tf.cond(wants_norm, lambda: self._norm(gradients), lambda: tf.zeros([]))

    def _local_devices(self) -> tuple[str, ...]:
        devices: tuple[str, ...] = self.strategy.extended.worker_devices
        return devices

    def _apply(self, reduced: _ReducedGradients) -> tf.Tensor:
        """`_apply_update`, compiled as planned."""
        programs = self._updates
        return programs[replica.static_replica_id() % len(programs) if len(programs) > 1 else 0](reduced)

    def _apply_update(self, reduced: _ReducedGradients) -> tf.Tensor:
        """Updates this replica's variables; returns the factor when that is done."""
        model = self.core.model
        groups = [model.trainable_variables, self.optimizer.variables, self._state]
        params, optimizer, state = (replica.own(variables) for variables in groups)
        weights, slots = ([copy.read_value() for copy in copies] for copies in (params, optimizer))
        new = self._updated(weights, slots, reduced)
        stored = replica.assign([*params, *optimizer, *state], [value for group in new for value in group])
        with tf.control_dependencies(stored):
            return tf.identity(reduced.factor)

    def _updated(
        self, params: Tensors, optimizer: Tensors, reduced: _ReducedGradients
    ) -> tuple[Tensors, Tensors, Tensors]:
        """New weights, optimizer state and model state."""
        gradients = list(reduced.gradients)
        rate = self.learning_rate(reduced.step, reduced.lr_multiplier) if self._schedule is not None else None
        params = [reduced.assigned.get(place, param) for place, param in enumerate(params)]
        state = self.sidecar.state(reduced.vector, reduced.state)
        others = self.core.model.non_trainable_variables
        for place, value in zip(self.core.overwritten, state[len(others) :], strict=True):
            gradients[place] = value  # which no factor applies to
        how = {"factor": reduced.factor, "group_bytes": self.plan.update_group_bytes}
        new_params, new_optimizer = self._pure_apply(self.optimizer, optimizer, params, gradients, rate, **how)
        return new_params, new_optimizer, self._without_seeds(state[: len(others)])

    def _pure_apply(self, *args: Any, **kwargs: Any) -> tuple[Tensors, Tensors]:
        """`pure_apply`."""
        return pure_apply(*args, **kwargs)

    def _without_seeds(self, state: Tensors) -> Tensors:
        """Those values of the model's non-trainable variables that are stored."""
        every = zip(self.core.model.non_trainable_variables, state, strict=True)
        return [value for variable, value in every if not is_seed_state(variable)]


class _ReducedGradients(NamedTuple):
    """The inputs of a replica's update; all but `state` are the same on every replica.

    Attributes:
      gradients: Gradient sums over all replicas; None for a weight that no gradient reaches.
      vector: The summed sidecar.
      state: The model state that this replica has computed, and the values of overwritten variables.
      assigned: Weights that the forward pass assigned, by index; the update starts from them.
      factor: Turns the gradient sums into the gradient to apply: their mean, clipped.
      step: Int64 scalar: number of the step.
      lr_multiplier: Float32 scalar that the scheduled learning rate is multiplied by.
    """

    gradients: list[tf.Tensor | None]
    vector: tf.Tensor
    state: Tensors
    assigned: dict[int, tf.Tensor]
    factor: tf.Tensor
    step: tf.Tensor
    lr_multiplier: tf.Tensor

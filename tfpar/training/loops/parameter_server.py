"""The loop of asynchronous training with parameter servers (Dean et al. 2012, Downpour SGD).

The variables are on the parameter servers. The chief assigns numbered steps; a worker that gets step k fetches exactly
the examples that belong to it, pulls the weights, computes a gradient and pushes it, without waiting for other workers.
A gradient may be computed on weights that are a few steps old by the time it is applied; that is the price, and why
runs are not reproducible. The loss of any task ends the run, which resumes from the newest checkpoint.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import time
from collections.abc import Sequence
from typing import Any

from tfpar import inputs
from tfpar.checkpoint import run_state
from tfpar.config import ConfigError
from tfpar.exchange import Traffic
from tfpar.guards import bad_examples
from tfpar.monitor import samples
from tfpar.optim.keras_internals import is_seed_state
from tfpar.optim.server_update import apply_on_servers
from tfpar.process.activity import activity
from tfpar.training import norms
from tfpar.training.evaluation import BatchCalls
from tfpar.training.loops.context import RunContext
from tfpar.training.loops.hooks import Hook, HookRows
from tfpar.training.loops.snapshot_evaluation import SnapshotEvaluation
from tfpar.training.loops.state import Interval, LoopState
from tfpar.training.seeds import step_seed

import numpy as np
import tensorflow as tf

# Enough that no worker waits for the chief, few enough that a gradient is not computed on very old weights.
_IN_FLIGHT_PER_WORKER = 2
_REPORT_SECONDS = 0.5


class ParameterServerLoop:
    """Runs steps on workers, as the chief of `parameter_server`. A step is the push of one worker.

    Args:
      context: The run. The examples are read on the workers, so they must be portable: in memory or generated.
      waits_for_evaluation: Whether training waits until an evaluation has ended, because a callback needs its results;
        otherwise the chief evaluates while training continues.

    Attributes:
      compiles_next: False: compilation is part of the first step.
    """

    def __init__(self, context: RunContext, *, waits_for_evaluation: bool = False) -> None:
        program, validation = context.program, context.info.validation
        self._context, self._program = context, program
        self._waits = waits_for_evaluation
        self._rows: HookRows | None = None
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(program.strategy)
        self._push = tf.function(self._push_step, autograph=False)
        jit_compile = program.jit_compile or None
        self._gradients = tf.function(program.core.accumulate_alone, jit_compile=jit_compile, autograph=False)
        self._evaluation = SnapshotEvaluation(program, validation) if validation is not None else None
        self.compiles_next = False
        self._traced = False

    @property
    def traffic(self) -> Traffic:
        """What one step costs on the wire: a worker pulls the weights and pushes the gradient, both dense."""
        size = 4 * sum(variable.shape.num_elements() for variable in self._program.model.trainable_variables)
        return Traffic("none", "push_pull", size, 2 * size, 2 * size)

    def check(self) -> None:
        """Checks the examples to evaluate on. There is nothing to compare: only the chief decides what to run."""
        if self._evaluation:
            self._evaluation.check()

    def check_weights(self) -> None:
        """Nothing to compare: all workers use the weights on the servers."""

    def begin(self, rows: HookRows, state: LoopState) -> None:
        """Stores the receiver of reports; workers need only the number of a step."""
        del state
        self._rows = rows

    def advance(self, state: LoopState, stops: Sequence[int]) -> LoopState:
        """Hands out steps up to the nearest of `stops`, or fewer if asked to end, and waits for all of them."""
        context, until = self._context, min(stops)
        window = _IN_FLIGHT_PER_WORKER * self._program.topology.workers
        multiplier = tf.constant(state.lr_multiplier, tf.float32)
        pending: collections.deque[Any] = collections.deque()
        reports: list[Any] = []
        next_step, reported = state.step, time.perf_counter()
        while state.step + len(reports) < until:
            while next_step < until and len(pending) < window and not context.preemption.received:
                arguments = (tf.constant(next_step, tf.int64), multiplier)
                pending.append(self._coordinator.schedule(self._push, args=arguments))
                next_step += 1
            if not pending:
                break
            step = state.step + len(reports)
            with bad_examples.named(context.info.train, functools.partial(context.batches.indices, step, 1)):
                with activity("tracing the step on the workers", shown=not self._traced and self._program.reports):
                    reports.append(pending.popleft().fetch())
                self._traced = True
            context.watchdog.progress(f"the steps after {step + 1}")
            now = time.perf_counter()
            if now - reported >= _REPORT_SECONDS or not pending:
                state = self._collect(self._report(state, reports, now - reported), wait=False)
                reports, reported = [], now
        return state.replace(preempted=context.preemption.received)

    def _push_step(self, step: tf.Tensor, lr_multiplier: tf.Tensor) -> tuple[tf.Tensor, ...]:
        """One step, on a worker: fetch, pull, compute, push."""
        program, pipeline = self._program, self._context.info.pipeline
        model, workers = program.model, program.topology.workers
        began = tf.timestamp()
        number, share = step // workers, step % workers
        assert isinstance(pipeline, inputs.Pipeline)
        batch = pipeline.batch(number, share)
        with tf.control_dependencies([batch[2]]):
            fetched = tf.timestamp()
            params = [variable.value.read_value() for variable in model.trainable_variables]
            state = [variable.value.read_value() for variable in model.non_trainable_variables]
        # The seed that this share of the batch has in a synchronous run with as many replicas.
        seed = step_seed(program.config.train.seed, number, share)
        sums = self._gradients(params, state, batch, seed)
        if sums.assigned:
            names = ", ".join(model.trainable_variables[place].path for place in sums.assigned)
            raise ConfigError(
                f"--strategy=parameter_server: the model assigns its trainable weights {names} in its forward pass, "
                "on which asynchronous workers cannot agree. Use --strategy=multi_worker."
            )
        factor = tf.math.divide_no_nan(1.0, program.core.denominator(sums))
        mean = [gradient * factor for gradient in sums.gradients]
        norm = norms.l2_norm(mean)
        if clip_norm := program.config.optimizer.clip_norm:
            clipping = clip_norm / tf.maximum(norm, clip_norm)
            mean = [gradient * clipping for gradient in mean]
        finite = tf.math.is_finite(norm) & tf.math.is_finite(sums.loss)
        with tf.control_dependencies([norm]):
            computed = tf.timestamp()
        rate = self._rate_at(step, lr_multiplier)

        def push() -> tf.Tensor:
            program = self._program
            gradients = program.core.unreached.left_out(mean, model.trainable_variables)
            apply_on_servers(program.optimizer, program.strategy, gradients, model.trainable_variables, rate)
            for variable, old, new in zip(model.non_trainable_variables, state, sums.state, strict=True):
                # Batch statistics and counters: every worker changes them a little. Booleans have no sum.
                dtype = tf.as_dtype(variable.dtype)
                if (dtype.is_floating or dtype.is_integer) and not is_seed_state(variable):
                    variable.value.assign_add(new - old)
            return tf.constant(True)

        # At the end of an epoch a worker's share may be empty: there is nothing to push, and this is not an error.
        pushed = tf.cond(finite & (sums.count > 0), push, lambda: tf.constant(False))
        with tf.control_dependencies([pushed]):
            done = tf.timestamp()
        zero = tf.zeros([], tf.float64)
        durations = tf.stack([fetched - began, computed - fetched, zero, done - computed, done - began, zero])
        return sums.loss * factor, sums.count, finite, norm, rate, durations, *sums.metrics

    def _rate_at(self, step: tf.Tensor, lr_multiplier: tf.Tensor) -> tf.Tensor:
        if self._context.schedule is not None:
            return tf.cast(self._context.schedule(step), tf.float32) * lr_multiplier
        return tf.cast(self._program.optimizer.learning_rate, tf.float32)

    def _report(self, state: LoopState, reports: Sequence[Any], seconds: float) -> LoopState:
        """Records finished steps, in order."""
        context, first = self._context, state.step
        losses, counts, finite, gradient_norms, rates, durations, *metrics = (
            np.stack(column) for column in zip(*reports, strict=True)
        )
        applied = finite & (counts > 0)
        context.skipped_examples.note(first, counts)
        # The monitor leaves out values that are not finite.
        losses = np.where(counts > 0, losses, np.nan)
        done = Interval(losses, counts, applied, [column[finite].sum(axis=0) for column in metrics])
        first_step = context.info.train.info.first_step
        state = state.advanced(done, steps_per_epoch=context.steps_per_epoch, first_step=first_step)
        # Workers overlap: the times of the parts of a step are scaled to the time between steps on the chief.
        durations = durations * (seconds / max(durations[:, 4].sum(), 1e-9))
        scalars = {
            "learning_rate": float(rates[-1]),
            "gradient_norm": float(gradient_norms[-1]),
            "skipped_steps": float(state.skipped),
            "skipped_examples": float(context.skipped_examples.count),
        }
        context.monitor.on_steps(state.step, losses, durations, scalars, examples=counts, metric_sums=done.metric_sums)
        context.files.restarts.reached(state.step)
        steps = np.arange(first, state.step)
        has_share = context.batches.examples_in(steps)[:, 0] > 0  # the others are empty shares at the end of an epoch
        context.non_finite.note(steps[has_share], applied[has_share], losses[has_share])
        if self._rows:
            self._rows.record(done)
        return state

    def evaluate(self, state: LoopState, calls: BatchCalls | None) -> LoopState:
        """Starts to evaluate a snapshot of the weights on the chief; waits for it at the end, or for callbacks."""
        assert self._evaluation is not None
        assert calls is None  # `check_callbacks` refuses batch methods
        state = self._collect(state, wait=True)
        self._evaluation.start(state.step)
        state = state.replace(evaluating=state.step)
        return self._collect(state, wait=True) if self._waits or state.ending else state

    def _collect(self, state: LoopState, *, wait: bool) -> LoopState:
        """The state with the results of an evaluation that has ended; the checkpoint of its step may be the best."""
        snapshot = self._evaluation.collect(wait=wait) if self._evaluation else None
        if snapshot is None:
            return state
        monitor = self._context.monitor
        monitor.on_evaluation(snapshot.step, snapshot.results)
        if snapshot.text is not None:
            samples.write_continuation(monitor, snapshot.text, snapshot.step)
        state = state.evaluated(snapshot.step, snapshot.results)
        if state.best_step == snapshot.step < state.step:
            self._context.files.mark_best(snapshot.step)
        return state

    def rows_before(self) -> Sequence[Hook]:
        """Waits at the end for a running evaluation: its results belong in the last checkpoint."""
        every = self._context.info.total
        return [Hook(every, lambda state: self._collect(state, wait=True), also=lambda state: state.ending)]

    def rows_after(self) -> Sequence[Hook]:
        """None: there is no exchange to tune."""
        return []

    def params_sha256(self) -> str:
        """The digest of the trainable weights."""
        return run_state.params_sha256(self._program.model.trainable_variables)

    def at_stop(self) -> contextlib.AbstractContextManager[None]:
        """Nothing to do: the current weights are on the servers."""
        return contextlib.nullcontext()

    def conclude(self, state: LoopState) -> LoopState:
        """Nothing to do: no step is running."""
        return state

    def close(self) -> None:
        """Ends the thread that evaluates."""
        if self._evaluation:
            self._evaluation.close()

"""The loop for strategies whose replicas take steps together."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from tfpar import inputs
from tfpar.checkpoint.names import names_of
from tfpar.config import ConfigError
from tfpar.exchange import Traffic
from tfpar.guards import bad_examples
from tfpar.monitor import announce, samples, timings
from tfpar.monitor import summary as results
from tfpar.parallel import replica
from tfpar.parallel.split import shape_of
from tfpar.precision import LossScale
from tfpar.process.activity import activity
from tfpar.training.evaluation import AnyEvaluator, BatchCalls
from tfpar.training.loops.context import RunContext
from tfpar.training.loops.hooks import Hook, HookRows
from tfpar.training.loops.pacing import TARGET_SECONDS, NormPacing, StepsPerCall
from tfpar.training.loops.rounds import CALL_SECONDS, LoopRounds
from tfpar.training.loops.state import LoopState
from tfpar.training.loops.timed_rounds import OwnSteps, run_for
from tfpar.training.model.starting_values import starting_digests
from tfpar.training.step_loop import StepsResult
from tfpar.training.validate import validate_workers_agree

import numpy as np
import tensorflow as tf


class SynchronousLoop:
    """Runs steps in calls whose length adapts to the step time.

    Args:
      context: The run.
      evaluator: `(source, steps=)`: computes loss and metrics on a source.

    Attributes:
      compiles_next: Whether the next steps are compiled first.
    """

    def __init__(self, context: RunContext, evaluator: AnyEvaluator) -> None:
        self._context = context
        self._evaluator = evaluator
        self._step = context.program.step(context.schedule)
        rounds = context.program.rounds
        self._rounds = LoopRounds(context, rounds) if rounds else None
        per_call = context.program.config.train.steps_per_loop
        seconds = CALL_SECONDS if rounds and rounds.workers > 1 else TARGET_SECONDS
        self._steps_per_call = StepsPerCall(per_call, seconds)
        monitor = context.monitor
        self._norms = NormPacing(monitor.records, monitor.cadence, context.info.total, timed=monitor.timed_points)
        self._last_steps = 1
        self._iterator: Any = None
        self._rows: HookRows | None = None
        self.compiles_next = True

    @property
    def traffic(self) -> Traffic:
        """What one step costs on the wire."""
        program = self._context.program
        if self._rounds:
            between = self._rounds.traffic
        else:
            replicas = program.topology.replicas
            exchanged = program.exchange.traffic(replicas, self._step.sidecar.length)
            exchanged = exchanged.with_sum(program.own.summed_elements, replicas)
            between = program.placing.gathered(program.model, program.config).added(exchanged, replicas)
        return dataclasses.replace(between, model_axis_bytes=program.placing.model_axis_bytes)

    def check(self) -> None:
        """Refuses workers that were not given the same run; they would wait for each other forever."""
        context, info = self._context, self._context.info
        # The same names on every worker: each is compared in a separate call.
        sources = {"training data": info.train, "validation data": info.validation}
        facts = {name: source.info.fingerprint if source else "none" for name, source in sources.items()} | {
            "steps in all": info.total,
            "shapes of the weights": [shape_of(weight) for weight in info.model.weights],
        }
        shared = [source for source in (info.train, info.validation) if isinstance(source, inputs.StreamSource)]
        first = "first example of each stream"
        facts[first] = [source.first() for source in shared if source.first and source.sharding == "example"]
        shown = {
            name: f"{source.info.name}, {source.info.num_examples} examples, fingerprint {source.info.fingerprint}"
            for name, source in sources.items()
            if source
        }
        shown[first] = f"{facts[first]}; an iterable that shuffles needs the same seed on every worker"
        validate_workers_agree(context.agreement, info.config, facts, shown)

    def check_weights(self) -> None:
        """Refuses workers whose models do not start from the same values. All workers call it after resuming.

        They would add up gradients of different models, and each would move its own weights by the sum.

        Raises:
          ConfigError: Names the workers, and the first weight or state that differs.
        """
        context, program = self._context, self._context.program
        agreement = context.agreement.during("the comparison of weights")
        if agreement.size == 1:
            return
        with activity("comparing the weights of the workers", shown=program.reports), self.at_stop():
            values = starting_digests(program.model, parts_on_workers=program.topology.parts_on_workers)
            own = [digest for _, digest in values]  # Keras' numbers in paths may differ between workers
            if agreement.all_equal(own):
                return
            first, *others = agreement.gather(own)
        workers = ", ".join(str(rank) for rank, each in enumerate(others, start=1) if each != first)
        differing = [path for (path, _), *digests in zip(values, first, *others, strict=True) if len({*digests}) > 1]
        raise ConfigError(
            f"the workers' models start from different values: {len(differing)} of {len(first)} weights and states "
            f"differ from those of worker 0 on worker {workers}, the first of them {differing[0]!r}. Load, set and "
            "adapt weights in the same way on every worker: from the same file, with the same seed, and by adapt() on "
            "the same examples."
        )

    def begin(self, rows: HookRows, state: LoopState) -> None:
        """Opens the input at the state's step."""
        self._rows = rows
        program = self._context.program
        start = self._rounds.position(state.step) if self._rounds else state.step
        self._iterator = program.iterate(self._context.info.pipeline, start)

    def advance(self, state: LoopState, stops: Sequence[int]) -> LoopState:
        """Runs some steps in one call, not past the nearest of `stops`; all workers run the same number."""
        context = self._context
        self.compiles_next = False
        if self._rounds:
            stops = [*stops, self._rounds.begin(state.step)]
        stops = [*stops, context.monitor.next_boundary(state.step)]
        if self._rounds and self._rounds.seconds:
            return self._run_steps(state, min(stops) - state.step)
        steps = self._steps_per_call.next(state.step, list(stops))
        return self._run_steps(state, steps)

    def _run_steps(self, state: LoopState, steps: int) -> LoopState:
        """Runs some steps and reports them."""
        context, monitor = self._context, self._context.monitor
        monitor.before_step(state.step, self._weights)
        began, first = time.perf_counter(), state.step
        # With --round_seconds, `steps` is only a limit. A round has about as many as the last one.
        wants_norms = self._norms.wanted(first, self._last_steps if self._rounds and self._rounds.seconds else steps)
        own = self._take_steps(state, steps, wants_norms)
        durations, result = own.durations, own.last
        own_seconds = timings.own_seconds(durations)
        if not durations.any():  # no clock inside the step: all its time counts as computing
            durations[:, [1, 4]] = (time.perf_counter() - began) / len(durations)
        # All workers must make calls of the same length: TensorFlow 2.21 distinguishes collectives inside a loop by the
        # iteration, and a worker in another iteration would wait forever.
        seconds = time.perf_counter() - began
        norms_next = self._norms.own_answer(wants_norms, steps, seconds)
        report = np.array([seconds, float(context.preemption.received), own_seconds, norms_next])
        agreement = context.agreement.during(f"step {first + 1}")
        if self._rounds and self._rounds.seconds:
            done, reports = self._rounds.join_timed(own, state.step, report, agreement)
            steps = len(done.losses)
            durations = np.repeat(durations.sum(axis=0, keepdims=True) / steps, steps, axis=0)
        elif self._rounds:
            done, reports = self._rounds.join(own.done, own.loss_counts, report, agreement)
        else:
            done, reports = own.done, np.stack(agreement.gather_arrays(report))
        seconds_of, asked, worker_seconds, answers = reports.T
        self._norms.answered(answers)
        self._last_steps = steps
        context.skipped_examples.note(first, done.counts)
        self._steps_per_call.measured(steps, float(seconds_of.mean()))
        state = state.advanced(
            done, steps_per_epoch=context.steps_per_epoch, first_step=context.info.train.info.first_step
        ).replace(loss_scale=result.loss_scale, preempted=bool(asked.any()))
        if self._rounds:
            self._rounds.end_if_due(state, durations)
        monitor.on_steps(
            state.step,
            done.losses,
            durations,
            self._scalars(result, state, wants_norms),
            examples=done.counts,
            metric_sums=done.metric_sums,
            worker_seconds=worker_seconds.tolist(),
        )
        monitor.after_step(state.step, self._weights)
        context.files.restarts.reached(state.step)
        context.non_finite.note(np.arange(first, state.step), done.applied, done.losses)
        if self._rows:
            self._rows.record(done)
        return state

    def _take_steps(self, state: LoopState, steps: int, wants_norms: bool) -> OwnSteps:
        """Takes this number of steps on this worker; with `--round_seconds`, at most this number."""
        context = self._context
        pipeline, worker = context.info.pipeline, context.program.topology.data_worker
        multiplier = (context.plateau.multiplier if context.plateau else 1.0) * state.lr_multiplier
        start = self._rounds.position(state.step) if self._rounds else state.step

        def call(done: int, count: int, scale: LossScale | None, first: int) -> tuple[StepsResult, np.ndarray]:
            with (
                bad_examples.named(context.info.train, lambda: pipeline.indices(start + done, count, worker)),
                context.monitor.marked_step(first),
            ):
                arguments = tf.constant(first, tf.int64), tf.constant(count), scale
                factor, norms = tf.constant(multiplier, tf.float32), tf.constant(wants_norms)
                result = self._step.run(self._iterator, *arguments, factor, norms)
                return result, result.durations.numpy()

        rounds = self._rounds
        if not (rounds and rounds.seconds):
            return OwnSteps.of([call(0, steps, state.loss_scale, state.step)])
        scales, (seconds, most) = [state.loss_scale], rounds.limits(steps)

        def call_next(done: int, count: int) -> tuple[StepsResult, np.ndarray]:
            # The run's step at that time, by which the learning rate goes, if all keep their speed.
            result, durations = call(done, count, scales[-1], state.step + done * steps // most)
            scales.append(result.loss_scale)
            # Workers wait for each other until the slowest has compiled the step.
            context.watchdog.progress(f"a round after step {state.step}", patient=rounds.is_first)
            return result, durations

        return OwnSteps.of(run_for(seconds, most, call_next, lambda: context.preemption.received))

    def _weights(self) -> dict[str, np.ndarray]:
        """The trainable weights by path, from this worker's first replica."""
        program, variables = self._context.program, self._context.program.model.trainable_variables
        if program.topology.parts_on_workers:  # the others do not take part
            return {variable.path: replica.first(variable).numpy() for variable in variables}
        values = program.first_copies(variables)
        return {variable.path: value.numpy() for variable, value in zip(variables, values, strict=True)}

    def _scalars(self, result: StepsResult, state: LoopState, has_norms: bool) -> dict[str, float]:
        """The values that the monitor records for the last step."""
        scalars = {
            "learning_rate": float(result.learning_rate),
            "loss_scale": float(result.loss_scale.scale),
            "skipped_steps": float(state.skipped),
            "skipped_examples": float(self._context.skipped_examples.count),
        }
        if has_norms:
            scalars |= {f"{name}_norm": float(norm) for name, norm in result.norms._asdict().items()}
        scalars |= self._context.program.own.recorded(state.step)
        if self._rounds:
            scalars |= self._rounds.scalars()
        if self.traffic.wire_bytes:
            scalars |= self._context.program.exchange.observed()
        return scalars

    def evaluate(self, state: LoopState, calls: BatchCalls | None) -> LoopState:
        """Evaluates now, on all workers, and feeds the plateau schedule."""
        context, program, validation = self._context, self._context.program, self._context.info.validation
        assert validation is not None
        with program.averages.shown():
            found = self._evaluator(validation, steps=program.config.train.eval_steps, calls=calls)
            state = state.evaluated(state.step, found)
            context.monitor.on_evaluation(state.step, state.results)
            if program.topology.is_chief and not program.topology.parts_on_workers:  # has all weights locally
                self._show_samples(validation, state.step)
        if context.plateau:
            context.plateau.update(state.results["loss"])
        return state

    def _show_samples(self, validation: inputs.AnySource, step: int) -> None:
        """Records predictions, and writes a language model's text. Chief only."""
        program, monitor = self._context.program, self._context.monitor
        if not monitor.records:
            return
        self._show_predictions(validation, step)
        if samples.continues_text(validation):
            # Only the chief does this, so it must not touch the other replicas: it reads its own copies, as tensors.
            params = program.first_copies(program.eval_weights())
            others = program.first_copies(program.model.non_trainable_variables)
            with activity("writing sample text", shown=program.reports):
                text = samples.continue_first(program.text_sampler, params, others, validation, seed=step)
            samples.write_continuation(monitor, text, step)

    def _show_predictions(self, validation: inputs.AnySource, step: int) -> None:
        """Records the confusion matrix, and images with predictions. Chief only."""
        program, monitor = self._context.program, self._context.monitor
        if isinstance(validation, inputs.MadeSource):
            samples.write_made(monitor, validation, step)
        if self._evaluator.confusion is not None:
            samples.write_confusion(monitor, validation, self._evaluator.confusion, step)
        if samples.shows_predictions(validation):
            # As for text: copies of the first replica, as tensors.
            params = program.first_copies(program.eval_weights())
            others = program.first_copies(program.model.non_trainable_variables)
            samples.write_predictions(
                monitor, validation, lambda x: program.predict_alone(params, others, (x[tf.newaxis], (), ())), step
            )

    def rows_before(self) -> Sequence[Hook]:
        """None: an evaluation has ended when its row has run."""
        return []

    def rows_after(self) -> Sequence[Hook]:
        """Retuning the exchange, if requested."""
        every = self._context.program.config.exchange.exchange_retune_every
        return [Hook(every, self._retune)] if every else []

    def _retune(self, state: LoopState) -> None:
        program = self._context.program
        if not state.ending and program.exchange.retune():
            self._context.monitor.message(program.exchange.plan_table)
            if program.rounds:
                program.rounds.retrace()
            else:
                self._step = program.step(self._context.schedule, rebuild=True)
            announce.record_exchange(self._context.info, self._context.monitor, self.traffic, state.step)
            self.compiles_next = True

    def params_sha256(self) -> str:
        """The digest of the trainable weights, the same on every replica.

        Raises:
          RuntimeError: Replicas differ.
        """
        program = self._context.program
        digests = results.replica_digests(program.strategy, program.model.trainable_variables)
        found = sorted(set(digests))
        if not self._context.agreement.all_equal(found) or len(found) > 1:
            self._compare_each_weight()
        return digests[0]

    def _compare_each_weight(self) -> None:
        """Compares weights by their positions. Digests of all weights also differ if Keras counts layers differently on
        some workers, so that the order of their names does. All workers must call it.

        Raises:
          RuntimeError: Names the weights that differ between replicas.
        """
        program = self._context.program
        weights = program.model.trainable_variables
        every = self._context.agreement.gather(results.weight_digests(program.strategy, weights))
        first, *others = (copy for copies in every for copy in copies)
        differing = [
            name
            for name, digest, *found in zip(names_of(weights), first, *others, strict=True)
            if any(other != digest for other in found)
        ]
        if not differing:
            return
        workers = [number for number, copies in enumerate(every) if any(copy != first for copy in copies)]
        where = f"worker {', '.join(map(str, workers))}" if len(every) > 1 else "a replica"
        raise RuntimeError(
            f"the weights of replicas differ: {len(differing)} of {len(first)} weights, the first of them "
            f"{differing[0]!r}, on {where}. If a hook or callback changes weights, it must make the same change on "
            "every worker. Otherwise processors of different types, or a defective one, compute different numbers. The "
            "checkpoints have the weights of worker 0."
        )

    def at_stop(self) -> contextlib.AbstractContextManager[None]:
        """Context in which the model has the weights to evaluate and save, also within a round of local steps."""
        return self._rounds.showing_outer() if self._rounds else contextlib.nullcontext()

    def conclude(self, state: LoopState) -> LoopState:
        """Ends a round that is in progress."""
        return self._rounds.conclude(state) if self._rounds else state

    def close(self) -> None:
        """Frees the input."""
        self._iterator = None

"""One run of training: announce, resume, train between hooks, write the results. Every loop runs through it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Protocol

from tfpar.cluster import failure
from tfpar.config import ConfigError
from tfpar.exchange import Traffic
from tfpar.guards.interruption import ExitOnInterrupt
from tfpar.monitor import announce
from tfpar.monitor import summary as results
from tfpar.monitor.monitor import Monitor
from tfpar.monitor.run_info import RunOutcome
from tfpar.parallel.traced_gradients import graphs_released
from tfpar.process.activity import activity
from tfpar.process.exit_codes import Preempted
from tfpar.process.heap import keep_tensors_on_heaps, returns_freed_tensors
from tfpar.process.memory import RegularReturns, return_freed_memory
from tfpar.training.evaluation import BatchCalls
from tfpar.training.loops.context import RunContext
from tfpar.training.loops.history import EpochHistory, FitResult
from tfpar.training.loops.hooks import Hook, HookRows
from tfpar.training.loops.keras_callbacks import KerasCallbacks, check_batch_methods
from tfpar.training.loops.state import LoopState


class Loop(Protocol):
    """The operations that the synchronous and the parameter-server loop implement differently."""

    @property
    def traffic(self) -> Traffic:
        """The bytes that one step sends."""

    @property
    def compiles_next(self) -> bool:
        """Whether the next steps are compiled first."""

    def check(self) -> None:
        """Refuses workers that were not given the same run."""

    def check_weights(self) -> None:
        """Refuses workers that do not start from the same weights."""

    def begin(self, rows: HookRows, state: LoopState) -> None:
        """Prepares training from a state; `rows` receive the reports of steps."""

    def advance(self, state: LoopState, stops: Sequence[int]) -> LoopState:
        """Runs some steps, not past the nearest of `stops`; sets `preempted` if a worker was asked to end."""

    def evaluate(self, state: LoopState, calls: BatchCalls | None) -> LoopState | None:
        """Evaluates, or starts to; `calls` are called around each batch."""

    def rows_before(self) -> Sequence[Hook]:
        """Rows that only this loop has, which run after evaluation."""

    def rows_after(self) -> Sequence[Hook]:
        """Rows that only this loop has, which run after saving."""

    def at_stop(self) -> contextlib.AbstractContextManager[None]:
        """Context between steps in which the model has the weights that are evaluated and saved."""

    def conclude(self, state: LoopState) -> LoopState:
        """Finishes pending communication between workers after the last stop of this start; returns another state if
        this changed the weights."""

    def params_sha256(self) -> str:
        """The digest of the trainable weights; raises RuntimeError where replicas differ."""

    def close(self) -> None:
        """Releases the resources of the loop."""


class Run:
    """One call of `Trainer.fit`.

    Args:
      context: The run.
      loop: The loop that runs its steps.
      hooks: The user's hooks.
      callbacks: The user's Keras callbacks, or None.
    """

    def __init__(
        self, context: RunContext, loop: Loop, hooks: Sequence[Hook] = (), callbacks: KerasCallbacks | None = None
    ) -> None:
        self._context, self._loop, self._callbacks = context, loop, callbacks
        self._memory = RegularReturns() if returns_freed_tensors() else None
        self._stops = sorted({hook.every for hook in (*hooks, *(callbacks.ends_of_epochs if callbacks else ()))})
        self._history = EpochHistory(context.steps_per_epoch, context.monitor.on_epoch)
        config, total = context.info.config, context.info.total
        evaluation = Hook(context.evaluate_every, self._evaluate, also=lambda state: state.step == total or state.stop)
        saving = Hook(config.checkpoint.checkpoint_every or context.evaluate_every, self._save, also=self._must_save)
        self._rows = HookRows(
            [evaluation, *loop.rows_before()],
            hooks,
            [saving, *loop.rows_after()],
            ends_of_batches=callbacks.ends_of_batches if callbacks else (),
            watching=[self._history.hook],
            ends_of_epochs=callbacks.ends_of_epochs if callbacks else (),
            metric_results=context.info.metric_results,
            gather=lambda value, activity: context.agreement.during(activity).gather(value),
            scheduled=context.schedule is not None,
        )

    @property
    def monitor(self) -> Monitor:
        """The monitor that records the run."""
        return self._context.monitor

    def run(self) -> FitResult:
        """Announces, resumes, trains, and writes the results.

        Returns:
          The contents of `summary.json`, and the history.

        Raises:
          Preempted: A worker was asked to end before the run was finished.
          KeyboardInterrupt: Ctrl-C in a process that trains alone; one of several ends immediately, with exit code 130.
        """
        context = self._context
        with contextlib.ExitStack() as guards:
            guards.enter_context(context.watchdog)
            guards.enter_context(graphs_released())
            if context.program.topology.workers > 1 or not context.program.topology.synchronous:
                guards.enter_context(ExitOnInterrupt(self._report_interrupted))
            try:
                summary, finished = self._run()
                logs = self._callbacks.logs if self._callbacks else {}
                return self._history.result(summary, logs, finished=finished)
            except KeyboardInterrupt:
                self._report_interrupted()
                raise

    def _report_interrupted(self) -> None:
        announce.report_interrupted(self._context.info, self._context.monitor)

    def _check_hooks(self) -> None:
        """Refuses hooks or callbacks that only some workers have: the others would not stop at the same steps."""
        tests_batches = self._callbacks is not None and self._callbacks.tests_batches
        gathered, wanted = zip(*self._context.agreement.gather([self._stops, tests_batches]), strict=True)
        check_batch_methods("fit", wanted)
        if any(stops != self._stops for stops in gathered):
            text = ", ".join(f"every {stops or 'none'} on worker {rank}" for rank, stops in enumerate(gathered))
            raise ConfigError(
                f"fit(hooks=..., callbacks=...): the workers' hooks and callbacks run at different steps: {text}. Give "
                "every worker the same; where only the chief is to act, return from the function on the others."
            )

    def _run(self) -> tuple[dict[str, Any], bool]:
        """Returns the contents of `summary.json`, and whether the run is finished."""
        context, info = self._context, self._context.info
        self._loop.check()
        self._check_hooks()
        announce.announce(info, context.monitor, self._loop.traffic)
        announce.check_saving(info, context.monitor)
        state = context.files.resume_or_warm_start(info.total, context.agreement)
        if state.finished:
            previous = results.previous_summary(info.config.checkpoint.workdir, state.step)
            # All workers return or none does: a worker that continued would wait for one that returned.
            if context.agreement.mean(float(previous is not None)) == 1.0:
                assert previous is not None
                with context.program.averages.shown():
                    weights = context.program.eval_weights
                    return results.report_already_finished(info, previous, context.monitor, weights), True
        self._loop.check_weights()
        announce.record_run_info(info, context.monitor, self._loop.traffic, state.step)
        context.files.restarts.begin(state.step)
        # Named before SIGTERM ends the process again: a launcher may send it as soon as a worker is lost.
        named = failure.peer_errors_named(context.program.topology.cluster)
        with context.preemption, named, context.monitor.session():
            state = self._train(state)
            context.watchdog.progress("the last evaluation or checkpoint", patient=True)
            summary = self._finish(state)
        if state.preempted and not state.finished:
            raise Preempted
        context.preemption.hand_on()
        return summary, state.finished

    def _train(self, state: LoopState) -> LoopState:
        """Trains until the run is finished, or until this start is to end."""
        context, watchdog = self._context, self._context.watchdog
        last = min(state.total, state.step + (context.info.config.train.stop_after or state.total))
        if state.finished:
            return state
        self._loop.begin(self._rows, state)
        if self._callbacks:
            state = self._callbacks.begin(state)
            context.agreement.during("on_train_begin() of the callbacks").all_equal(0)
        while state.step < last and not state.ending:
            compiling = "compiling the step (XLA)" if context.program.jit_compile else "tracing the step"
            with activity(compiling, shown=self._loop.compiles_next and context.program.reports):
                state = self._loop.advance(state, [last, *self._rows.boundaries(state.step)])
            keep_tensors_on_heaps()  # the steps may have begun to read another dataset
            if self._memory:
                self._memory.after_steps()
            watchdog.progress(f"evaluation or checkpoint after step {state.step}", patient=True)
            with self._loop.at_stop():
                state = self._rows.run(state.replace(ending=state.step >= last or state.preempted))
            watchdog.progress(f"the steps after {state.step}", patient=self._loop.compiles_next)
        concluded = self._loop.conclude(state)
        if concluded is not state:
            self._context.files.save(concluded)
        return self._end_callbacks(self._callbacks, concluded) if self._callbacks else concluded

    def _end_callbacks(self, callbacks: KerasCallbacks, state: LoopState) -> LoopState:
        """Ends the callbacks; if one of them has restored weights, these are evaluated and saved in place of the
        last. A run that resumes continues from the checkpoint of its last step instead: restored weights do not belong
        to the optimizer's state, nor to the step."""
        if not state.finished:
            callbacks.end(state)
            return state
        before = self._loop.params_sha256()
        callbacks.end(state)
        if self._loop.params_sha256() == before:
            return state
        program = self._context.program
        program.averages.restart(program.model.trainable_variables)  # which are evaluated and exported
        state = state.replace(evaluated_at=-1, best_step=-1)
        self._context.files.save(state)
        return state

    def _evaluate(self, state: LoopState) -> LoopState | None:
        if self._context.info.validation is None:
            return None
        if self._callbacks is None:
            return self._loop.evaluate(state, None)
        with self._callbacks.evaluating() as (calls, tell):
            evaluated = self._loop.evaluate(state, calls)
            tell((evaluated or state).results)
        return evaluated

    def _must_save(self, state: LoopState) -> bool:
        """Whether to write a checkpoint at a stop where none is due by its number, or while steps are being skipped."""
        return state.ending or state.step in (state.best_step, state.evaluating)

    def _save(self, state: LoopState) -> None:
        if self._must_save(state) or not self._context.non_finite.suspends_checkpoints:
            if self._memory:
                self._memory.before_copies()
            self._context.files.save(state)

    def _finish(self, state: LoopState) -> dict[str, Any]:
        """Evaluates if that is still due, checks that all replicas agree, and writes the results."""
        context, info = self._context, self._context.info
        if state.finished and state.evaluated_at != state.step:
            state = self._evaluate(state.replace(ending=True)) or state
            if state.best_step == state.step:
                context.files.save(state)
        self._loop.close()
        return_freed_memory()  # of the steps; comparing and writing gather whole weights
        with activity("comparing the replicas and writing the last checkpoint", shown=context.program.reports):
            digest = self._loop.params_sha256()
            context.files.close()
        return_freed_memory()  # of the checkpoint
        restarts = context.files.restarts
        outcome = RunOutcome(
            steps=state.step,
            train_loss=state.train_loss,
            stopped_by=state.stopped_by,
            results=state.results,
            traffic=self._loop.traffic,
            skipped_steps=state.skipped,
            skipped_examples=context.skipped_examples.count,
            restarts=restarts.restarts,
            steps_redone=restarts.steps_redone,
            failed_checkpoints=context.files.failures,
            rounds=context.program.rounds.done if context.program.rounds else None,
            own=context.program.own.summarized(state.step),
            local_steps=context.program.rounds.steps if context.program.rounds else None,
        )
        summary = results.summary(info, outcome, context.monitor, digest)
        bad_weights = context.non_finite.bad_weights() if outcome.skipped_steps else ""
        announce.warn_of_skipped(outcome, context.monitor, bad_weights)
        if state.finished:
            if state.step < state.total:
                context.monitor.message(f"stopped by {state.stopped_by} at step {state.step} of {state.total}")
            writing = activity("writing model.keras", shown=context.program.reports)
            with context.program.averages.shown(), writing:
                results.write(info, summary, context.monitor, context.program.eval_weights)
        restarts.end("finished" if state.finished else "preempted" if state.preempted else "stopped")
        if not state.finished:
            announce.report_stopped(info, context.monitor, state.step, preempted=state.preempted)
        context.agreement.all_equal([state.step])  # no worker leaves before the chief
        return summary

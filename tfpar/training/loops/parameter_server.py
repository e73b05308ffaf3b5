"""Asynchronous training with parameter servers (Dean et al. 2012, Downpour SGD).

The variables live on the parameter servers. The chief hands out numbered updates; a worker that takes number k
fetches exactly the examples that belong to it, pulls the weights, computes a gradient and pushes it, without waiting
for anybody. What a gradient was computed on may be a few updates old by the time it is applied; that is the price,
and why runs are not reproducible. The loss of any of them ends the run, which goes on from the newest checkpoint.
"""

from __future__ import annotations

import collections
import functools
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tfpar import inputs
from tfpar.checkpoint import checkpointer as checkpoints
from tfpar.checkpoint import resume, run_state
from tfpar.exchange import Traffic
from tfpar.guards import bad_examples
from tfpar.guards.batches import Pushes
from tfpar.guards.non_finite import BadSteps
from tfpar.guards.preemption import StopRequest
from tfpar.guards.restarts import Journal
from tfpar.guards.watchdog import Watchdog
from tfpar.monitor import announce as report
from tfpar.monitor import samples
from tfpar.monitor import summary as results
from tfpar.optim.server_update import apply_on_servers
from tfpar.process.exit_codes import Preempted
from tfpar.training.duration import total_steps
from tfpar.training.loops.pacing import next_multiple
from tfpar.training.loops.snapshot_evaluation import SnapshotEvaluation

import numpy as np
import tensorflow as tf

if TYPE_CHECKING:
    from tfpar.training.trainer import Trainer

# Enough that no worker waits for the chief, few enough that a gradient is not computed on very old weights.
_IN_FLIGHT_PER_WORKER = 2
_REPORT_SECONDS = 0.5


class AsynchronousRun:
    """One call of `Trainer.fit` under `parameter_server`. An update is the push of one worker.

    Args:
      trainer: A trainer on the chief.
      train: Training examples. They are read on the workers, so they must be portable: in memory or generated.
      validation: Examples that the chief evaluates on, beside the training.
      steps: Updates in all.
      epochs: Passes over the examples, instead of `steps`.
    """

    def __init__(
        self,
        trainer: Trainer,
        train: inputs.Source,
        validation: inputs.Source | None,
        steps: int | None,
        epochs: float | None,
    ) -> None:
        self.trainer, self.train, self.validation = trainer, train, validation
        self.config, self.topology = trainer.config, trainer.topology
        self.pipeline = trainer.pipeline(train, training=True)
        self.updates_per_epoch = self.pipeline.updates_per_epoch * self.topology.workers
        self.total = total_steps(self.config.train, steps, epochs, self.updates_per_epoch)
        self.schedule = trainer.learning_rate_schedule(self.total)
        self.monitor = report.build_monitor(trainer, self.total)
        self.steps_done = 0
        self.skipped = 0
        self._loss_sum, self._loss_count = 0.0, 0
        self._pushes = pushes = Pushes(self.pipeline, self.topology.workers)
        self.bad_steps = BadSteps(pushes, limit=self.config.train.max_bad_steps, workdir=self.config.checkpoint.workdir)
        self.skipped_examples = bad_examples.SkippedExamples(pushes, is_chief=True)
        self.results: dict[str, float] = {}
        self.checkpointer = (
            checkpoints.Checkpointer(
                self.config.checkpoint.workdir,
                keep=self.config.checkpoint.keep_checkpoints,
                on_error=self.config.checkpoint.on_checkpoint_error,
            )
            if self.config.checkpoint.workdir
            else None
        )
        self.journal = Journal(self.config.checkpoint.workdir, writes=True)
        self.watchdog = Watchdog(self.config.strategy.stall_timeout, "the chief")
        self._stop_request = StopRequest()
        self._best: float | None = None
        self._best_step = -1
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(trainer.strategy)
        self._push = tf.function(self._push_update, autograph=False)
        core = trainer.core
        jit_compile = trainer.jit_compile or None
        self._gradients = tf.function(core.accumulate, jit_compile=jit_compile, autograph=False)
        self._evaluation = SnapshotEvaluation(trainer, validation) if validation is not None else None

    @property
    def train_loss(self) -> float | None:
        """Mean loss of the updates since the last evaluation that was due, the last interval at the end."""
        return self._loss_sum / self._loss_count if self._loss_count else None

    @property
    def failures(self) -> list[str]:
        """Checkpoints that could not be written."""
        return self.checkpointer.failures if self.checkpointer else []

    @property
    def traffic(self) -> Traffic:
        """What one update costs on the wire: a worker pulls the weights and pushes the gradient, both dense."""
        size = 4 * sum(variable.shape.num_elements() for variable in self.trainer.model.trainable_variables)
        return Traffic("none", "push_pull", size, 2 * size, 2 * size)

    def run(self) -> dict[str, Any]:
        """Announces, resumes, hands out updates until all are done, and writes the results."""
        with self.watchdog:
            return self._run()

    def _run(self) -> dict[str, Any]:
        report.announce(self)
        self._resume_or_warm_start()
        if self.steps_done >= self.total and (known := results.of_before(self)):
            results.announce_finished(self)
            return known
        report.record_start(self)
        every = self.config.train.eval_every or max(1, min(self.updates_per_epoch, self.total))
        saves = self.config.checkpoint.checkpoint_every or every
        last = min(self.total, self.steps_done + (self.config.train.stop_after or self.total))
        self.journal.begin(self.steps_done)
        with self._stop_request as asked, self.monitor.session():
            while self.steps_done < last and not asked.received:
                step = self.steps_done
                if step % every == 0:
                    self._loss_sum, self._loss_count = 0.0, 0
                self._train_until(min(last, next_multiple(step, every), next_multiple(step, saves)))
                until = self.steps_done
                self.watchdog.progress(f"evaluation or checkpoint after update {until}", patient=True)
                evaluated = self._evaluation is not None and (until % every == 0 or until == self.total)
                if evaluated:
                    self._start_evaluation()
                ends = until == last or asked.received
                if ends:  # what it found belongs into the last checkpoint
                    self._collect_evaluation(wait=True)
                due = until % saves == 0 and not self.bad_steps.holds_back
                if due or ends or evaluated:  # only later is it known whether it is the best
                    self._save(candidate=evaluated)
                self.watchdog.progress(f"the updates after {until}")
            self.watchdog.progress("the last evaluation or checkpoint", patient=True)
            preempted = asked.received and self.steps_done < self.total
            summary = self._finish(preempted)
        if preempted:
            raise Preempted
        return summary

    def _train_until(self, until: int) -> None:
        """Hands out updates up to number `until`, or fewer if asked to end, and waits for all of them."""
        window = _IN_FLIGHT_PER_WORKER * self.topology.workers
        pending: collections.deque[Any] = collections.deque()
        finished: list[Any] = []
        following, reported = self.steps_done, time.perf_counter()
        while self.steps_done + len(finished) < until:
            while following < until and len(pending) < window and not self._stop_request.received:
                pending.append(self._coordinator.schedule(self._push, args=(tf.constant(following, tf.int64),)))
                following += 1
            if not pending:
                return
            number = self.steps_done + len(finished)
            with bad_examples.named(self.train, functools.partial(self._pushes.indices, number, 1)):
                finished.append(pending.popleft().fetch())
            self.watchdog.progress(f"the updates after {number + 1}")
            now = time.perf_counter()
            if now - reported >= _REPORT_SECONDS or not pending:
                self._report(finished, now - reported)
                finished, reported = [], now
                self._collect_evaluation(wait=False)

    def _push_update(self, update: tf.Tensor) -> tuple[tf.Tensor, ...]:
        """One update, on a worker: fetch, pull, compute, push."""
        trainer = self.trainer
        model = trainer.model
        began = tf.timestamp()
        batch = self.pipeline.batch(update // self.topology.workers, update % self.topology.workers)
        with tf.control_dependencies([batch[2]]):
            fetched = tf.timestamp()
            params = [variable.value.read_value() for variable in model.trainable_variables]
            state = [variable.value.read_value() for variable in model.non_trainable_variables]
        seed = tf.random.fold_in(tf.constant([self.config.train.seed, 0]), tf.cast(update, tf.int32), alg="philox")
        sums = self._gradients(params, state, batch, seed, None)
        count = tf.maximum(sums.count, 1e-30)
        mean = [gradient / count for gradient in sums.gradients]
        norm = tf.linalg.global_norm(mean)
        if self.config.optimizer.clip_norm:
            factor = self.config.optimizer.clip_norm / tf.maximum(norm, self.config.optimizer.clip_norm)
            mean = [gradient * factor for gradient in mean]
        finite = tf.math.is_finite(norm) & tf.math.is_finite(sums.loss)
        with tf.control_dependencies([norm]):
            computed = tf.timestamp()
        rate = tf.cast(
            self.schedule(update) if self.schedule is not None else trainer.optimizer.learning_rate, tf.float32
        )

        def push() -> tf.Tensor:
            apply_on_servers(trainer.optimizer, trainer.strategy, mean, model.trainable_variables, rate)
            for variable, old, new in zip(model.non_trainable_variables, state, sums.state, strict=True):
                if tf.as_dtype(variable.dtype).is_floating:  # batch statistics: every worker moves them a little
                    variable.value.assign_add(new - old)
            return tf.constant(True)

        # At the end of an epoch a worker's share may be empty: nothing to push, and nothing wrong either.
        pushed = tf.cond(finite & (sums.count > 0), push, lambda: tf.constant(False))
        with tf.control_dependencies([pushed]):
            done = tf.timestamp()
        zero = tf.zeros([], tf.float64)
        durations = tf.stack([fetched - began, computed - fetched, zero, done - computed, done - began, zero])
        return sums.loss / count, sums.count, finite, norm, rate, durations, *sums.metrics

    def _report(self, finished: Sequence[Any], seconds: float) -> None:
        losses, counts, finite, norms, rates, durations, *metrics = (
            np.stack(column) for column in zip(*finished, strict=True)
        )
        numbers = np.arange(self.steps_done, self.steps_done + len(finished))
        self.steps_done += len(finished)
        self.skipped += int(np.sum(~finite))
        self.skipped_examples.note(numbers[0], counts)
        applied = finite & (counts > 0)
        if applied.any():
            self._loss_sum += float(losses[applied].sum())
            self._loss_count += int(applied.sum())
        losses = np.where(counts > 0, losses, np.nan)  # the monitor leaves out what is not finite
        # Workers overlap: their shares of an update are scaled to the time that passes between updates here.
        durations = durations * (seconds / max(durations[:, 4].sum(), 1e-9))
        kept = [column[finite].sum(axis=0) for column in metrics]
        scalars = {
            "learning_rate": float(rates[-1]),
            "gradient_norm": float(norms[-1]),
            "skipped_steps": float(self.skipped),
            "skipped_examples": float(self.skipped_examples.count),
        }
        self.monitor.on_steps(self.steps_done, losses, durations, scalars, examples=counts, metric_sums=kept)
        self.journal.reached(self.steps_done)
        meant = self._pushes.examples_in(numbers)[:, 0] > 0  # the others are empty shares at the end of an epoch
        self.bad_steps.note(numbers[meant], applied[meant], losses[meant])

    def _start_evaluation(self) -> None:
        """Evaluates a snapshot of the weights on the chief, beside the training."""
        self._collect_evaluation(wait=True)
        if self._evaluation:
            self._evaluation.start(self.steps_done)

    def _collect_evaluation(self, *, wait: bool) -> None:
        found = self._evaluation.collect(wait=wait) if self._evaluation else None
        if found is None:
            return
        step, self.results = found
        self.monitor.on_evaluation(step, self.results)
        loss = self.results.get("loss", math.nan)
        if math.isfinite(loss) and (self._best is None or loss < self._best):
            self._best, self._best_step = loss, step
            if self.checkpointer:
                self.checkpointer.mark_best(step)

    def _save(self, *, candidate: bool = False) -> None:
        if self.checkpointer is None:
            return
        self.checkpointer.save(
            checkpoints.Checkpoint(
                step=self.steps_done,
                arrays=run_state.snapshot(self.trainer.variables()),
                exchange={},
                run={
                    "seed": self.config.train.seed,
                    "variables": list(self.trainer.variables()),
                    "optimizer_options": self.trainer.optimizer_options,
                    "input": {"update": self.steps_done, "fingerprint": self.train.info.fingerprint},
                    "best": self._best,
                    "skipped": self.skipped,
                    "skipped_examples": self.skipped_examples.count,
                },
                config=self.config.as_flat_dict(),
            ),
            best=self._best_step == self.steps_done,
            candidate=candidate,
        )

    def _resume_or_warm_start(self) -> None:
        checkpoint = resume.newest(self.checkpointer) if self.checkpointer else None
        if checkpoint is None:
            if self.config.checkpoint.warm_start:
                run_state.warm_start(self.trainer.model, self.config.checkpoint.warm_start, self.monitor.message)
            return
        run = run_state.checked(checkpoint.run, synchronous=False)
        run_state.check_data(run, self.train.info.fingerprint, self.config)
        run_state.check_optimizer(run, self.trainer.optimizer_options, self.config.checkpoint.workdir)
        run_state.restore(self.trainer.variables(), checkpoint.arrays, run["variables"])
        self.steps_done, self.skipped, self._best = checkpoint.step, run["skipped"], run["best"]
        self.skipped_examples.count = run.get("skipped_examples", 0)
        self.monitor.message(f"resumed from update {checkpoint.step} of {self.config.checkpoint.workdir}")

    def _finish(self, preempted: bool) -> dict[str, Any]:
        self._collect_evaluation(wait=True)
        finished = self.steps_done >= self.total
        if finished and self._evaluation is not None and self.validation is not None:
            if self._evaluation.latest != self.steps_done:
                self._start_evaluation()
                self._collect_evaluation(wait=True)
            samples.write_text(self.monitor, self.trainer, self.validation, self.steps_done)
        if self._evaluation:
            self._evaluation.close()
        if self.checkpointer:
            self.checkpointer.close()
        summary = results.summary(self, run_state.params_sha256(self.trainer.model.trainable_variables))
        report.warn_of_skipped(self)
        if finished:
            results.write(self, summary)
        report.note_end(self, finished, preempted, "update")
        return summary

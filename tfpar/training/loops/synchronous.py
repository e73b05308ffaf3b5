"""One run of training on a strategy whose replicas move together."""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import TYPE_CHECKING, Any

from tfpar import inputs, precision
from tfpar.checkpoint import checkpointer as checkpoints
from tfpar.checkpoint import resume, run_state
from tfpar.collectives.agreement import WorkerAgreement
from tfpar.collectives.tensorflow import world_group
from tfpar.exchange import Traffic
from tfpar.guards import bad_examples
from tfpar.guards.non_finite import BadSteps
from tfpar.guards.preemption import StopRequest
from tfpar.guards.restarts import Journal
from tfpar.guards.watchdog import Watchdog
from tfpar.monitor import announce as report
from tfpar.monitor import samples
from tfpar.monitor import summary as results
from tfpar.optim import schedules
from tfpar.precision import LossScale
from tfpar.process.exit_codes import Preempted
from tfpar.training.duration import total_steps
from tfpar.training.loops.pacing import Pace, next_multiple
from tfpar.training.step_loop import StepsResult
from tfpar.training.validate import validate_workers_agree

import numpy as np
import tensorflow as tf

if TYPE_CHECKING:
    from tfpar.training.trainer import Trainer


@dataclasses.dataclass
class _Position:
    """Where a run stands: what a checkpoint holds besides variables."""

    step: int
    loss_scale: LossScale
    skipped: int = 0
    loss_sum: float = 0.0  # over the applied updates since the last evaluation was due
    loss_count: int = 0
    best: float | None = None


class SynchronousRun:
    """One call of `Trainer.fit` on a strategy whose replicas move together."""

    def __init__(
        self,
        trainer: Trainer,
        train: inputs.Source,
        validation: inputs.Source | None,
        steps: int | None,
        epochs: float | None,
    ) -> None:
        self.trainer = trainer
        self.config = config = trainer.config
        self.topology = trainer.topology
        self.train, self.validation = train, validation
        self.pipeline = trainer.pipeline(train, training=True)
        self.total = total_steps(config.train, steps, epochs, self.pipeline.updates_per_epoch)
        self.schedule = trainer.learning_rate_schedule(self.total)
        self.plateau = schedules.plateau(config.schedule) if self.schedule is not None else None
        self.monitor = report.build_monitor(trainer, self.total)
        self.say = self.monitor.message
        self.position = _Position(0, precision.initial(config.precision))
        self.step = trainer.train_step(self.schedule)
        self.results: dict[str, float] = {}
        self.evaluate_every = config.train.eval_every or max(1, min(self.pipeline.updates_per_epoch, self.total))
        self.evaluated_at = -1
        self.checkpointer = self._checkpointer()
        self.agreement = WorkerAgreement(world_group(self.topology.workers, self.topology.worker))
        self.journal = Journal(config.checkpoint.workdir, writes=self.topology.is_chief)
        self.watchdog = Watchdog(config.strategy.stall_timeout, f"worker {self.topology.worker}")
        self.stop_request = StopRequest()
        self.bad_steps = BadSteps(
            self.pipeline,
            limit=config.train.max_bad_steps,
            workdir=config.checkpoint.workdir,
            is_chief=self.topology.is_chief,
            settle=lambda: self.agreement.all_equal([0]),
        )
        self.skipped_examples = bad_examples.SkippedExamples(self.pipeline, is_chief=self.topology.is_chief)

    @property
    def steps_done(self) -> int:
        """Updates done, over all starts of this run."""
        return self.position.step

    @property
    def skipped(self) -> int:
        """Updates that were left out because a replica was not finite."""
        return self.position.skipped

    @property
    def train_loss(self) -> float | None:
        """Mean loss of the updates since the last evaluation that was due, the last interval at the end."""
        return self.position.loss_sum / self.position.loss_count if self.position.loss_count else None

    @property
    def failures(self) -> list[str]:
        """Checkpoints that could not be written."""
        return self.checkpointer.failures if self.checkpointer else []

    @property
    def traffic(self) -> Traffic:
        """What one update costs on the wire."""
        return self.trainer.exchange.traffic(self.topology.replicas, self.step.sidecar.length)

    def run(self) -> dict[str, Any]:
        """Announces, resumes, trains, and writes the results."""
        with self.watchdog:
            return self._run()

    def _run(self) -> dict[str, Any]:
        self._check_same_everywhere()
        report.announce(self)
        self._resume_or_warm_start()
        if self.position.step >= self.total:
            known = results.of_before(self)
            if self.agreement.mean(float(known is not None)) == 1.0:  # else the others would wait for the one that goes
                assert known is not None
                results.announce_finished(self)
                return known
        report.record_start(self)
        self.journal.begin(self.position.step)
        with self.stop_request, self.monitor.session():
            finished, preempted = self._train()
            self.watchdog.progress("the last evaluation or checkpoint", patient=True)
            summary = self._finish(finished, preempted)
        if preempted:
            raise Preempted
        return summary

    def _check_same_everywhere(self) -> None:
        # The same names on every worker: each is compared in a call of its own.
        sources = {"training data": self.train, "validation data": self.validation}
        facts = {name: source.info.fingerprint if source else "none" for name, source in sources.items()} | {
            "updates in all": self.total,
            "shapes of the weights": [tuple(weight.shape) for weight in self.trainer.model.weights],
        }
        shown = {
            name: f"{source.info.name}, {source.info.num_examples} examples, fingerprint {source.info.fingerprint}"
            for name, source in sources.items()
            if source
        }
        validate_workers_agree(self.agreement, self.config, facts, shown)

    def _train(self) -> tuple[bool, bool]:
        """Trains until the end, or until this start is to end; returns whether it did, and whether it was told to."""
        trainer, config = self.trainer, self.config
        every = self.evaluate_every
        saves = config.checkpoint.checkpoint_every or every
        retunes = config.exchange.exchange_retune_every or self.total
        last = min(self.total, self.position.step + (config.train.stop_after or self.total))
        pace = Pace(config.train.steps_per_loop)
        iterator = iter(trainer.distribute(self.pipeline, self.position.step))
        preempted = False
        while self.position.step < last and not preempted:
            step = self.position.step
            boundaries = [last, *(next_multiple(step, interval) for interval in (every, saves, retunes))]
            updates = pace.next(step, [*boundaries, self.monitor.next_boundary(step)])
            began = time.perf_counter()
            self._advance(iterator, updates)
            # All workers must make calls of the same length: TensorFlow 2.21 tells collectives inside a loop apart
            # by the iteration, and a worker in another iteration would wait for ever.
            asked = float(self.stop_request.received)
            seconds, told = self.agreement.sums([time.perf_counter() - began, asked])
            pace.measured(updates, seconds / self.topology.workers)
            step, preempted = self.position.step, told > 0
            self.watchdog.progress(f"evaluation or checkpoint after update {step}", patient=True)
            improved = self._evaluate() if step % every == 0 or step == self.total else False
            due = step % saves == 0 and not self.bad_steps.holds_back
            if due or step == last or improved or preempted:
                self._save(best=improved)
            retuned = step % retunes == 0 and step < last and trainer.exchange.retune()
            if retuned:
                self.say(trainer.exchange.plan_table)
                self.step = trainer.train_step(self.schedule, anew=True)  # traced anew, with the new plan
            self.watchdog.progress(f"the updates after {step}", patient=retuned)
        finished = self.position.step >= self.total
        return finished, preempted and not finished

    def _advance(self, iterator: Any, updates: int) -> None:
        """Runs some updates and reports them."""
        position = self.position
        self.monitor.before_step(position.step)
        factor = self.plateau.multiplier if self.plateau else 1.0
        began = time.perf_counter()
        worker = self.topology.worker
        with bad_examples.named(self.train, lambda: self.pipeline.indices(position.step, updates, worker)):
            result: StepsResult = self.step.run(
                iterator,
                tf.constant(position.step, tf.int64),
                tf.constant(updates),
                position.loss_scale,
                tf.constant(factor, tf.float32),
            )
        losses, finite = result.loss.numpy(), result.finite.numpy()
        durations = result.durations.numpy()
        if not durations.any():  # no clock inside the step: all its time counts as computing
            durations[:, [1, 4]] = (time.perf_counter() - began) / updates
        position.step += updates
        position.loss_scale = result.loss_scale
        position.skipped += int(np.sum(~finite))
        self.skipped_examples.note(position.step - updates, result.count.numpy())
        if (position.step - updates) % self.evaluate_every == 0:
            position.loss_sum, position.loss_count = 0.0, 0
        position.loss_sum += float(np.sum(losses[finite], dtype=np.float64))
        position.loss_count += int(np.sum(finite))
        scalars = {
            "learning_rate": float(result.learning_rate),
            "gradient_norm": float(result.norms.gradient),
            "parameter_norm": float(result.norms.parameter),
            "update_norm": float(result.norms.update),
            "loss_scale": float(result.loss_scale.scale),
            "skipped_steps": float(position.skipped),
            "skipped_examples": float(self.skipped_examples.count),
            **self._exchange_scalars(),
        }
        self.monitor.on_steps(
            position.step,
            losses,
            durations,
            scalars,
            examples=result.count.numpy(),
            metric_sums=[part.numpy() for part in result.metrics],
        )
        self.monitor.after_step(position.step)
        self.journal.reached(position.step)
        self.bad_steps.note(np.arange(position.step - updates, position.step), finite, losses)

    def _exchange_scalars(self) -> dict[str, float]:
        traffic = self.traffic
        if not traffic.wire_bytes:
            return {}
        return {
            "payload_bytes": traffic.payload_bytes,
            "wire_bytes": traffic.wire_bytes,
            "compression_ratio": traffic.dense_bytes / traffic.wire_bytes,
            **self.trainer.exchange.observed(),
        }

    def _evaluate(self) -> bool:
        """Evaluates, feeds the plateau schedule; returns whether this is the best so far."""
        if self.validation is None:
            return False
        step = self.position.step
        self.results = self.trainer.evaluate(self.validation)
        self.evaluated_at = step
        self.monitor.on_evaluation(step, self.results)
        samples.write_text(self.monitor, self.trainer, self.validation, step)
        if self.plateau:
            self.plateau.update(self.results["loss"])
        loss = self.results["loss"]
        if not np.isfinite(loss) or (self.position.best is not None and loss >= self.position.best):
            return False
        self.position.best = loss
        return True

    def _checkpointer(self) -> checkpoints.Checkpointer | None:
        if not self.config.checkpoint.workdir:
            return None
        return checkpoints.Checkpointer(
            self.config.checkpoint.workdir,
            keep=self.config.checkpoint.keep_checkpoints,
            worker=self.topology.worker,
            workers=self.topology.workers,
            on_error=self.config.checkpoint.on_checkpoint_error,
        )

    def _save(self, *, best: bool) -> None:
        if self.checkpointer is None or not (self.topology.is_chief or self.trainer.exchange.state):
            return
        checkpoint = checkpoints.Checkpoint(
            step=self.position.step,
            arrays=run_state.snapshot(self.trainer.variables()) if self.topology.is_chief else {},
            exchange=self.trainer.exchange.export(),
            run=self._run_state(),
            config=self.config.as_flat_dict(),
        )
        self.checkpointer.save(checkpoint, best=best)

    def _run_state(self) -> dict[str, Any]:
        position = self.position
        return {
            "seed": self.config.train.seed,
            "variables": list(self.trainer.variables()),
            "optimizer_options": self.trainer.optimizer_options,
            "input": {
                "update": position.step,
                "updates_per_epoch": self.pipeline.updates_per_epoch,
                "global_batch_size": self.config.input.global_batch_size,
                "fingerprint": self.train.info.fingerprint,
            },
            "loss_scale": {
                "scale": float(position.loss_scale.scale),
                "good_steps": int(position.loss_scale.good_steps),
            },
            "plateau": self.plateau.state() if self.plateau else None,
            "best": position.best,
            "loss": [position.loss_sum, position.loss_count],
            "skipped": position.skipped,
            "skipped_examples": self.skipped_examples.count,
            "replicas": self.topology.replicas,
            "workers": self.topology.workers,
        }

    def _resume_or_warm_start(self) -> None:
        checkpoint = resume.newest(self.checkpointer, self.agreement) if self.checkpointer else None
        if checkpoint is None:
            if self.config.checkpoint.warm_start:
                run_state.warm_start(self.trainer.model, self.config.checkpoint.warm_start, self.say)
            return
        run = run_state.checked(checkpoint.run, synchronous=True)
        run_state.check_data(run, self.train.info.fingerprint, self.config)
        run_state.check_optimizer(run, self.trainer.optimizer_options, self.config.checkpoint.workdir)
        run_state.restore(self.trainer.variables(), checkpoint.arrays, run["variables"])
        assert self.checkpointer is not None
        self.trainer.exchange.restore(
            run["workers"], functools.partial(self.checkpointer.exchange_state, checkpoint.step)
        )
        if self.trainer.exchange.state and not self.trainer.exchange.compresses:
            self.say("gradient that the exchange of before had kept back goes into the next update")
        scale = run["loss_scale"]
        self.position = _Position(
            checkpoint.step,
            LossScale(tf.constant(scale["scale"], tf.float32), tf.constant(scale["good_steps"], tf.int32)),
            skipped=run["skipped"],
            best=run["best"],
            loss_sum=run["loss"][0],
            loss_count=run["loss"][1],
        )
        self.skipped_examples.count = run.get("skipped_examples", 0)
        if self.plateau and run["plateau"]:
            self.plateau.restore(run["plateau"])
        epoch = checkpoint.step / self.pipeline.updates_per_epoch
        self.say(f"resumed from step {checkpoint.step} (epoch {epoch:.2f}) of {self.config.checkpoint.workdir}")

    def _finish(self, finished: bool, preempted: bool) -> dict[str, Any]:
        """Evaluates if that is still due, checks that all replicas agree, and writes the results."""
        if finished and self.evaluated_at != self.position.step and self._evaluate():
            self._save(best=True)
        digests = results.replica_digests(self.trainer)
        same = len(set(digests)) == 1 and self.agreement.all_equal([int(digests[0], 16)])
        if not same:
            raise RuntimeError("the replicas' weights differ; this is a defect of tfpar or of the hardware")
        if self.checkpointer:
            self.checkpointer.close()
        summary = results.summary(self, digests[0])
        report.warn_of_skipped(self)
        if finished:
            results.write(self, summary)
        report.note_end(self, finished, preempted, "step")
        self.agreement.all_equal([self.position.step])  # nobody leaves before the chief
        return summary

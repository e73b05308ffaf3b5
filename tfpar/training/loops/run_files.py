"""The files in a workdir from which a run resumes: checkpoints with its state, and the log of its starts."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

from tfpar import inputs, precision
from tfpar.checkpoint import checkpointer as checkpoints
from tfpar.checkpoint import resume, run_state
from tfpar.checkpoint.arrays import Part, SavedArrays
from tfpar.checkpoint.names import common_names
from tfpar.collectives.agreement import WorkerAgreement
from tfpar.config import ExperimentConfig
from tfpar.exchange.residuals import are_pending
from tfpar.guards.bad_examples import SkippedExampleLog
from tfpar.guards.restarts import RestartLog
from tfpar.monitor.run_info import stopping_option
from tfpar.optim.keras_calls import finalize_states
from tfpar.optim.plateau import PlateauController
from tfpar.outer.local import saved as local
from tfpar.parallel.split import not_finite
from tfpar.precision import LossScale
from tfpar.process.listing import listed
from tfpar.training import sharding
from tfpar.training.loops.state import LoopState
from tfpar.training.model.adapting import frozen_weights
from tfpar.training.program import Program

import keras
import numpy as np
import tensorflow as tf

_NAMED = 5


class RunFiles:
    """Checkpoints and restart log of one run, the same for every loop. Every worker has one.

    Args:
      program: The program to train.
      pipeline: The training batches.
      steps_per_epoch: Steps of one pass over the examples.
      skipped_examples: Counts examples left out; a checkpoint holds the count.
      plateau: The controller of `--schedule=plateau`, or None.
      message: Prints a line on the chief, at a level of `logging` if one is given.

    Attributes:
      restarts: The log of starts.
    """

    def __init__(
        self,
        program: Program,
        pipeline: inputs.AnyPipeline,
        *,
        steps_per_epoch: int,
        skipped_examples: SkippedExampleLog,
        plateau: PlateauController | None,
        message: Callable[..., None],
    ) -> None:
        self._program = program
        self._pipeline = pipeline
        self._steps_per_epoch = steps_per_epoch
        self._skipped_examples = skipped_examples
        self._plateau = plateau
        self._message = message
        self._told_of_bad_state = False
        self._names: list[str] | None = None  # those of worker 0, if they differ between workers
        config, topology = program.config, program.topology
        self._workdir = config.checkpoint.workdir
        # The first workers that have all weights between them write them, each its parts.
        self._writes_weights = topology.is_chief or topology.worker in range(1, topology.weight_workers)
        self.restarts = RestartLog(self._workdir, writes=topology.is_chief)
        self._checkpointer: checkpoints.Checkpointer | None = None
        if self._workdir:
            self._checkpointer = checkpoints.Checkpointer(
                self._workdir,
                keep=config.checkpoint.keep_checkpoints,
                worker=topology.worker if topology.synchronous else 0,
                workers=topology.workers if topology.synchronous else 1,
                on_error=config.checkpoint.on_checkpoint_error,
                needed=self._needed_files if topology.parts_on_workers else None,
            )

    @property
    def failures(self) -> list[str]:
        """Checkpoints that could not be written, one line each."""
        return self._checkpointer.failures if self._checkpointer else []

    @property
    def _writes(self) -> bool:
        """Whether this worker has anything to write. An exchange of `none` has residuals once those of an earlier one
        are restored."""
        program = self._program
        keeps_position = isinstance(self._pipeline, inputs.StreamPipeline | inputs.MadePipeline)
        keeps_more = program.topology.synchronous and (bool(program.exchange.state) or keeps_position)
        return self._writes_weights or keeps_more or program.rounds is not None

    def save(self, state: LoopState) -> None:
        """Starts writing a checkpoint. It is the best one if the best evaluation so far was of this step.

        Raises:
          CheckpointError: The previous one could not be written, and `on_checkpoint_error` is `fail`.
        """
        self._warn_of_bad_state(state.step)
        if self._checkpointer is None:
            return
        program = self._program
        arrays, parts = self._weights()
        if not self._writes:
            return
        checkpoint = checkpoints.Checkpoint(
            step=state.step,
            arrays=arrays,
            parts=parts,
            state_files=program.topology.weight_workers,
            frozen=self._frozen_names(arrays),
            exchange={
                **program.exchange.export(),
                **self._pipeline.export(),
                **(program.share.export() if program.share else {}),
                **(local.export(program.rounds, state.loss_scale) if program.rounds else {}),
            },
            run=self._run_state(state),
            config=program.config.as_flat_dict(),
        )
        self._checkpointer.save(
            checkpoint, best=state.best_step == state.step, candidate=state.evaluating == state.step
        )

    def _warn_of_bad_state(self, step: int) -> None:
        """Names, once, the state of the model that is not finite. Loss and gradients, which decide whether a step is
        applied, are finite all the same: in training, batches are normalised with their own statistics."""
        if self._told_of_bad_state:
            return
        frozen = {id(weight) for weight in frozen_weights(self._program.model)}
        state = [each for each in self._program.model.non_trainable_variables if id(each) not in frozen]
        if names := not_finite(state):
            self._told_of_bad_state = True
            self._message(
                f"since step {step} at the latest, there is NaN or infinity in the model's state "
                f"{listed(names, _NAMED)}, although the loss is finite: evaluations and the saved model will be wrong. "
                "Begin again from an earlier checkpoint with smaller inputs, or a lower --learning_rate.",
                logging.WARNING,
            )

    def mark_best(self, step: int) -> None:
        """Marks the checkpoint of an earlier step as the best, when its evaluation has ended."""
        if self._checkpointer:
            self._checkpointer.mark_best(step)

    def close(self) -> None:
        """Finishes writing; raises as `save` does."""
        if self._checkpointer:
            self._checkpointer.close()

    def abandon(self) -> None:
        """Stops writing without waiting for other workers, which may be gone; does nothing once closed."""
        if self._checkpointer:
            self._checkpointer.abandon()

    def resume_or_warm_start(self, total: int, agreement: WorkerAgreement) -> LoopState:
        """The restored state of the newest checkpoint, or that of a new run. All workers call it together.

        Args:
          total: Steps of the whole run.
          agreement: The agreement between the workers.

        Raises:
          ConfigError: A checkpoint of other data, another model or optimizer, or another kind of strategy; workers that
            are to write parts of one model have different ones.
        """
        program = self._program
        self._agree_on_names(agreement)
        scale = precision.initial(program.config.precision) if program.topology.synchronous else None
        checkpoint = resume.newest(self._checkpointer, agreement) if self._checkpointer else None
        if checkpoint is None:
            if program.config.checkpoint.warm_start:
                run_state.warm_start(program.model, program.config.checkpoint.warm_start, self._message)
            if program.share is not None:
                program.share.load_weights()  # they may have changed since the share was created
            if program.rounds is not None:
                program.rounds.start()
            return LoopState(0, total, loss_scale=scale)
        assert self._checkpointer is not None
        run = run_state.checked(checkpoint.run, synchronous=program.topology.synchronous)
        run_state.check_data(run, self._pipeline.source.info.fingerprint, program.config)
        run_state.check_optimizer(run, program.optimizer_options, self._workdir)
        self._restore_variables(checkpoint, run)
        finalize_states(program.model)
        if program.topology.synchronous:
            self._restore_exchange(checkpoint, run)
            values = run["loss_scale"]
            scale = LossScale(tf.constant(values["scale"], tf.float32), tf.constant(values["good_steps"], tf.int32))
            scale = self._restore_rounds(checkpoint, run) or scale
        self._skipped_examples.count = run.get("skipped_examples", 0)
        if self._plateau and run["plateau"]:
            self._plateau.restore(run["plateau"])
        same_workers = (run["workers"], run.get("replicas")) == (program.topology.workers, program.topology.replicas)
        # The whole run counts as one epoch of a stream of unknown length.
        endless = self._pipeline.steps_per_epoch == inputs.ENDLESS
        epoch = "" if endless else f" (epoch {checkpoint.step / self._steps_per_epoch:.2f})"
        self._message(f"resumed from step {checkpoint.step}{epoch} of {self._workdir}")
        if position := self._pipeline.restore(checkpoint.exchange, same_workers=same_workers):
            self._message(position)
        loss_sum, loss_count = run.get("loss") or (0.0, 0.0)
        stopped_by = _still_stopped_by(run, total, program.config)
        return LoopState(
            checkpoint.step,
            total,
            loss_scale=scale,
            skipped=run["skipped"],
            best=run["best"],
            loss_sum=loss_sum,
            loss_count=loss_count,
            lr_multiplier=run.get("lr_multiplier", 1.0),
            stop=bool(stopped_by),
            stopped_by=stopped_by,
        )

    def _agree_on_names(self, agreement: WorkerAgreement) -> None:
        if self._checkpointer and self._program.topology.parts_on_workers:
            own = list(self._program.checkpoint_variables())
            self._names = None if agreement.all_equal(own) else common_names(agreement.gather(own))

    def _variables(self) -> dict[str, keras.Variable]:
        """`Program.checkpoint_variables`, under the same names on every worker that writes parts of them: Keras counts
        names over a whole process, and one worker may have built more models before."""
        variables = self._program.checkpoint_variables()
        return dict(zip(self._names, variables.values(), strict=True)) if self._names else variables

    def _weights(self) -> tuple[dict[str, np.ndarray], dict[str, Part]]:
        """Copies of the variables, or parts of them, that this worker writes, and which of them are parts."""
        if not self._writes_weights:
            return {}, {}
        variables = self._variables()
        if not self._program.topology.parts_on_workers:
            return run_state.snapshot(variables), {}
        return run_state.snapshot_here(variables, first=self._program.topology.is_chief)

    def _frozen_names(self, arrays: Mapping[str, np.ndarray]) -> set[str] | None:
        """Names of the arrays that training does not change: frozen weights. None if the model has none."""
        frozen = {id(weight) for weight in frozen_weights(self._program.model)}
        if not frozen:
            return None
        variables = self._variables()
        return {name for name in arrays if id(variables[name]) in frozen}

    def _needed_files(self, arrays: SavedArrays) -> set[str]:
        """The files of a checkpoint that hold this worker's variables."""
        return run_state.files_to_read(self._variables(), arrays)

    def _restore_exchange(self, checkpoint: checkpoints.Checkpoint, run: Mapping[str, Any]) -> None:
        """Restores the pending residuals of the exchange."""
        exchange, topology = self._program.exchange, self._program.topology
        # If workers shared a replica, only the workers with the same part as this worker are read.
        apart = run.get("replica_workers", 1)
        part = topology.replica_part if apart == topology.replica_workers else 0

        def read(worker: int) -> dict[str, np.ndarray]:
            return self._exchange_state(checkpoint.step, worker * apart + part)

        exchange.restore(run["workers"] // apart, read)
        if not exchange.compresses and are_pending(exchange.export()):
            self._message("applying the previous exchange's residual in the next step")

    def _restore_rounds(self, checkpoint: checkpoints.Checkpoint, run: Mapping[str, Any]) -> LossScale | None:
        """Resumes local steps, if there are any; returns this worker's loss scale, if it has its own."""
        assert self._checkpointer is not None
        rounds = self._program.rounds
        if rounds is None:
            return None
        read = functools.partial(self._checkpointer.exchange_state, checkpoint.step)
        apart = run.get("replica_workers", 1)
        scale, message = local.restore(rounds, run["workers"] // apart, apart, read)
        if message:
            self._message(message)
        return scale

    def _restore_variables(self, checkpoint: checkpoints.Checkpoint, run: Mapping[str, Any]) -> None:
        """Restores the common variables and this worker's share, whatever the shares of the saved run were."""
        assert self._checkpointer is not None
        program, own = self._program, checkpoint.exchange
        share, variables = program.share, self._variables()
        if share is None and run.get("shard", "none") == "none":
            run_state.restore(variables, checkpoint.arrays, run["variables"])
            return
        if share is not None and run["workers"] == program.topology.workers and share.fits(own):
            run_state.restore(variables, checkpoint.arrays, run["variables"])
            share.restore(own=own)
            return
        assert isinstance(checkpoint.arrays, SavedArrays)
        ranks = range(run["workers"]) if run.get("shard", "none") != "none" else ()
        sharding.restore_shares(
            variables,
            checkpoint.arrays,
            run["variables"],
            [self._checkpointer.exchange_state(checkpoint.step, rank) for rank in ranks],
            weights=program.model.trainable_variables,
            optimizer=program.optimizer,
            share=share,
        )

    def _exchange_state(self, step: int, worker: int) -> dict[str, np.ndarray]:
        """The exchange state that a worker saved, without its place in a stream and its share of the optimizer."""
        assert self._checkpointer is not None
        saved = self._checkpointer.exchange_state(step, worker)
        return {
            name: value
            for name, value in saved.items()
            if not (name.startswith(inputs.POSITION_PREFIX) or sharding.is_share(name) or local.is_local(name))
        }

    def _run_state(self, state: LoopState) -> dict[str, Any]:
        program, topology = self._program, self._program.topology
        scale = state.loss_scale
        return {
            "seed": program.config.train.seed,
            "variables": list(self._variables()),
            "optimizer_options": program.optimizer_options,
            "input": {
                "step": state.step,
                "steps_per_epoch": self._pipeline.steps_per_epoch,
                "global_batch_size": program.config.input.global_batch_size,
                "fingerprint": self._pipeline.source.info.fingerprint,
            },
            "loss_scale": {"scale": float(scale.scale), "good_steps": int(scale.good_steps)} if scale else None,
            "plateau": self._plateau.state() if self._plateau else None,
            "best": state.best,
            "loss": [state.loss_sum, state.loss_count],
            "lr_multiplier": state.lr_multiplier,
            "stopped_of": state.total if state.stop else 0,  # a run with more steps continues after it
            "stopped_by": state.stopped_by,
            "skipped": state.skipped,
            "skipped_examples": self._skipped_examples.count,
            "replicas": topology.replicas,
            "shard": program.config.train.shard if program.share else "none",
            "workers": topology.workers,
            "replica_workers": topology.replica_workers,
        }


def _still_stopped_by(run: Mapping[str, Any], total: int, config: ExperimentConfig) -> str:
    """The cause that ended the saved run, if it ends this one too; empty if there are more steps, or if the cause is a
    switch that is now off."""
    if run.get("stopped_of", 0) < total:
        return ""
    by = str(run.get("stopped_by") or "a hook or callback")
    _, on = stopping_option(by, config)
    return by if on else ""

"""The objects that every loop of a run uses: data, monitor, guards and files."""

from __future__ import annotations

import dataclasses

from tfpar import inputs
from tfpar.collectives.agreement import WorkerAgreement
from tfpar.collectives.tensorflow import world_group
from tfpar.config import ExperimentConfig
from tfpar.guards.bad_examples import SkippedExampleLog
from tfpar.guards.batches import BatchIndex, PushOrder
from tfpar.guards.non_finite import NonFiniteStreak
from tfpar.guards.preemption import PreemptionFlag
from tfpar.guards.watchdog import Watchdog
from tfpar.monitor import announce
from tfpar.monitor.live_line import LiveLine
from tfpar.monitor.monitor import Monitor
from tfpar.monitor.run_info import RunInfo
from tfpar.optim import schedules
from tfpar.optim.plateau import PlateauController
from tfpar.parallel.split import not_finite
from tfpar.parallel.topology import Topology
from tfpar.training.duration import check_profile, in_epochs, planned_steps, total_steps
from tfpar.training.loops.run_files import RunFiles
from tfpar.training.model.adapting import all_weights
from tfpar.training.program import Program


@dataclasses.dataclass(frozen=True, eq=False)
class RunContext:
    """One call of `Trainer.fit`, whatever loop runs it.

    Attributes:
      program: The program to train.
      info: The facts to announce and summarise, including data and length.
      steps_per_epoch: Steps of one pass over the examples.
      evaluate_every: Steps between evaluations.
      schedule: Learning rate by step, or None if the optimizer keeps its own.
      plateau: The controller of `--schedule=plateau`, or None.
      batches: The examples of each step.
      monitor: The terminal and TensorBoard.
      files: Checkpoints and restart log.
      agreement: The agreement between the workers.
      watchdog: Ends the process if it makes no progress.
      preemption: Whether this process was asked to end.
      non_finite: Counts consecutive steps that were skipped.
      skipped_examples: The log of skipped examples.
    """

    program: Program
    info: RunInfo
    steps_per_epoch: int
    evaluate_every: int
    schedule: schedules.Schedule | None
    plateau: PlateauController | None
    batches: BatchIndex
    monitor: Monitor
    files: RunFiles
    agreement: WorkerAgreement
    watchdog: Watchdog
    preemption: PreemptionFlag
    non_finite: NonFiniteStreak
    skipped_examples: SkippedExampleLog


def prepare(
    program: Program,
    train: inputs.AnySource,
    validation: inputs.AnySource | None,
    steps: int | None,
    epochs: float | None,
) -> RunContext:
    """Creates everything that a run needs. Nothing is written and nothing is restored yet.

    Args:
      program: The program to train.
      train: Training examples.
      validation: Examples to evaluate on, or None.
      steps: Steps of the whole run, over all its starts.
      epochs: Passes over the examples, instead of `steps`.

    Raises:
      ConfigError: Neither or both of steps and epochs are given.
    """
    config, topology = program.config, program.topology
    pipeline = program.pipeline(train, training=True)
    # Under parameter_server a step is one worker's share of a batch.
    steps_per_epoch = pipeline.steps_per_epoch * (1 if topology.synchronous else topology.workers)
    info = _info(program, pipeline, train, validation, steps, epochs, steps_per_epoch)
    if pipeline.steps_per_epoch == inputs.ENDLESS:  # the whole run counts as one epoch
        steps_per_epoch = info.total
    monitor = announce.build_monitor(info)
    schedule = program.schedule(planned_steps(config, info.total))
    plateau = schedules.plateau(config.schedule) if schedule is not None else None
    agreement, batches = _agreement(topology), _batches(pipeline, topology)
    skipped_examples = SkippedExampleLog(batches, is_chief=topology.is_chief)
    return RunContext(
        program=program,
        info=info,
        steps_per_epoch=steps_per_epoch,
        evaluate_every=config.train.eval_every or max(1, min(steps_per_epoch, info.total)),
        schedule=schedule,
        plateau=plateau,
        batches=batches,
        monitor=monitor,
        files=RunFiles(
            program,
            pipeline,
            steps_per_epoch=steps_per_epoch,
            skipped_examples=skipped_examples,
            plateau=plateau,
            message=monitor.message,
        ),
        agreement=agreement,
        watchdog=Watchdog.of_run(config, topology),
        preemption=PreemptionFlag(),
        non_finite=_non_finite(program, batches, agreement),
        skipped_examples=skipped_examples,
    )


def _non_finite(program: Program, batches: BatchIndex, agreement: WorkerAgreement) -> NonFiniteStreak:
    return NonFiniteStreak(
        batches,
        limit=program.config.train.max_bad_steps,
        workdir=program.config.checkpoint.workdir,
        is_chief=program.topology.is_chief,
        before_raise=lambda: agreement.all_equal([0]),
        bad_weights=lambda: _bad_weights(program, agreement),
    )


def _bad_weights(program: Program, agreement: WorkerAgreement) -> list[str]:
    """The paths of the weights that are not finite on some worker; each may have its own parts of the model."""
    found = agreement.gather(not_finite(all_weights(program.model)))
    return list(dict.fromkeys(path for paths in found for path in paths))


def _batches(pipeline: inputs.AnyPipeline, topology: Topology) -> BatchIndex:
    """The examples of a step: a whole batch, or under `parameter_server` the share of one worker."""
    if isinstance(pipeline, inputs.Pipeline) and not topology.synchronous:
        return PushOrder(pipeline, topology.workers)
    return pipeline


def _agreement(topology: Topology) -> WorkerAgreement:
    """The agreement between the workers; with parameter servers only the chief takes part, because workers run no
    loop."""
    group = world_group(topology.workers, topology.worker) if topology.synchronous else world_group()
    return WorkerAgreement(group, "fit()")


def _info(
    program: Program,
    pipeline: inputs.AnyPipeline,
    train: inputs.AnySource,
    validation: inputs.AnySource | None,
    steps: int | None,
    epochs: float | None,
    steps_per_epoch: int,
) -> RunInfo:
    total = total_steps(program.config.train, steps, epochs, steps_per_epoch)
    check_profile(program.config.monitor.profile_window(), planned_steps(program.config, total))
    auto_without_xla = program.config.train.jit_compile == "auto" and not program.jit_compile
    return RunInfo(
        config=program.config,
        topology=program.topology,
        model=program.model,
        # Nobody else prints it; it takes a trace of the model.
        model_summary=program.model_summary if program.topology.is_chief else None,
        jit_compile=program.jit_compile,
        compiles_update=program.compiles_update,
        xla_disabled_reason=program.xla_disabled_reason if auto_without_xla else "",
        exchange=program.exchange,
        pipeline=pipeline,
        train=train,
        validation=validation,
        total=total,
        length=_length_option(program.config, steps, epochs),
        metric_results=program.core.metric_results,
        line=LiveLine(*pipeline.source.line) if isinstance(pipeline, inputs.MadePipeline) else LiveLine(),
        counting_padding=program.batch_readers.counting_padding(pipeline),
        jit_segments=program.placing.segments or max(1, program.config.train.jit_segments),
    )


def _length_option(config: ExperimentConfig, steps: int | None, epochs: float | None) -> str:
    """The option that sets the length of the run."""
    if config.reinforcement is not None and config.reinforcement.env_steps:
        return "env_steps"
    return "epochs" if in_epochs(config.train, steps, epochs) else "steps"

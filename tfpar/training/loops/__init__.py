"""The loops that `Trainer.fit` runs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from tfpar import inputs
from tfpar.training.evaluation import AnyEvaluator
from tfpar.training.loops.context import RunContext, prepare
from tfpar.training.loops.hooks import Hook
from tfpar.training.loops.keras_callbacks import KerasCallbacks
from tfpar.training.loops.parameter_server import ParameterServerLoop
from tfpar.training.loops.run import Loop, Run
from tfpar.training.loops.synchronous import SynchronousLoop
from tfpar.training.program import Program

import keras
import numpy as np
import tensorflow as tf


def start_run(
    program: Program,
    evaluator: AnyEvaluator,
    train: inputs.AnySource,
    validation: inputs.AnySource | None,
    steps: int | None,
    epochs: float | None,
    hooks: Sequence[Hook],
    callbacks: Sequence[keras.callbacks.Callback],
    closing: contextlib.ExitStack,
) -> Run:
    """Starts a run of the loop that the program's strategy needs.

    Args:
      program: The program to train.
      evaluator: `(source, steps=)`: computes loss and metrics on a source, on a synchronous strategy.
      train: Training examples.
      validation: Examples to evaluate on, or None.
      steps: Steps of the whole run.
      epochs: Passes over the examples, instead of `steps`.
      hooks: The user's hooks.
      callbacks: The user's Keras callbacks.
      closing: Exit stack for resources that must be released however the run ends.

    Raises:
      ConfigError: Neither or both of steps and epochs are given, or a callback cannot work.
    """
    context = prepare(program, train, validation, steps, epochs)
    closing.callback(context.files.abandon)  # writing must not continue without the workdir's lock
    bridge = None
    if callbacks:
        bridge = _keras_callbacks(context, callbacks)
        closing.callback(bridge.release)
    loop: Loop
    if program.topology.synchronous:
        loop = SynchronousLoop(context, evaluator)
    else:
        loop = ParameterServerLoop(context, waits_for_evaluation=bridge is not None)
        closing.callback(loop.close)  # its thread must end even if training fails
    return Run(context, loop, hooks, bridge)


def _keras_callbacks(context: RunContext, callbacks: Sequence[keras.callbacks.Callback]) -> KerasCallbacks:
    schedule, plateau = context.schedule, context.plateau

    def current_rate(step: int) -> float:
        assert schedule is not None
        return float(np.asarray(schedule(tf.constant(step, tf.int64)))) * (plateau.multiplier if plateau else 1.0)

    return KerasCallbacks(
        callbacks,
        context.program,
        steps_per_epoch=context.steps_per_epoch,
        total=context.info.total,
        current_rate=current_rate if schedule is not None else None,
        metric_results=context.info.metric_results,
    )

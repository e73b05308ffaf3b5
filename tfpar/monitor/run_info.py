"""The facts and the outcome of a run as plain values, from which announcements and results are produced."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfpar import inputs, models
from tfpar.config import ExperimentConfig
from tfpar.exchange import Exchange, Traffic
from tfpar.monitor.live_line import LiveLine
from tfpar.parallel.topology import Topology

import keras


def stopping_option(stopped_by: str, config: ExperimentConfig) -> tuple[str, bool]:
    """The switch that ended a run, and whether it is on in a configuration.

    Args:
      stopped_by: The cause, which begins with the flag if it is a switch: `--stop_at_goal (return 500, goal 495)`.
      config: The experiment.

    Returns:
      The option's name and value; an empty name and True for any other cause.
    """
    found = re.match(r"--(\w+)", stopped_by)
    value = config.as_flat_dict().get(found.group(1)) if found else None
    return (found.group(1), value) if found and isinstance(value, bool) else ("", True)


@dataclasses.dataclass(frozen=True, eq=False)
class RunInfo:
    """The facts about a run that are known before its first step.

    Attributes:
      config: The experiment.
      topology: Its workers, replicas and devices.
      model: The model.
      model_summary: Its size and cost, or None where they are not known before it runs, and outside the chief.
      jit_compile: Whether XLA compiles the passes.
      compiles_update: Whether XLA compiles the optimizer's update.
      xla_disabled_reason: Why `--jit_compile=auto` compiles no passes; empty where it does.
      exchange: The gradient exchange.
      pipeline: The training batches.
      train: Training examples.
      validation: Examples to evaluate on, or None.
      total: Steps of the whole run.
      length: The option that sets the length of the run: `epochs`, `steps` or `env_steps`.
      metric_results: Metrics by name from their summed states.
      line: The values in the progress line.
      counting_padding: Names of layers that count padding as examples: those that add losses, and those with Keras'
        batch statistics.
      jit_segments: XLA programs that a pass is cut into; 1 if it is not.
    """

    config: ExperimentConfig
    topology: Topology
    model: keras.Model
    model_summary: models.ModelSummary | None
    jit_compile: bool
    compiles_update: bool
    xla_disabled_reason: str
    exchange: Exchange
    pipeline: inputs.AnyPipeline
    train: inputs.AnySource
    validation: inputs.AnySource | None
    total: int
    length: str
    metric_results: Callable[[Sequence[Any]], Mapping[str, Any]]
    line: LiveLine = dataclasses.field(default_factory=LiveLine)
    counting_padding: tuple[Sequence[str], Sequence[str]] = ((), ())
    jit_segments: int = 1


@dataclasses.dataclass(frozen=True, eq=False)
class RunOutcome:
    """The progress and results of a run.

    Attributes:
      steps: Steps done, over all starts of the run.
      train_loss: Mean loss over the examples of the last epoch, or None if no step of it was applied.
      stopped_by: The hook or callback that ended the run before its last step, in words; empty if none did.
      results: The last evaluation: `loss`, `examples`, and metrics by name; empty if there was none.
      traffic: What one step costs on the wire.
      skipped_steps: Steps left out because a replica was not finite.
      skipped_examples: Training examples left out under `--on_bad_record=skip`.
      restarts: Starts after one that failed or was preempted.
      steps_redone: Steps done again because they came after the newest checkpoint.
      failed_checkpoints: Checkpoints that could not be written, one line each.
      rounds: Rounds of local steps done, over all starts; None where gradients are exchanged in every step.
      own: What `summary.json` has of a program that is no plain training.
      local_steps: Local steps of a round, also where they were measured; None likewise.
    """

    steps: int
    train_loss: float | None
    stopped_by: str
    results: Mapping[str, Any]
    traffic: Traffic
    skipped_steps: int
    skipped_examples: int
    restarts: int
    steps_redone: int
    failed_checkpoints: Sequence[str]
    rounds: int | None = None
    own: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    local_steps: int | None = None

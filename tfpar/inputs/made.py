"""Examples that the training step creates itself, on the devices: those of environments in which a policy acts.

There is nothing to read, to order or to split: this module has the interface of `Pipeline` for these examples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from tfpar.inputs import structures
from tfpar.inputs.source import SourceInfo
from tfpar.inputs.structures import Structure

import numpy as np
import tensorflow as tf


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class MadeSource:
    """What is made.

    Attributes:
      info: Describes an example. If the fingerprints of two sources differ, one cannot continue where the other
        stopped.
      text: The input report.
      steps_per_epoch: Steps that count as an epoch.
      line: What progress shows: metrics, the name of the pace, and what it counts for each example of a step.
      export: Returns this process's state for a checkpoint.
      restore: Restores that state; returns whether it could.
      goes_on: The message for the user in that case.
      show: Returns pictures, uint8 `[n, height, width, 3]`, with their captions, or None.
      elements: `(worker, local replicas, start step) -> dataset`: the inputs of the step, one element for each step and
        local replica, if it has any. They then follow from the number of the step, so that a checkpoint holds nothing.
    """

    info: SourceInfo
    text: str
    steps_per_epoch: int
    line: tuple[tuple[str, ...], str, float]
    export: Callable[[], dict[str, np.ndarray]]
    restore: Callable[[Mapping[str, np.ndarray]], bool]
    goes_on: str
    show: Callable[[], tuple[np.ndarray, list[str]] | None]
    elements: Callable[[int, int | None, int], tf.data.Dataset] | None = None

    @property
    def name(self) -> str:
        """For reports and errors."""
        return self.info.name


class MadePipeline:
    """The counterpart of `Pipeline` for these examples.

    Args:
      source: What is made.
      examples: Number of examples of a step on one replica.
      accumulate_steps: Micro-batches of a step.

    Attributes:
      source: The same.
      steps_per_epoch: See `MadeSource`.
      micro_batch: Examples of a micro-batch on a replica.
      examples_per_epoch: Examples of an epoch.
      skips: False: none is skipped.
      pads: False: every batch is full.
    """

    skips = False
    pads = False

    def __init__(self, source: MadeSource, global_batch_size: int, *, accumulate_steps: int, replicas: int) -> None:
        self.source = source
        self._accumulate_steps, self._replicas = accumulate_steps, replicas
        self.steps_per_epoch = source.steps_per_epoch
        self.micro_batch = global_batch_size // (accumulate_steps * replicas)
        self.examples_per_epoch = self.steps_per_epoch * global_batch_size

    @property
    def element_spec(self) -> tuple[Structure, Structure, tf.TensorSpec]:
        """As `Pipeline.element_spec`."""
        rows = tf.TensorShape([self._accumulate_steps, self.micro_batch])
        info = self.source.info
        parts = (structures.batch_specs(rows, spec) for spec in (info.input_spec, info.target_spec))
        return (*parts, tf.TensorSpec(rows, tf.float32))

    def report(self, *, asynchronous: bool = False) -> str:
        """The input report."""
        del asynchronous
        return self.source.text

    def indices(self, first: int, count: int, worker: int | None = None) -> np.ndarray:
        """Int64 `[count, 0]`: the examples have no numbers."""
        del first, worker
        return np.zeros((count, 0), np.int64)

    def examples_in(self, steps: np.ndarray) -> np.ndarray:
        """How many examples each replica has in some steps: int64 `[K, R]` for int64 `[K]`."""
        return np.full([len(steps), self._replicas], self._accumulate_steps * self.micro_batch, np.int64)

    def dataset(self, worker: int = 0, local_replicas: int | None = None, start_step: int = 0) -> tf.data.Dataset:
        """What the source gives; else elements that nobody reads, as many as are asked for."""
        if self.source.elements is not None:
            return self.source.elements(worker, local_replicas, start_step)
        return tf.data.Dataset.from_tensors(0.0).repeat()

    def follow(self, iterator: Any) -> None:
        """Nothing: the step keeps what it needs."""

    def export(self) -> dict[str, np.ndarray]:
        """This process's state for a checkpoint."""
        return self.source.export()

    def restore(self, saved: Mapping[str, np.ndarray], *, same_workers: bool) -> str:
        """Resumes from what this process exported; returns what to tell the user."""
        if self.source.elements is not None:
            return ""
        if same_workers and self.source.restore(saved):
            return f"{self.source.name}: {self.source.goes_on}"
        return f"{self.source.name}: new episodes begin, as the saved run had other workers or replicas"

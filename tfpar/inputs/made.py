"""Examples that the training step creates itself on the devices, from environments in which a policy acts.

Such examples need not be read, ordered or split: this module gives them the interface of `Pipeline`.
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
    """Describes the examples that a training step creates.

    Attributes:
      info: Describes an example. If the fingerprints of two sources differ, a run with one cannot resume a run with the
        other.
      text: The input report.
      steps_per_epoch: Number of steps that count as an epoch.
      line: The progress line: metrics, the name of the pace, and the number that it counts per example of a step.
      export: Returns this process's state for a checkpoint.
      restore: Restores that state; returns whether it succeeded.
      goes_on: The message for the user if `restore` succeeded.
      show: Returns pictures, uint8 `[n, height, width, 3]`, with their captions, or None.
      elements: `(worker, local replicas, start step) -> dataset` of the step's inputs, one element per step and local
        replica; None if the step has no inputs. The inputs depend only on the number of the step, so a checkpoint holds
        nothing of them.
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
        """The name for reports and errors."""
        return self.info.name


class MadePipeline:
    """The counterpart of `Pipeline` for these examples.

    Args:
      source: Describes the examples.
      global_batch_size: Number of examples of a step, over all replicas.
      accumulate_steps: Number of micro-batches of a step.
      replicas: Number of replicas, over all workers.

    Attributes:
      source: Describes the examples.
      steps_per_epoch: See `MadeSource`.
      micro_batch: Number of examples of a micro-batch on a replica.
      examples_per_epoch: Number of examples of an epoch.
      skips: False: no example is skipped.
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
        """See `Pipeline.element_spec`."""
        rows = tf.TensorShape([self._accumulate_steps, self.micro_batch])
        info = self.source.info
        parts = (structures.batch_specs(rows, spec) for spec in (info.input_spec, info.target_spec))
        return (*parts, tf.TensorSpec(rows, tf.float32))

    def report(self, *, asynchronous: bool = False) -> str:
        """Returns the input report."""
        del asynchronous
        return self.source.text

    def indices(self, first: int, count: int, worker: int | None = None) -> np.ndarray:
        """Returns int64 `[count, 0]`: the examples have no indices."""
        del first, worker
        return np.zeros((count, 0), np.int64)

    def examples_in(self, steps: np.ndarray) -> np.ndarray:
        """Returns the number of examples of each replica in some steps: int64 `[K, R]` for int64 `[K]`."""
        return np.full([len(steps), self._replicas], self._accumulate_steps * self.micro_batch, np.int64)

    def dataset(self, worker: int = 0, local_replicas: int | None = None, start_step: int = 0) -> tf.data.Dataset:
        """Returns the elements of the source; if it has none, an endless dataset whose elements the step ignores."""
        if self.source.elements is not None:
            return self.source.elements(worker, local_replicas, start_step)
        return tf.data.Dataset.from_tensors(0.0).repeat()

    def follow(self, iterator: Any) -> None:
        """Does nothing: the step keeps its own state."""

    def export(self) -> dict[str, np.ndarray]:
        """Returns this process's state for a checkpoint."""
        return self.source.export()

    def restore(self, saved: Mapping[str, np.ndarray], *, same_workers: bool) -> str:
        """Resumes from the result of this process's `export`; returns a message for the user."""
        if self.source.elements is not None:
            return ""
        if same_workers and self.source.restore(saved):
            return f"{self.source.name}: {self.source.goes_on}"
        return f"{self.source.name}: new episodes begin, as the saved run had other workers or replicas"

"""The examples of steps: the batches of a pipeline, or the shares of them that workers push one by one."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from tfpar import inputs

import numpy as np


class BatchIndex(Protocol):
    """Examples by number of step; `tfpar.inputs.Pipeline` is one, where a step is a whole batch."""

    @property
    def source(self) -> inputs.AnySource: ...

    @property
    def skips(self) -> bool: ...

    def examples_in(self, steps: np.ndarray, /) -> np.ndarray:
        """How many examples each step has: int64 [K, replicas] for int64 [K]."""

    def indices(self, first: int, count: int) -> np.ndarray:
        """The examples of `count` steps from `first` on: int64 [count, ...], -1 for padding."""


@dataclasses.dataclass(frozen=True)
class PushOrder:
    """The steps of asynchronous training: number `k` is the share of worker `k % workers` in batch `k // workers`.

    Attributes:
      pipeline: The batches.
      workers: How many share one.
    """

    pipeline: inputs.Pipeline
    workers: int

    @property
    def source(self) -> inputs.AnySource:
        """The examples."""
        return self.pipeline.source

    @property
    def skips(self) -> bool:
        """Whether examples that cannot be used get the weight 0."""
        return self.pipeline.skips

    def examples_in(self, steps: np.ndarray, /) -> np.ndarray:
        """How many examples each step has: int64 [K, 1] for int64 [K]."""
        every = self.pipeline.examples_in(steps // self.workers)
        return np.take_along_axis(every, (steps % self.workers)[:, None], axis=1)

    def indices(self, first: int, count: int) -> np.ndarray:
        """The examples of `count` steps from `first` on: int64 [count, A, 1, m], -1 for padding."""
        shares = []
        for step in range(first, first + count):
            batch, worker = divmod(step, self.workers)
            shares.append(self.pipeline.indices(batch, 1)[0, :, worker : worker + 1])
        return np.stack(shares)

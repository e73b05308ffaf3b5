"""The training step of replicas whose passes are several XLA programs."""

from __future__ import annotations

from typing import Any

from tfpar.training.pipeline.reached import confirm_reached
from tfpar.training.pipeline.stages import Pipeline
from tfpar.training.step import TrainStep


class SegmentedStep(TrainStep):
    """A step whose model runs in segments. The update of the weights is one program, as without segments.

    Args:
      pipeline: The segments.
      *args: See `TrainStep`.
      **kwargs: See `TrainStep`.
    """

    def __init__(self, pipeline: Pipeline, *args: Any, **kwargs: Any) -> None:
        self._pipeline = pipeline
        super().__init__(*args, **kwargs)

    def _make_programs(self) -> None:
        super()._make_programs()
        self._pipeline.compiles = self.plan.compiles_gradients
        if self.plan.compiles_gradients:
            self._contribute = self._in_segments

    def _in_segments(self, *args: Any) -> Any:
        with self._pipeline.on_own_replica() as trace:
            found = self._contribution(*args)
        if trace.has_unread_results:
            confirm_reached(self.core, self._pipeline, *args)
        return found

"""The values in the progress line beside the step and the loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tfpar.monitor import tags
from tfpar.monitor.timings import Window


@dataclasses.dataclass(frozen=True)
class LiveLine:
    """Which values it has.

    Attributes:
      metrics: Names of the metrics to show; empty for the first that there is.
      rate: Name of the pace.
      per_example: What it counts for each example of a step.
    """

    metrics: tuple[str, ...] = ()
    rate: str = "examples/s"
    per_example: float = 1.0

    def pace(self, examples_per_second: float) -> dict[str, float]:
        """The pace by its name in summary.json, where it does not count examples."""
        return {tags.PACES[self.rate]: self.per_example * examples_per_second} if self.rate in tags.PACES else {}

    def values(self, shown: Window, metrics: Mapping[str, float]) -> dict[str, str]:
        """The values by name, in order of importance.

        Args:
          shown: The last steps.
          metrics: Metrics over the last steps.
        """
        found = [name for name in metrics if name != "loss"]
        chosen = [name for name in self.metrics if name in metrics] or found[:1]
        loss = {"loss": f"{shown.loss:.4f} ({shown.span})"}
        shown_metrics = {name: f"{metrics[name]:.4f}" for name in chosen}
        pace = {self.rate: f"{self.per_example * shown.examples_per_second:.0f}"}
        if self.metrics:  # what they were chosen for
            return shown_metrics | loss | pace
        return loss | shown_metrics | pace | {"input wait": f"{100 * shown.input_wait_fraction:.1f}%"}

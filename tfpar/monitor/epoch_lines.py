"""What `--verbose=2` prints: a line for each epoch, and one for an evaluation that no epoch ends with."""

from __future__ import annotations

from collections.abc import Callable, Mapping


class EpochLines:
    """Writes lines about epochs, in the order of their steps.

    Args:
      total_steps: Steps in the whole run.
      write: Writes a line.
    """

    def __init__(self, total_steps: int, write: Callable[[str], None]) -> None:
        self._total_steps = total_steps
        self._write = write
        self._evaluation: tuple[int, str] | None = None

    def on_epoch(self, number: int, last_step: int, values: Mapping[str, float]) -> None:
        """Writes the line of an epoch, counted from 0, whose values have those of an evaluation at its end."""
        if self._evaluation is not None and self._evaluation[0] == last_step:
            self._evaluation = None
        self.flush()
        shown = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
        self._write(f"epoch {number + 1}  step {last_step}/{self._total_steps}  {shown}")

    def on_evaluation(self, step: int, line: str) -> None:
        """Holds a line about an evaluation back until it is known whether an epoch ends there."""
        self.flush()
        self._evaluation = step, line

    def flush(self) -> None:
        """Writes the pending lines. Call it after further steps, and at the end."""
        if self._evaluation is not None:
            self._write(self._evaluation[1])
            self._evaluation = None

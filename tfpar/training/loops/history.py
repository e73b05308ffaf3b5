"""The history of a run: loss and metrics of each epoch, as Keras' `History` has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tfpar.training.loops.hooks import Hook
from tfpar.training.loops.state import LoopState


class FitResult(dict[str, Any]):
    """The result of `Trainer.fit`: the contents of `summary.json`, and the history of this call.

    Attributes:
      epoch: Numbers of the epochs that ended in this call, from 0; the last one may be incomplete.
      history: For each name, one value per epoch, in the order of `epoch`: `loss`, metrics, the results of the
        evaluation at the end of the epoch with the prefix `val_`, and values that callbacks have added to the logs. NaN
        if an epoch has no such value.
      finished: Whether the run is finished; `--stop_after` may have ended this call before.
    """

    def __init__(
        self, summary: Mapping[str, Any], epoch: list[int], history: dict[str, list[Any]], *, finished: bool
    ) -> None:
        super().__init__(summary)
        self.epoch = epoch
        self.history = history
        self.finished = finished


class EpochHistory:
    """Records the history.

    Args:
      steps_per_epoch: Steps of one pass over the examples.
      tell: Called with an epoch's number, its last step, and its values.

    Attributes:
      hook: The hook that records an epoch when it ends.
    """

    def __init__(self, steps_per_epoch: int, tell: Callable[[int, int, Mapping[str, Any]], None]) -> None:
        self._steps_per_epoch, self._tell = steps_per_epoch, tell
        self._epoch: list[int] = []
        self._logs: list[dict[str, Any]] = []
        self.hook = Hook(steps_per_epoch, self._record, also=lambda state: state.ending)

    def result(
        self, summary: Mapping[str, Any], of_callbacks: Mapping[int, Mapping[str, Any]], *, finished: bool
    ) -> FitResult:
        """The result of `fit`.

        Args:
          summary: The contents of `summary.json`.
          of_callbacks: The logs of epochs as Keras callbacks have left them; they take precedence.
          finished: Whether the run is finished.
        """
        logged = [logs | dict(of_callbacks.get(epoch, {})) for epoch, logs in zip(self._epoch, self._logs, strict=True)]
        names = dict.fromkeys(name for logs in logged for name in logs)
        history = {name: [logs.get(name, float("nan")) for logs in logged] for name in names}
        return FitResult(summary, list(self._epoch), history, finished=finished)

    def _record(self, state: LoopState) -> None:
        if not len(state.since.losses):
            return
        self._epoch.append((state.step - 1) // self._steps_per_epoch)
        self._logs.append(state.since.results() | evaluation_logs(state))
        self._tell(self._epoch[-1], state.step, self._logs[-1])


def evaluation_logs(state: LoopState) -> dict[str, Any]:
    """The evaluation made at this step, named as Keras names it; empty if there was none."""
    if state.evaluated_at != state.step:
        return {}
    return {f"val_{name}": value for name, value in state.results.items() if name != "examples"}

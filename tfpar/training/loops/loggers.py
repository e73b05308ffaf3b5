"""Hooks that log a run elsewhere: a CSV file, Weights & Biases, MLflow; `tfpar.loggers`.

Each logs on the chief only: the mean loss and the metrics of the steps since its last row, and the results of
evaluations with the prefix `val_`. Libraries are imported when the first row is logged, and only on the chief.

```python
hooks = [
    tfpar.loggers.csv("log.csv", every=50),
    tfpar.loggers.wandb(every=50, project="digits", config=trainer.config.as_flat_dict()),
    tfpar.loggers.mlflow(every=50, experiment="digits", params=trainer.config.as_flat_dict()),
]
trainer.fit(train, validation=test, hooks=hooks)
```
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from tfpar.cluster import info as cluster_info
from tfpar.config import ConfigError
from tfpar.monitor import tags
from tfpar.monitor.metrics_table import MetricsTable
from tfpar.training.loops.hooks import Hook
from tfpar.training.loops.state import LoopState

__all__ = ["csv", "mlflow", "wandb"]


class _Log(Protocol):
    """A destination of rows."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Logs a row."""

    def finish(self) -> None:
        """Ends the log."""


def csv(path: str | os.PathLike[str], *, every: int) -> Hook:
    """Logs to a CSV file with the columns `step`, `run`, `seconds` (since 1970), `loss` and so on.

    A resumed run continues the file; the rows of repeated steps are replaced.

    Args:
      path: The file.
      every: Steps between rows.
    """
    return _hook(every, lambda step: _Csv(pathlib.Path(path), step))


def wandb(*, every: int, **init: Any) -> Hook:
    """Logs to Weights & Biases (`pip install 'tfpar[wandb]'`).

    Args:
      every: Steps between rows.
      **init: Arguments of `wandb.init`: `project`, `name`, `config`, `mode="offline"`; `id` and `resume="allow"` to
        continue a run.

    Raises:
      ConfigError: The package is missing.
    """
    _check_installed("wandb", "wandb")
    return _hook(every, lambda _: _Wandb(init))


def mlflow(*, every: int, experiment: str = "", params: Mapping[str, Any] | None = None, **start_run: Any) -> Hook:
    """Logs to MLflow (`pip install 'tfpar[mlflow]'`).

    MLFLOW_TRACKING_URI, or `mlflow.set_tracking_uri`, sets the destination: a server, or by default the file
    `mlflow.db` in the working directory.

    Args:
      every: Steps between rows.
      experiment: Name of the experiment; by default MLflow's own.
      params: Parameters of the run, such as its options. They are not logged again if `run_id` continues a run.
      **start_run: Arguments of `mlflow.start_run`: `run_name`, `run_id` to continue a run.

    Raises:
      ConfigError: The package is missing.
    """
    _check_installed("mlflow", "mlflow")
    return _hook(every, lambda _: _Mlflow(experiment, params or {}, start_run))


def _hook(every: int, begin: Callable[[int], _Log]) -> Hook:
    logger = _Logger(begin)
    return Hook(every, logger.log, also=lambda state: state.ending, at_end=logger.end)


class _Logger:
    """Turns states of a run into rows of a log, on the chief.

    Args:
      begin: Opens the log, given the step of the first row.
    """

    def __init__(self, begin: Callable[[int], _Log]) -> None:
        self._begin = begin
        self._log: _Log | None = None
        self._evaluated_at = self._step = -1

    def log(self, state: LoopState) -> None:
        """Logs a row."""
        cluster = cluster_info.detect()
        if cluster is not None and not cluster.is_chief:
            return
        if state.step <= self._step:  # the run before failed, so that its end was not told
            self.end(state)
        if self._log is None:
            self._log = self._begin(state.step)
        self._step = state.step
        values = state.since.results() if len(state.since.losses) else {}
        if state.evaluated_at > self._evaluated_at:
            self._evaluated_at = state.evaluated_at
            values |= {f"val_{name}": value for name, value in state.results.items() if name != "examples"}
        values = {name: float(value) for name, value in tags.by_element(values).items() if math.isfinite(value)}
        if values:
            self._log.write(state.step, values)

    def end(self, _: LoopState) -> None:
        """Ends the log, if this process has one."""
        if self._log is not None:
            self._log.finish()
        self._log, self._evaluated_at, self._step = None, -1, -1


class _Csv:
    """A CSV file."""

    def __init__(self, path: pathlib.Path, step: int) -> None:
        self._table = MetricsTable(path.parent, path.name)
        self._table.begin(step - 1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._table.append("train", step, values)

    def finish(self) -> None:
        pass


class _Wandb:
    """A run of Weights & Biases."""

    def __init__(self, init: Mapping[str, Any]) -> None:
        self._run = importlib.import_module("wandb").init(**init)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self) -> None:
        self._run.finish()


class _Mlflow:
    """A run of MLflow, inside the user's active run if there is one."""

    def __init__(self, experiment: str, params: Mapping[str, Any], start_run: Mapping[str, Any]) -> None:
        self._library = importlib.import_module("mlflow")
        if experiment:
            self._library.set_experiment(experiment)
        active = self._library.start_run(**{"nested": self._library.active_run() is not None, **start_run})
        self._run_id = active.info.run_id
        if params and "run_id" not in start_run:
            self._library.log_params({name: str(value) for name, value in params.items()})

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._library.log_metrics(dict(values), step=step, run_id=self._run_id)

    def finish(self) -> None:
        self._library.end_run()


def _check_installed(package: str, extra: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"tfpar.loggers.{package}: the package {package} is missing. pip install 'tfpar[{extra}]'.")

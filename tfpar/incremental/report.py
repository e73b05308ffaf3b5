"""What a run of tasks reports: lines, tables, `WORKDIR/summary.json`, and the matrix in TensorBoard.

Shapes: T tasks.
"""

from __future__ import annotations

import json
import logging
import pathlib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from tfpar.config import ExperimentConfig
from tfpar.incremental import results
from tfpar.incremental.checks import incremental_of
from tfpar.incremental.tasks import Task
from tfpar.monitor.summary import command_of
from tfpar.monitor.tensorboard import EventFiles
from tfpar.process.whole_files import replace_file

import numpy as np

_log = logging.getLogger(__name__)


class Report:
    """Reports the progress and the results of a run of tasks.

    Args:
      tasks: The tasks, in order.
      config: The whole configuration.
      is_chief: Whether this worker reports; others report nothing.
    """

    def __init__(self, tasks: Sequence[Task], config: ExperimentConfig, *, is_chief: bool) -> None:
        self._tasks, self._config, self._is_chief = tasks, config, is_chief
        self._names = [f"{number}: {task.name}" for number, task in enumerate(tasks, start=1)]

    def say(self, text: str) -> None:
        """Shows a text, unless `--verbose=0`."""
        if self._is_chief and self._config.monitor.verbose > 0:
            _log.info("%s", text)

    def begin(self, number: int, text: str) -> None:
        """Shows what is done about task `number`, from 0."""
        self.say(f"task {number + 1} of {len(self._tasks)}: {self._tasks[number].name}{text}")

    def show(self, matrix: np.ndarray, count: int) -> None:
        """Shows the accuracies after the first `count` tasks."""
        self.say(results.table(matrix[:count, :count], self._names[:count]))

    def finish(self, matrix: np.ndarray, digest: str, model: pathlib.Path | None) -> dict[str, Any]:
        """Shows and writes the results.

        Args:
          matrix: Accuracies `[T, T]`, see `results.figures_of`.
          digest: Digest of the last weights.
          model: File of the last model; None without a workdir.

        Returns:
          The contents of `summary.json`.
        """
        figures = results.figures_of(matrix)
        summary: dict[str, Any] = {
            "method": incremental_of(self._config).method,
            "tasks": [
                {"name": task.name, "classes": list(task.classes), "examples": len(task.indices)}
                for task in self._tasks
            ],
            "matrix": results.as_rows(matrix),
            **figures,
            "params_sha256": digest,
        }
        self.say("\n" + results.table(matrix, self._names))
        self.say(
            "  ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in figures.items() if value is not None)
        )
        if model and self._is_chief:
            workdir = self._config.checkpoint.workdir
            write_json(pathlib.Path(workdir) / "summary.json", summary)
            self._write_events(matrix)
            self.say(
                f"look next\n  {command_of('tensorboard')} --logdir {shlex.quote(workdir)}\n"
                f"  {workdir}/summary.json, {model}"
            )
        return summary

    def _write_events(self, matrix: np.ndarray) -> None:
        """Writes matrix and figures for TensorBoard."""
        events = EventFiles(self._config.checkpoint.workdir, self._config.as_flat_dict())
        picture = results.picture(matrix, self._names)
        events.images("incremental/accuracy_matrix", picture, step=len(self._tasks), run="eval")
        for count in range(1, len(self._tasks) + 1):
            so_far = results.figures_of(matrix[:count, :count])
            values = {f"incremental/{name}": value for name, value in so_far.items() if value is not None}
            events.scalars("eval", count, values)
        events.end_session(success=True)
        events.close()


def write_json(path: pathlib.Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON file atomically, and flushes it to the disk."""
    replace_file(path, (json.dumps(content, indent=1) + "\n").encode())

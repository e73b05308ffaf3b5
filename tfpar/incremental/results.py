"""The results of incremental learning: the accuracy on each task after each task.

Shapes: T tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def figures_of(matrix: np.ndarray) -> dict[str, float | None]:
    """Computes the figures of an accuracy matrix.

    Args:
      matrix: `[T, T]`: row t has the accuracies on each task after learning task t; NaN for later tasks.

    Returns:
      `average_accuracy`, the mean over all tasks after learning the last one; `forgetting`, the mean decrease from the
      best accuracy on each task (Chaudhry et al. 2018, Riemannian walk for incremental learning, equation 3);
      `backward_transfer`, the mean change since each task was learned (Lopez-Paz and Ranzato 2017, Gradient episodic
      memory). The last two are None if there is only one task.
    """
    tasks = len(matrix)
    last = matrix[-1]
    forgetting = [np.nanmax(matrix[:-1, task]) - last[task] for task in range(tasks - 1)]
    transfer = [last[task] - matrix[task, task] for task in range(tasks - 1)]
    return {
        "average_accuracy": float(np.mean(last)),
        "forgetting": float(np.mean(forgetting)) if forgetting else None,
        "backward_transfer": float(np.mean(transfer)) if transfer else None,
    }


def as_rows(matrix: np.ndarray) -> list[list[float | None]]:
    """Returns the matrix in a form for JSON: None instead of NaN."""
    return [[None if np.isnan(value) else float(value) for value in row] for row in matrix]


def table(matrix: np.ndarray, names: Sequence[str]) -> str:
    """Returns the matrix as lines of text, in percent."""
    width = max(len(name) for name in names)
    lines = ["accuracy in percent after each task (row), on each task (column)"]
    for name, row in zip(names, matrix, strict=True):
        cells = ["     " if np.isnan(value) else f"{100.0 * value:5.1f}" for value in row]
        lines.append(f"  {name:<{width}}  {'  '.join(cells)}")
    return "\n".join(lines)


def picture(matrix: np.ndarray, names: Sequence[str]) -> Any:
    """Returns the matrix as an image for TensorBoard, uint8 `[1, height, width, 3]`."""
    from tfpar.monitor import figures  # imported here, because few processes draw

    return figures.matrix(matrix, labels(names), ("rows: after", "columns: on", "accuracy", "in percent"))


def labels(names: Sequence[str]) -> list[str]:
    """Returns the longest form of the tasks' names that fits beside a picture of the matrix.

    The forms are `1: classes 0-9`, `classes 0-9`, `1: 0-9` and `1`.
    """
    from tfpar.monitor import figures

    parts = [name.partition(": ") for name in names]
    forms = (
        list(names),
        [name for _, _, name in parts],
        [f"{number}: {name.partition(' ')[2]}" for number, _, name in parts],
    )
    return next((form for form in forms if figures.fit(form)), [number for number, _, _ in parts])

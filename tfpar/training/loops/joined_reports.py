"""Merges the reports of workers that train independently."""

from __future__ import annotations

from tfpar.collectives.agreement import WorkerAgreement
from tfpar.training.loops.state import Interval

import numpy as np


def joined_reports(
    own: Interval, loss_counts: np.ndarray, row: np.ndarray, agreement: WorkerAgreement, together: int = 1
) -> tuple[Interval, np.ndarray, np.ndarray]:
    """The steps of all workers as one interval, the same on each worker; takes one gather of a few numbers per step.

    A step counts as applied if every worker that had examples in it has applied its part. Its loss is the mean over the
    workers that applied it.

    Args:
      own: This worker's report of n steps.
      loss_counts: Float32 `[n]`: see `StepsResult`.
      row: Float64 `[k]`: other numbers of this worker.
      agreement: The agreement between the workers.
      together: Number of consecutive workers that train together, and report the same; they count as one.

    Returns:
      The interval; the rows of all workers, `[workers, k]`; and for each worker, or group of workers that train
      together, the sum of the loss counts of the steps that it has applied.
    """
    steps, sizes = len(own.losses), [part.size for part in own.metric_sums]
    parts = [row, own.losses, own.counts, loss_counts, own.applied, *(part.ravel() for part in own.metric_sums)]
    table = np.stack(agreement.gather_arrays(np.concatenate([np.asarray(part, np.float64) for part in parts])))
    ends = np.cumsum([len(row), steps, steps, steps, steps, *sizes])[:-1]
    rows, *reports = np.split(table, ends, axis=1)
    losses, counts, weights, applied, *metrics = (report[::together] for report in reports)
    weights = np.where(applied > 0.0, weights, 0.0)
    total = weights.sum(axis=0)
    summed = np.where(weights > 0.0, weights * losses, 0.0).sum(axis=0)
    any_applied = (applied > 0.0).any(axis=0)
    loss = np.divide(summed, total, out=np.where(any_applied, 0.0, np.nan), where=total > 0.0)
    all_applied = any_applied & ((applied > 0.0) | (counts == 0.0)).all(axis=0)
    sums = [part.sum(axis=0).reshape(one.shape) for part, one in zip(metrics, own.metric_sums, strict=True)]
    return Interval(loss, counts.sum(axis=0), all_applied, sums), rows, weights.sum(axis=1)

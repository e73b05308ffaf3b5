"""The choice of the checkpoint to resume from: the newest that is intact on every worker."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from tfpar.checkpoint.checkpointer import Checkpoint, Checkpointer
from tfpar.collectives.agreement import WorkerAgreement
from tfpar.config import ConfigError

_log = logging.getLogger(__name__)

_NONE = -1
# A network file system may return a directory listing that is some seconds old, from before a crash.
_LOOKS = 10
_SECONDS_BETWEEN_LOOKS = 1.0


def newest(checkpointer: Checkpointer, agreement: WorkerAgreement | None = None) -> Checkpoint | None:
    """The newest checkpoint that passes its checksums on all workers; later ones are set aside.

    All workers call it together. Damage is reported by the worker that finds it, and by worker 0.

    Args:
      checkpointer: This worker's checkpointer.
      agreement: Between the workers; None where there is only one.

    Returns:
      The checkpoint, the same on each worker except for its exchange state, or None if there is none.

    Raises:
      ConfigError: The workers see different checkpoints, or all existing ones are damaged.
    """
    steps = _steps_all_see(checkpointer, agreement)
    if not steps:
        return None
    found = checkpointer.latest()
    while True:
        mine = _NONE if found is None else found.step
        held = [mine] if agreement is None else agreement.gather(mine)
        agreed = min(held)
        if agreed == _NONE:
            raise ConfigError(
                f"every checkpoint in {checkpointer.directory} is damaged (steps {', '.join(map(str, steps))}). "
                "Restore one from a backup; or start from the beginning: move the directory away, or give another "
                "--workdir."
            )
        if len(set(held)) == 1:
            break
        if (
            mine < max(held) and checkpointer.worker != 0
        ):  # worker 0 has logged its own; the others are silent otherwise
            for step in sorted(step for step in checkpointer.damaged if step > mine):
                _log.warning("checkpoint of step %d is damaged here (%s)", step, checkpointer.damaged[step])
        if mine == max(held):
            victims = [str(rank) for rank, step in enumerate(held) if step < mine]
            names = f"worker{'s' * (len(victims) > 1)} {', '.join(victims)}"
            checkpointer.warn(f"checkpoint of step {mine} is damaged for {names}; trying the one before it")
        if found is not None and found.step > agreed:
            found = checkpointer.latest(below=agreed + 1)
    if agreed != steps[-1]:
        checkpointer.set_aside(agreed)
    return found


def _steps_all_see(checkpointer: Checkpointer, agreement: WorkerAgreement | None) -> Sequence[int]:
    """The steps of the checkpoints, the same on all workers."""
    if agreement is None:
        return checkpointer.steps()
    for look in range(_LOOKS):
        if look:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        # The first exchange also waits until worker 0 has finished cleaning up.
        agreement.all_equal([look])
        steps = checkpointer.steps()
        if agreement.all_equal(list(steps)):
            return steps
    raise ConfigError(
        f"the workers find different checkpoints in {checkpointer.directory} (this one: "
        f"{', '.join(map(str, steps)) or 'none'}). All workers must see the same directory: put --workdir on storage "
        "they share."
    )

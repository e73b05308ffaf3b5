"""Skipped steps: counts them in a row, explains them, and ends the run after too many.

All replicas skip a step if loss or gradients are not finite on any of them, or if none of its examples can be used.
Weights, optimizer and residuals do not change, so a checkpoint from before such steps is as good as a later one, and
older ones are more valuable: weights that have begun to diverge stay finite for a while. Weights that a step has
made NaN stay so, because no step that reads them is applied.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfpar import inputs
from tfpar.config.errors import TrainingError
from tfpar.guards.batches import BatchIndex
from tfpar.process.exit_codes import BAD_NUMBERS
from tfpar.process.listing import listed
from tfpar.process.whole_files import replace_file

import numpy as np

_NAMED = 5
_INDICES_SHOWN = 16
_SECONDS_TO_LOOK = 20.0
FILE = "bad_steps.json"


class BadStepsError(TrainingError):
    """Too many steps in a row were left out. The message says which, their examples, and likely causes."""

    exit_code = BAD_NUMBERS


class NonFiniteStreak:
    """Counts consecutive skipped steps. All workers see the same ones, and end in the same way.

    Args:
      batches: The training batches.
      limit: `--max_bad_steps`; 0 for none.
      workdir: Where the chief writes the complete list when the limit is reached; empty for nowhere.
      is_chief: Whether this process writes.
      before_raise: Every worker calls it before it raises; it returns when all have called it, so that no worker exits
        before the chief has written its list.
      bad_weights: Returns the paths of the weights that are not finite. All workers call it together.

    Attributes:
      streak: The loss of each step left out since the last one that was applied, by number from 0 on; empty where
        there is no limit.
      suspends_checkpoints: Whether to suspend checkpoints, which would evict the last good ones: the last step was left
        out. Also where there is no limit.
    """

    def __init__(
        self,
        batches: BatchIndex,
        *,
        limit: int,
        workdir: str = "",
        is_chief: bool = True,
        before_raise: Callable[[], object] = lambda: None,
        bad_weights: Callable[[], Sequence[str]] = lambda: (),
    ) -> None:
        self.streak: dict[int, float] = {}
        self.suspends_checkpoints = False
        self._batches = batches
        self._limit = limit
        self._workdir = workdir
        self._is_chief = is_chief
        self._before_raise = before_raise
        self._bad_weights = bad_weights
        self._updated = 0  # the number, from 1 on, of the last step of this start that was applied

    def note(self, steps: np.ndarray, applied: np.ndarray, losses: np.ndarray) -> None:
        """Takes note of some steps.

        Args:
          steps: [n], their numbers from 0 on.
          applied: bool [n].
          losses: [n].

        Raises:
          BadStepsError: As many in a row as the limit were left out.
        """
        if applied.size:
            self.suspends_checkpoints = not applied[-1]
        if not self._limit or (applied.all() and not self.streak):
            if applied.any():
                self._updated = int(steps[applied][-1]) + 1
            return
        for step, good, loss in zip(steps.tolist(), applied, losses, strict=True):
            if good:
                self._updated = step + 1
                self.streak.clear()
                continue
            self.streak[step] = float(loss)
            if len(self.streak) == self._limit:
                self._end()

    def bad_weights(self) -> str:
        """Names the weights that are not finite, and what to do; empty if all are. All workers call it together."""
        paths = self._bad_weights()
        if not paths:
            return ""
        named = listed([*map(repr, paths)], _NAMED)
        if not self._updated:
            return (
                "The cause is in the weights: before the first step of this start, there was NaN or infinity in "
                f"{named}. Begin with others than those of this model, --warm_start or checkpoint."
            )
        return (
            f"The cause is in the weights: since the update of step {self._updated} at the latest, there is NaN or "
            f"infinity in {named}. No step that reads them can be applied. Begin again from before that step with "
            "another --optimizer, other --optimizer_args, or a lower --learning_rate."
        )

    def _end(self) -> None:
        batches = {step: _real(self._batches.indices(step, 1)) for step in self.streak}
        source = self._batches.source
        every = np.concatenate([*batches.values(), np.zeros(0, np.int64)])
        began = time.monotonic()
        found: Sequence[inputs.BadExample] = ()
        if isinstance(source, inputs.Source):
            found = inputs.locate_bad_example(source, every, limit=_NAMED, seconds=_SECONDS_TO_LOOK)
        looked_at_all = time.monotonic() - began < _SECONDS_TO_LOOK
        if self._is_chief and self._workdir:
            write_list(self._workdir, source.info, batches, self.streak, found)
        self._before_raise()
        raise BadStepsError(self._message(batches, found, looked_at_all, self.bad_weights()))

    def _message(
        self,
        batches: Mapping[int, np.ndarray],
        found: Sequence[inputs.BadExample],
        looked_at_all: bool,
        bad_weights: str,
    ) -> str:
        info = self._batches.source.info
        first, last = min(batches), max(batches)
        where = f" All are listed in {os.path.join(self._workdir, FILE)}." if self._workdir else ""
        if bad_weights:
            cause = bad_weights
        elif found:
            named = "; ".join(bad.describe(info) for bad in found)
            cause = f"The cause is in the data: {named}. Repair or remove such examples."
        elif self._gathered_non_finite():
            cause = (
                f"The cause is in the environment: rewards or observations of {info.name} were NaN or infinite. Repair "
                "the environment, or bound what it returns."
            )
        else:
            cause = (
                f"{self._what_was_looked_at(looked_at_all)}Likely causes: a --learning_rate that is too high (lower "
                "it, or give --warmup_steps or --clip_norm), overflow in --precision=mixed_float16 (mixed_bfloat16 has "
                "none), a loss that is not defined for some outputs."
            )
        return (
            f"steps {first + 1} to {last + 1}, {len(self.streak)} in a row (--max_bad_steps={self._limit}), were "
            "skipped: loss or gradients were not finite, or no example could be used. "
            f"{cause}{self._examples_of(first, batches[first])}{where} Earlier checkpoints are kept."
        )

    def _gathered_non_finite(self) -> bool:
        """Whether the environments in which a policy acts gave NaN or infinity: its memory has them, and its weights
        are finite, since no step with such numbers changes them."""
        source = self._batches.source
        if not isinstance(source, inputs.MadeSource) or source.info.task != inputs.REINFORCEMENT:
            return False
        return not all(np.isfinite(array).all() for array in source.export().values() if array.dtype.kind == "f")

    def _what_was_looked_at(self, looked_at_all: bool) -> str:
        source = self._batches.source
        if isinstance(source, inputs.MadeSource) and source.info.task == inputs.REINFORCEMENT:
            return "Rewards and observations are finite. "
        if not isinstance(source, inputs.Source):
            return ""
        examples = "The examples" if looked_at_all else "The examples that there was time to check"
        return f"{examples} are finite. "

    def _examples_of(self, step: int, examples: np.ndarray) -> str:
        info = self._batches.source.info
        if isinstance(self._batches.source, inputs.MadeSource):
            return ""
        if isinstance(self._batches.source, inputs.StreamSource):
            return f" The examples of a stream ({info.name}) have no numbers, so none can be named."
        shown = listed([*map(str, examples)], _INDICES_SHOWN)
        return f" Step {step + 1} had the {info.split} examples {shown} of --dataset={info.name}."


def write_list(
    workdir: str,
    info: inputs.SourceInfo,
    batches: Mapping[int, np.ndarray],
    losses: Mapping[int, float],
    found: Sequence[inputs.BadExample],
) -> None:
    """Writes `WORKDIR/bad_steps.json`: every step of the streak with its loss and examples, and the bad ones found.

    Steps are numbered from 1, as in all output for people. If the directory cannot be written to, nothing is written,
    so that the original error is not hidden.
    """
    content: dict[str, Any] = {
        "dataset": info.name,
        "split": info.split,
        "steps": [
            {"step": step + 1, "loss": _number(losses.get(step)), "examples": examples.tolist()}
            for step, examples in batches.items()
        ],
        "unusable": [{"example": bad.index, "file": bad.file, "reason": bad.reason} for bad in found],
    }
    path = pathlib.Path(workdir) / FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, (json.dumps(content, indent=1) + "\n").encode())
    except OSError:
        pass


def _real(indices: np.ndarray) -> np.ndarray:
    """The examples among slots, in order."""
    flat = np.asarray(indices).reshape(-1)
    return flat[flat >= 0]


def _number(loss: float | None) -> float | None:
    return loss if loss is not None and math.isfinite(loss) else None

"""How often a run had to start again, and how many steps that cost: `restarts.json` in its workdir."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import time
from typing import Any

from tfpar.process.whole_files import replace_file

_NAME = "restarts.json"
_OLD_NAME = "starts.json"  # until version 0.1.0; read if there is no file with the new name
_WRITE_SECONDS = 0.25
_COUNTS = ("starts", "restarts", "steps_redone", "reached")
_WITHOUT_LOSS = ("new", "finished", "stopped")


class RestartLog:
    """Counts starts of a run. Every worker has one; only the chief's writes.

    The counts matter less than the run: a file that cannot be read or written is ignored.

    Args:
      workdir: Directory of the run; None or empty: only the launcher's count is known.
      writes: Whether this process is the chief.
    """

    def __init__(self, workdir: str | None, *, writes: bool) -> None:
        self._path = pathlib.Path(workdir) / _NAME if workdir else None
        self._writes = writes and self._path is not None
        self._state: dict[str, Any] = {**dict.fromkeys(_COUNTS, 0), "ended": "new"}
        self._written = 0.0
        if self._path is None:
            self._state["restarts"] = launcher_restarts()
            return
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            old_path = self._path.with_name(_OLD_NAME)
            path = old_path if old_path.exists() and not self._path.exists() else self._path
            saved = json.loads(path.read_text())
            self._state = {**{key: int(saved[key]) for key in _COUNTS}, "ended": str(saved["ended"])}

    @property
    def restarts(self) -> int:
        """Starts after one that had failed or was preempted."""
        return self._state["restarts"]

    @property
    def steps_redone(self) -> int:
        """Steps done again because they came after the newest checkpoint; those of the last 0.25 s are not counted."""
        return self._state["steps_redone"]

    def begin(self, step: int) -> None:
        """Records a start that continues at this step."""
        state = self._state
        if self._path is not None and state["ended"] not in _WITHOUT_LOSS:
            state["restarts"] += 1
        # Also after an end without loss: the newest checkpoint may since have been found damaged.
        state["steps_redone"] += max(0, state["reached"] - step)
        state.update(starts=state["starts"] + 1, reached=step, ended="")
        if self._writes and self._path is not None:
            with contextlib.suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
        self._write()

    def reached(self, step: int) -> None:
        """Records the steps done so far; cheap enough for every call from Python."""
        self._state["reached"] = step
        if time.monotonic() - self._written >= _WRITE_SECONDS:
            self._write()

    def end(self, how: str) -> None:
        """Records that this start ended normally: `finished`, `stopped` or `preempted`."""
        self._state["ended"] = how
        self._write()

    def _write(self) -> None:
        if not self._writes:
            return
        assert self._path is not None
        self._written = time.monotonic()
        with contextlib.suppress(OSError):
            replace_file(self._path, (json.dumps(self._state) + "\n").encode(), flush=False)


def launcher_restarts() -> int:
    """How often `tfpar.launch` has started this job again."""
    text = os.environ.get("TFPAR_RESTARTS", "")
    return int(text) if text.isdigit() else 0

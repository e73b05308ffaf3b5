"""`--profile_steps`: TensorFlow's profiler over a window of steps, on the workers that were asked for.

The viewer (xprof) shows step times if every step is marked by a `Trace` with its number. In the window a call from
Python therefore trains one step; the input pipeline still prefetches, but the copy of a batch to the device does not
overlap with the step before.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import pathlib
import shutil
import tempfile

import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

_log = logging.getLogger(__name__)


def needs_viewer() -> str:
    """How to install the viewer, in brackets; empty where it is."""
    return "" if importlib.util.find_spec("xprof") else " (needs xprof: pip install 'tfpar[profile]')"


class ProfileWindow:
    """Runs the profiler over the steps `first` to `last`, both counted from 1 and both included.

    Args:
      window: First and last step, or None.
      worker: This worker's rank.
      profiles: Whether this worker was asked to.

    Attributes:
      first: The first step.
      last: The last step; 0 for none.
      running: Whether the profiler runs.
    """

    def __init__(self, window: tuple[int, int] | None, *, worker: int = 0, profiles: bool = True) -> None:
        self._open = window is not None and profiles
        self._worker = worker
        first, self.last = window or (0, 0)
        self.first = max(first, 1)
        self.running = False
        self._began = self._finished = 0
        self._directory: pathlib.Path | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    @property
    def profiled(self) -> tuple[int, int]:
        """First and last step of the profile, which are not those of the window where a start begins or ends in it."""
        return self._began, max(self._began, self._finished)

    def next_boundary(self, step: int, otherwise: int) -> int:
        """Where the next call must end at the latest: before the window, and after every step in it."""
        if not self.last or step >= self.last:
            return otherwise
        return min(otherwise, self.first - 1 if step < self.first - 1 else step + 1)

    def begins(self, step: int) -> bool:
        """Whether the next call is the first one in the window."""
        return self._open and not self.running and self.first <= step + 1 <= self.last

    def give_up(self) -> None:
        """Profiles nothing any more."""
        self._open = False

    def start(self, directory: str, step: int) -> None:
        """Starts the profiler.

        Args:
          directory: The profile goes to `plugins/profile/` in it.
          step: Finished steps.
        """
        self._began, self._directory = step + 1, pathlib.Path(directory, "plugins", "profile")
        try:
            self._scratch = tempfile.TemporaryDirectory(prefix="tfpar-profile-", ignore_cleanup_errors=True)
            tf.profiler.experimental.start(self._scratch.name)
        except (tf.errors.OpError, OSError) as error:  # e.g. another session in this process, or a full disk
            _log.warning("--profile_steps: the profiler does not start: %s", _reason(error))
            if self._scratch:
                self._scratch.cleanup()
            self.give_up()
        else:
            self.running = True

    def finished(self, step: int) -> bool:
        """Notes the number of finished steps; whether the profiler runs and these are the last of the window."""
        self._finished = step
        return self.running and step >= self.last

    def step(self, number: int) -> contextlib.AbstractContextManager[object]:
        """Marks a step of the window, counted from 1. Does nothing outside of the window."""
        if not self.running:
            return contextlib.nullcontext()
        return tf.profiler.experimental.Trace("train", step_num=number, _r=1)

    def stop(self) -> bool:
        """Stops the profiler and writes the profile; whether there is one."""
        assert self._scratch is not None
        assert self._directory is not None
        # One session for all workers: the viewer lists them as hosts of it.
        first, last = self.profiled
        session = self._directory / f"steps_{first}_to_{last}"
        target = session / f"worker_{self._worker}.xplane.pb"
        self.running = self._open = False
        try:
            tf.profiler.experimental.stop()
            (written,) = pathlib.Path(self._scratch.name).glob("plugins/profile/*/*.xplane.pb")
            keep_step_marks(written)
            session.mkdir(parents=True, exist_ok=True)
            shutil.move(written, target)
        except (tf.errors.OpError, OSError, ValueError) as error:
            _log.warning("--profile_steps: the profile is lost: %s", _reason(error))
            return False
        finally:
            self._scratch.cleanup()
        return True


def _reason(error: Exception) -> object:
    return error.message if isinstance(error, tf.errors.OpError) else error


def keep_step_marks(path: pathlib.Path) -> None:
    """Changes a profile so that the viewer takes the marks for steps, and not the turns of loops.

    xprof 2.24 (`EventForest::ProcessTensorFlowLoop`) takes every turn of a `tf.while_loop` for a step, as soon as an
    executor event has the statistic `iter_num`, and then measures no step at all.
    """
    space = xplane_pb2.XSpace()
    space.ParseFromString(path.read_bytes())
    for plane in space.planes:
        for statistic in plane.stat_metadata.values():
            if statistic.name == "iter_num":
                statistic.name = "loop_turn"
    path.write_bytes(space.SerializeToString())

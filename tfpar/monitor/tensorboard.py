"""The event files of one run, for TensorBoard.

`<workdir>/train` and `<workdir>/eval` are two runs with the same tags, so that TensorBoard draws them in one chart. The
hyperparameters are written to `eval`: the HPARAMS tab then lists the evaluation's results as the session's metrics, and
works out columns and ranges over all runs under its log directory. They are in a file of their own, with how the start
ended: of these TensorBoard takes the first record that it finds in a directory, whichever start has written it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tfpar.monitor import options_record, tags
from tfpar.process.safe_write import escaped

import numpy as np
import tensorflow as tf
from tensorboard.compat.proto import types_pb2
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.histogram.summary_v2 import histogram_pb
from tensorboard.plugins.hparams import api as hparams_api
from tensorboard.plugins.hparams import api_pb2
from tensorboard.plugins.hparams.summary import session_end_pb
from tensorboard.plugins.scalar import metadata as scalar_metadata

MAX_IMAGES = 16
_log = logging.getLogger(__name__)
_SCALAR = scalar_metadata.create_summary_metadata(display_name="", description="")
# Directory in a run's directory to which earlier versions wrote; a run that began there continues there.
_EARLIER_DIRECTORY = "tensorboard"
# TensorBoard reads the files of a directory in the order of their names. Those of tf.summary have a time in this place.
_SESSION_FILE = "events.out.tfevents.0.session"
# TensorFlow's own is two minutes, too long for one who watches.
_FLUSH_MILLISECONDS = 5000
_RETRY_SECONDS = 60.0


class EventFiles:
    """Writes one run's event files; creates them when there is something to write.

    What cannot be written is lost, with one warning in the log; after a while it is tried again, in new files.

    Args:
      workdir: The run's directory.
      options: The configuration by option name, recorded as a table; those that differ from their defaults are recorded
        as hyperparameters.
      workers: Workers of the run, for the layout of the charts.

    Attributes:
      directory: Where the files are: below it, one directory per run.
      trial: The name of the run's row in the tab HPARAMS.
      failures: What could not be written, and why; empty or one line.
    """

    def __init__(self, workdir: str, options: Mapping[str, Any], *, workers: int = 1) -> None:
        self.failures: list[str] = []
        self.trial = options_record.new_trial(options)
        self._retry_at = -math.inf
        self._begins_after: int | None = None
        earlier = os.path.join(workdir, _EARLIER_DIRECTORY)
        self.directory = earlier if os.path.isdir(earlier) else workdir
        self._options = dict(options)
        self._workers = workers
        self._writers: dict[str, tf.summary.SummaryWriter] = {}
        self._session: tf.io.TFRecordWriter | None = None
        self._described: set[tuple[str, str]] = set()

    def begin(self, step: int, trial: str = "") -> None:
        """Continues what an earlier start wrote: TensorBoard leaves out its points after `step`, which are made again.

        Call it before anything is written.

        Args:
          step: Finished steps; 0: nothing of an earlier start counts.
          trial: The name that the run has; empty: it is a new one.
        """
        self.trial = trial or self.trial
        self._begins_after = step

    def scalars(self, run: str, step: int, values: Mapping[str, float]) -> None:
        """Writes points of several charts as one event, at a tenth of the cost of as many `tf.summary.scalar`s.

        Args:
          run: `train` or `eval`.
          step: Finished steps.
          values: By tag.
        """
        summary = Summary()
        for tag, value in values.items():
            entry = summary.value.add(tag=tag, metadata=_SCALAR)
            if (run, tag) not in self._described:  # TensorBoard takes the description of a chart's first point
                entry.metadata.summary_description = tags.description(tag)
                self._described.add((run, tag))
            entry.tensor.dtype = types_pb2.DT_FLOAT
            entry.tensor.float_val.append(value)
        self._raw(run, summary, step)

    def text(self, tag: str, text: str, step: int = 0) -> None:
        """Writes text that is shown as it is, line by line."""
        # Four blanks make a code block in TensorBoard's markdown, whatever the text contains.
        block = "\n".join("    " + line for line in text.splitlines())
        self.markdown(tag, block, step)

    def markdown(self, tag: str, text: str, step: int = 0) -> None:
        """Writes text in markdown."""
        shown = escaped(text)
        self._write("train", lambda: tf.summary.text(tag, shown, step=step))

    def histograms(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        """Writes the distributions of several arrays, by tag, as one event."""
        summary = Summary()
        for tag, array in values.items():
            finite = array[np.isfinite(array)]
            summary.value.extend(histogram_pb(tag, finite, buckets=64, description=tags.description(tag)).value)
        self._raw("train", summary, step)

    def images(self, tag: str, batch: Any, step: int = 0, *, run: str = "train") -> None:
        """Writes up to `MAX_IMAGES` images.

        Args:
          tag: Their name.
          batch: [n, height, width, channels], integer or float, 1, 3 or 4 channels. Values outside [0, 1] (0 to 255
            for uint8) are rescaled by the smallest and largest of the batch.
          step: Finished steps.
          run: `train` or `eval`.
        """
        shown, text = displayable(np.asarray(batch)[:MAX_IMAGES]), tags.description(tag)
        self._write(run, lambda: tf.summary.image(tag, shown, step=step, max_outputs=MAX_IMAGES, description=text))

    def end_session(self, *, success: bool) -> None:
        """Tells the HPARAMS tab how this start ended."""
        status = api_pb2.STATUS_SUCCESS if success else api_pb2.STATUS_FAILURE
        self._write("eval", lambda: self._record_session(session_end_pb(status)))

    def flush(self) -> None:
        """Makes everything written so far visible to TensorBoard."""
        with self._reported():
            for writer in self._writers.values():
                writer.flush()

    def close(self) -> None:
        """Flushes and closes the files; a later write opens new ones."""
        for writer in self._taken_writers():
            with self._reported():
                writer.close()

    def _raw(self, run: str, summary: Summary, step: int) -> None:
        self._write(run, lambda: tf.summary.experimental.write_raw_pb(summary.SerializeToString(), step=step))

    def _write(self, run: str, write: Callable[[], Any]) -> None:
        if time.monotonic() < self._retry_at:
            return
        with self._reported(), self._writer(run).as_default():
            write()

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        """A full disk, or a directory that has become read-only, must not end the training."""
        try:
            yield
        except (OSError, tf.errors.OpError) as error:
            self._retry_at = time.monotonic() + _RETRY_SECONDS
            if not self.failures:
                reason = str(error) if isinstance(error, OSError) else error.message.splitlines()[0].split("; ")[-1]
                self.failures.append(f"TensorBoard events: {reason}")
                _log.warning("TensorBoard events cannot be written (%s); training continues without them", reason)
            self._described.clear()
            for writer in self._taken_writers():  # a writer that failed stays broken (TensorFlow 2.21)
                with contextlib.suppress(OSError, tf.errors.OpError):
                    writer.close()

    def _taken_writers(self) -> list[tf.summary.SummaryWriter | tf.io.TFRecordWriter]:
        """All writers, to be closed; a later write opens new ones."""
        taken = [*self._writers.values(), *([self._session] if self._session else [])]
        self._writers, self._session = {}, None
        return taken

    def _writer(self, run: str) -> tf.summary.SummaryWriter:
        if not self._writers:
            for name in ("train", "eval"):
                path = os.fsencode(os.path.join(self.directory, name))  # its bytes, which may be no UTF-8
                self._writers[name] = tf.summary.create_file_writer(path, flush_millis=_FLUSH_MILLISECONDS)
            if self._begins_after is not None:
                for writer in self._writers.values():
                    _write_start(writer, self._begins_after)
                    writer.flush()  # what cannot be written is tried again, in other files
                self._begins_after = None  # files that are opened again continue this start
            self._begin_session()
            with self._writers["train"].as_default():
                tf.summary.text("configuration", escaped(options_record.markdown(self._options)), step=0)
                tf.summary.text("what_charts_show", tags.table(), step=0)
                tf.summary.experimental.write_raw_pb(tags.layout(self._workers).SerializeToString(), step=0)
        return self._writers[run]

    def _begin_session(self) -> None:
        """Writes the hyperparameters in place of those of an earlier start, and of how that one ended."""
        directory = os.fsencode(os.path.join(self.directory, "eval"))
        os.makedirs(directory, exist_ok=True)
        path = os.path.join(directory, os.fsencode(_SESSION_FILE))
        with contextlib.suppress(FileNotFoundError):  # another file: a TensorBoard that runs has the old one open
            os.unlink(path)
        self._session = tf.io.TFRecordWriter(path)
        self._session.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        self._record_session(hparams_api.hparams_pb(options_record.hparams(self._options), trial_id=self.trial))

    def _record_session(self, summary: Summary) -> None:
        assert self._session is not None
        event = Event(wall_time=time.time())
        event.summary.ParseFromString(summary.SerializeToString())  # TensorBoard has two classes of this message
        self._session.write(event.SerializeToString())
        self._session.flush()


def _write_start(writer: tf.summary.SummaryWriter, step: int) -> None:
    """Writes that a start begins after `step` steps, as TensorFlow 1 did: whatever is earlier in the files of this
    directory and comes after them is void."""
    log = SessionLog(status=SessionLog.START)
    event = Event(wall_time=time.time(), step=step + 1 if step else 0, session_log=log)
    # The files of tf.summary take no other events than summaries by a public function (TensorFlow 2.21).
    tf.raw_ops.ImportEvent(writer=writer._resource, event=event.SerializeToString())


def displayable(images: np.ndarray) -> np.ndarray:
    """Images as `tf.summary.image` takes them: uint8, or float32 in [0, 1].

    Args:
      images: [n, height, width, channels] of any number type.
    """
    if images.dtype == np.uint8:
        return images
    images = images.astype(np.float32)
    low, high = float(images.min()), float(images.max())
    if low < 0.0 or high > 1.0:
        images = (images - low) / max(high - low, 1e-12)
    return images

"""The work that the chief does for all workers: scanning the directory, keeping the journal, and exporting."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import logging
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tfpar.config import ConfigError, ExperimentConfig, IncrementalConfig
from tfpar.incremental.online.arrivals import Arrivals, Form
from tfpar.incremental.online.exports import Exports
from tfpar.incremental.online.journal import NAME as JOURNAL
from tfpar.incremental.online.journal import ArrivedFile, Delivery, Journal

import filelock

_log = logging.getLogger(__name__)


class Chief:
    """The work that the chief does for all workers.

    Args:
      options: The options of incremental learning.
      form: The reader of files.
      config: The whole configuration.
      steps_of: Returns the number of steps for a number of examples.
    """

    def __init__(
        self,
        options: IncrementalConfig,
        form: Form,
        config: ExperimentConfig,
        steps_of: Callable[[int], int],
    ) -> None:
        self._options, self._steps_of = options, steps_of
        self._form, self._arrivals = form, Arrivals(options.watch, form)
        self._enough = options.delivery_examples or config.input.global_batch_size
        self._workdir = config.checkpoint.workdir
        self._exports = Exports(self._workdir, options.keep_exports)
        self._waiting: list[ArrivedFile] = []
        self._twins: list[ArrivedFile] = []  # with the content of a waiting file, which may still disappear
        self._waits_since = self._idle_since = time.monotonic()

    @functools.cached_property
    def journal(self) -> Journal:
        """The journal, read at the first use: by then the workdir is locked.

        Raises:
          ConfigError: It cannot be read.
        """
        return Journal(self._workdir, self._arrivals.content)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Returns a context that locks the workdir against other processes, also between deliveries.

        Raises:
          ConfigError: Another process has locked it.
        """
        path = pathlib.Path(self._workdir) / ".watch.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with filelock.FileLock(path, timeout=0):
                yield
        except filelock.Timeout as error:
            raise ConfigError(
                f"--workdir={self._workdir}: another process already watches a directory for this run. End it, or "
                "give another workdir."
            ) from error

    def next(self, position: int) -> tuple[Delivery | None, bool]:
        """Returns the next delivery to learn, or None; and whether the run ends if there is none.

        Args:
          position: The step of the newest checkpoint.

        Raises:
          ConfigError: The journal lacks steps that the model has learned, or a file of an unfinished delivery is gone
            or has other contents.
        """
        if delivery := self._unfinished(position):
            return delivery, False
        now = time.monotonic()
        stops = self._arrivals.stops  # before the scan, which so finds every file that arrived before STOP
        # A waiting file that was appended to or replaced counts as another file, which a later scan finds.
        self._waiting = self._arrivals.unchanged(self._waiting)
        known = {file.identity for file in (*self._waiting, *self._twins)}
        arrived, others = self._arrivals.look(self.journal.known, known)
        good, bad = self._arrivals.check(self._without_repeated(arrived))
        others |= self._reject(bad)
        for name in self._arrivals.new_foreign():
            _log.warning("%s is ignored: it is not %s", name, self._form.reads)
        if good and not self._waiting:
            self._waits_since = now
        self._waiting += good
        contents = {file.content for file in self._waiting}
        twins = [file for file in self._twins if file.content in contents]
        others |= len(twins) < len(self._twins)  # a later scan finds the others again
        self._twins = twins
        if arrived or others:
            self._idle_since = now
        ends = stops and not others
        ends |= 0.0 < self._options.idle_seconds <= now - self._idle_since
        examples = sum(file.examples for file in self._waiting)
        late = now - self._waits_since >= self._options.delivery_seconds
        if examples and (ends or late or examples >= self._enough):
            if len(self._arrivals.unchanged(self._waiting)) < len(self._waiting):  # one has changed since it was read
                return None, False
            delivery = self.journal.deliver(self._waiting, self._steps_of(examples))
            self._leave_out(self._twins)
            self._waiting, self._twins, self._idle_since = [], [], now
            return delivery, False
        return None, ends

    def _reject(self, bad: Sequence[tuple[ArrivedFile, str]]) -> bool:
        """Records unusable files; returns whether some of them were gone or had changed when they were read, so that a
        later scan must find them again."""
        there = self._arrivals.unchanged([file for file, _ in bad])
        for file, reason in bad:
            if file in there:
                self.journal.reject(file, reason)
                _log.warning("%s is skipped, and stays where it is: %s", file.name, reason)
        return len(there) < len(bad)

    def _unfinished(self, position: int) -> Delivery | None:
        """Returns the first delivery that is not learned completely, or lacks its export."""
        deliveries = self.journal.deliveries
        if position > self.journal.steps:
            raise ConfigError(
                f"--workdir={self._workdir}: the newest checkpoint is of step {position}, but {JOURNAL} ends at step "
                f"{self.journal.steps}, so it lacks files that were learned. Restore it, or start in another "
                f"--workdir, with --warm_start={self._workdir} for the weights."
            )
        first = bisect.bisect_left(deliveries, position, key=lambda each: each.end)
        for delivery in deliveries[first : first + 2]:
            if delivery.end > position:
                self._check_files(delivery)
                return delivery
            if self._lacks_export(delivery):
                return delivery
        return None

    def _check_files(self, delivery: Delivery) -> None:
        """Refuses to learn the rest of a delivery from other examples than those that were delivered."""
        for file in delivery.files:
            if not self._arrivals.holds(file):
                raise ConfigError(
                    f"--watch={self._options.watch}: {file.name} of delivery {delivery.number} has other contents, or "
                    "is gone, and its examples are not all learned. Restore it as it arrived; a file may be removed or "
                    "replaced only after the export of a model that has learned from it."
                )

    def _without_repeated(self, arrived: Sequence[ArrivedFile]) -> list[ArrivedFile]:
        """Returns the files with a content that no other file had, and leaves the others out."""
        fresh, repeated = [], []
        waiting = {file.content for file in self._waiting}
        for file in arrived:
            file = dataclasses.replace(file, content=self._arrivals.content(file))
            if file.content and file.content in self.journal.contents:
                repeated.append(file)
            elif file.content and file.content in waiting:
                self._twins.append(file)
            else:
                fresh.append(file)
                waiting.add(file.content)
        self._leave_out(repeated)
        return fresh

    def _leave_out(self, files: Sequence[ArrivedFile]) -> None:
        """Records files whose content was learned under another name or at another time."""
        if files:
            self.journal.repeat(files)
            others = f" and {len(files) - 1:,} more" if len(files) > 1 else ""
            _log.warning("%s%s: left out, the model has learned from the same bytes before", files[0].name, others)

    def export(self, delivery: Delivery, summary: Mapping[str, Any]) -> pathlib.Path | None:
        """Exports the model after a delivery if an export is due; returns its path, else None."""
        if not self.is_due(delivery):
            return None
        about = {
            "version": delivery.number,
            "step": delivery.end,
            "examples": self.journal.examples(delivery.number),
            "eval": summary["eval"],
            "params_sha256": summary["params_sha256"],
        }
        return self._exports.add(delivery.number, about)

    def _lacks_export(self, delivery: Delivery) -> bool:
        return self.is_due(delivery) and not self._exports.has(delivery.number)

    def is_due(self, delivery: Delivery) -> bool:
        """Whether the model is exported after a delivery."""
        return delivery.number % self._options.export_every == 0

"""Examples that a run could not use: an error that names the one, or a count and the first few names."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Sequence

from tfpar import inputs
from tfpar.cluster.failure import COMMUNICATION_ERRORS
from tfpar.guards.batches import BatchIndex

import numpy as np
import tensorflow as tf

_log = logging.getLogger(__name__)

_NAMED = 5
_SECONDS_TO_LOOK = 60.0
_SECONDS_TO_NAME = 10.0
# What TensorFlow raises where a peer, or memory, and not this worker's input is at fault.
_NOT_OF_INPUT = (*COMMUNICATION_ERRORS, tf.errors.ResourceExhaustedError)
# What TensorFlow 2.21 says of an operation that an iterator ran: the iterator's name, or the operation that took the
# next element. Of an operation of the model, it may say `[[IteratorGetNext/_4]]`.
_OF_INPUT = re.compile(r"Iterator::|\[\[[\w/]*Iterator\w*GetNext\w*\]\]")


@contextlib.contextmanager
def named(source: inputs.AnySource, indices: Callable[[], Sequence[int] | np.ndarray]) -> Iterator[None]:
    """Turns the error of a TensorFlow op that read examples into one that says which example, in one line.

    Args:
      source: The source that is read inside the context.
      indices: The examples that may have been read there, the first ones first; negative ones are padding.

    Raises:
      BadRecordError: One of them cannot be used.
      TrainingError: Reading failed, and works again.
    """
    try:
        yield
    except _NOT_OF_INPUT:
        raise
    except inputs.READ_ERRORS as error:
        if isinstance(source, inputs.StreamSource):
            if "was expected to contain" in str(error):  # what `assert_cardinality` says
                raise inputs.stream_ended(source) from error
            if _OF_INPUT.search(str(error)):
                raise inputs.stream_error(source, error) from error
            raise
        if isinstance(source, inputs.MadeSource):
            raise
        candidates = np.asarray(indices()).reshape(-1)
        found = inputs.locate_bad_example(source, candidates[candidates >= 0], seconds=_SECONDS_TO_LOOK)
        if found:
            raise inputs.bad_record_error(source.info, found[0]) from None
        if isinstance(error, UnicodeDecodeError) or _OF_INPUT.search(str(error)):
            raise inputs.transient_read_error(source.info, error) from None
        raise


class SkippedExampleLog:
    """Counts the examples left out under `--on_bad_record=skip`.

    The weights that steps report are the same on every worker, and so is the count, without communication. The chief
    reads steps with missing examples again, to name the first few on standard error.

    Args:
      batches: The batches of training or evaluation.
      is_chief: Whether this process names them.

    Attributes:
      count: Examples left out; a repeated example counts each time.
    """

    def __init__(self, batches: BatchIndex, *, is_chief: bool) -> None:
        self.count = 0
        self._batches = batches
        self._to_name = _NAMED if is_chief else 0
        self._known: set[int] = set()

    def note(self, first: int, counts: np.ndarray) -> None:
        """Takes note of some steps.

        Args:
          first: Number of the first one, from 0.
          counts: [n] examples of each that were used: sums of weights.
        """
        if not self._batches.skips:
            return
        expected = self._batches.examples_in(first + np.arange(len(counts))).sum(axis=1)
        lacking = np.maximum(np.rint(expected - counts).astype(np.int64), 0)
        self.count += int(lacking.sum())
        for step in first + np.flatnonzero(lacking):
            if self._to_name <= 0:
                return
            self.name(self._batches.indices(int(step), 1))

    def name(self, indices: np.ndarray) -> None:
        """Looks through examples for ones that cannot be used, and names those that are new."""
        source = self._batches.source
        if not isinstance(source, inputs.Source):
            return
        unknown = [index for index in indices.reshape(-1).tolist() if index >= 0 and index not in self._known]
        for bad in inputs.locate_bad_example(source, unknown, limit=self._to_name, seconds=_SECONDS_TO_NAME):
            self._known.add(bad.index)
            self._to_name -= 1
            last = "" if self._to_name else " (further ones are only counted)"
            _log.info("skipped: --dataset=%s: %s%s", source.info.name, bad.describe(source.info), last)

"""The position of an iterator over a stream: saves and restores it, including the parts that tf.data omits.

tf.data saves an iterator with the iterators below it. `shuffle` takes a new seed in each pass from a generator, and the
number of seeds taken is saved with the iterator of that `shuffle`. This iterator no longer exists once its elements
have been read: a `batch` releases it with the last batch of a pass, and an `interleave` releases shuffled file names as
soon as it has opened the last file. A restored stream would then shuffle its later passes with the seeds of other
passes (TensorFlow 2.21). The number of passes is therefore saved too, and each generator is set to it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from tfpar.inputs.source import no_autograph

import numpy as np
import tensorflow as tf

STATE = "input/stream"
PASSES = "input/passes"
POSITION = (STATE, PASSES)
_IGNORE, _FAIL = 1, 2  # values of tf.data's ExternalStatePolicy

_evaluated: weakref.WeakSet[tf.data.Dataset] = weakref.WeakSet()


class Position:
    """The position in a data set that is read again and again.

    Args:
      dataset: One pass. The position of its iterators can be saved if none of its operations has another kind of state,
        such as a Python function or random numbers without a seed.
      restores: Whether `restore` will be called. It must read the state of each `shuffle` before its first seed is
      taken.
    """

    def __init__(self, dataset: tf.data.Dataset, *, restores: bool = False):
        self._dataset = dataset
        self._shuffles = list(_shuffles(dataset))
        self._first_seeds = [_state(iter(_plain(shuffle))) for shuffle in self._shuffles] if restores else []
        self._state_error: tf.errors.OpError | Literal[False] | None = None
        with tf.init_scope(), tf.device("CPU:0"):
            # Not a tf.Variable: in a strategy's scope, that would become one variable per replica.
            self._passes = tf.raw_ops.VarHandleOp(
                dtype=tf.int64, shape=[], shared_name="cd2c89b7-88b7-44c8-ad83-06c2a9158347"
            )  # this name is TensorFlow's for a resource that ends with its handle
            self._set_passes(0)

    def repeated(self) -> tf.data.Dataset:
        """Returns the data set, repeated without end; it counts the passes that have begun."""

        def counted(number: tf.Tensor, element: Any) -> Any:
            begins = tf.cast(tf.equal(number, 0), tf.int64)
            tf.raw_ops.AssignAddVariableOp(resource=self._passes, value=begins)
            return element

        return self._dataset.enumerate().repeat().map(no_autograph(counted))

    def save(self, iterator: tf.data.Iterator) -> dict[str, np.ndarray]:
        """Saves the position of an iterator over `repeated`; a thread may be reading ahead in it.

        Returns:
          uint8 [bytes] under `STATE`; int64 [] under `PASSES`: the number of passes that have begun, or 0 if that
          number does not determine the seeds taken, because an evaluation takes seeds of the same `shuffle`.

        Raises:
          tf.errors.OpError: The position cannot be saved.
        """
        self._check_state_can_be_saved()
        passes, state = -1, b""
        while passes != self._begun():
            passes = self._begun()
            state = tf.io.serialize_tensor(_state(iterator)).numpy()
        shared = any(shuffle in _evaluated for shuffle in self._shuffles)
        return {STATE: np.frombuffer(state, np.uint8), PASSES: np.asarray(0 if shared else passes, np.int64)}

    def restore(self, iterator: tf.data.Iterator, saved: Mapping[str, np.ndarray]) -> None:
        """Sets a new iterator over `repeated` to a saved position.

        Raises:
          tf.errors.OpError: The position is that of another data set.
        """
        _set_state(iterator, tf.io.parse_tensor(tf.constant(saved[STATE].tobytes()), tf.variant))
        passes = int(saved[PASSES])
        for shuffle, first in zip(self._shuffles, self._first_seeds, strict=True):
            if passes:
                _take_seeds(_plain(shuffle), first, passes)
        self._set_passes(passes)

    def _begun(self) -> int:
        return int(tf.raw_ops.ReadVariableOp(resource=self._passes, dtype=tf.int64))

    def _set_passes(self, count: int) -> None:
        tf.raw_ops.AssignVariableOp(resource=self._passes, value=tf.constant(count, tf.int64))

    def _check_state_can_be_saved(self) -> None:
        """Raises FailedPreconditionError if an operation of the data set has state that cannot be saved, or if the
        number of passes does not say how many seeds a `shuffle` has taken.

        Checks the data set, not an iterator over it: creating one would take seeds that training needs.
        """
        if self._state_error is None and _takes_other_seeds(self._dataset):
            reason = "a shuffle in a later part of concatenate(), or used in two places"
            self._state_error = tf.errors.FailedPreconditionError(None, None, reason)
        if self._state_error is None:
            self._state_error = False
            try:
                tf.raw_ops.DatasetToGraphV2(input_dataset=self._dataset._variant_tensor, external_state_policy=_FAIL)
            except tf.errors.FailedPreconditionError as error:
                self._state_error = error
            except tf.errors.OpError:
                pass  # the graph is too large; this error comes after the check of the state, which has thus succeeded
        if self._state_error:
            raise self._state_error


def evaluates(dataset: tf.data.Dataset) -> None:
    """Records that evaluations create iterators over this data set, which take seeds of its shuffles."""
    _evaluated.update(_shuffles(dataset))


def _shuffles(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """Yields each `shuffle` that takes exactly one seed per pass: not those below a `repeat` or inside a function."""
    name = type(dataset).__name__
    if name == "_RepeatDataset":
        return
    if name == "_ShuffleDataset" and dataset._reshuffle_each_iteration is not False:
        yield dataset
    for below in dataset._inputs():
        yield from _shuffles(below)


def _takes_other_seeds(dataset: tf.data.Dataset) -> bool:
    """Whether a `shuffle` takes several seeds per pass, or takes its seed later than at the start of a pass."""
    shuffles = [*map(id, _shuffles(dataset))]
    return len(set(shuffles)) < len(shuffles) or _shuffles_later(dataset)


def _shuffles_later(dataset: tf.data.Dataset) -> bool:
    below, name = dataset._inputs(), type(dataset).__name__
    if name == "_RepeatDataset":
        return False
    late = below[1:] if name == "_ConcatenateDataset" else ()
    return any(True for part in late for _ in _shuffles(part)) or any(map(_shuffles_later, below))


def _plain(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the data set without tf.data's optimizations, which would cost more than the iterator that needs it."""
    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    return dataset.with_options(options)


def _take_seeds(shuffle: tf.data.Dataset, first: tf.Tensor, count: int) -> None:
    """Sets a generator to `count` taken seeds; each new iterator takes one. `first` is the state of the first one."""
    iterator = iter(shuffle)
    _set_state(iterator, first)

    @tf.function(autograph=False)
    def take(variant: tf.Tensor, handle: tf.Tensor, times: tf.Tensor) -> None:
        def body(number: tf.Tensor) -> tf.Tensor:
            with tf.control_dependencies([tf.raw_ops.MakeIterator(dataset=variant, iterator=handle)]):
                return number + 1

        tf.while_loop(lambda number: number < times, body, [tf.constant(1)], parallel_iterations=1)

    take(shuffle._variant_tensor, iterator._iterator_resource, tf.constant(count))


def _state(iterator: tf.data.Iterator) -> tf.Tensor:
    """Returns the state of a tf.data iterator, a variant tensor, without other resources such as `Position`'s count."""
    return tf.raw_ops.SerializeIterator(resource_handle=iterator._iterator_resource, external_state_policy=_IGNORE)


def _set_state(iterator: tf.data.Iterator, state: tf.Tensor) -> None:
    tf.raw_ops.DeserializeIterator(resource_handle=iterator._iterator_resource, serialized=state)

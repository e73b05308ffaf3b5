"""The devices of a pipeline: each replica has several, one for each place on the pipeline axis.

The strategy runs a replica on its first device. Operations of a later stage are placed on the stage's device by name.
The strategy mirrors a variable of a stage like any other, but its copies are on the devices of the stage's place.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from tfpar.parallel.replica import static_replica_id

import keras
import tensorflow as tf
from tensorflow.python.distribute import distribute_utils

_ATTRIBUTE = "tfpar_place"


class PipelineDevices:
    """The devices of one worker, by replica and place.

    Args:
      first: Names of the first device of each replica, on which the strategy runs it.
      places: Number of devices per replica.
      step: Difference of the device numbers of two consecutive places.

    Attributes:
      places: Number of devices per replica.
    """

    def __init__(self, first: Sequence[str], places: int, step: int = 1) -> None:
        self.places = places
        self._rows = [[_with_number_plus(name, step * place) for place in range(places)] for name in first]

    @property
    def replicas(self) -> int:
        """Number of replicas of this worker."""
        return len(self._rows)

    def of_replica(self, replica: int) -> Sequence[str]:
        """Returns the names of a replica's devices, by place."""
        return self._rows[replica]

    @property
    def host(self) -> str:
        """Name of this worker's CPU."""
        spec = tf.DeviceSpec.from_string(self._rows[0][0])
        return str(spec.replace(device_type="CPU", device_index=0).to_string())

    def own_replica(self) -> int:
        """Index, among this worker's replicas, of the current replica context."""
        return static_replica_id() % self.replicas

    def of_own_replica(self) -> Sequence[str]:
        """Calls `of_replica` for the current replica context."""
        return self.of_replica(self.own_replica())

    @contextlib.contextmanager
    def creating(self) -> Iterator[None]:
        """Returns a context in which `at` can create variables at a place. Enter it before the scope of the strategy.

        The strategy creates the copies of a variable in the order of the replicas, by calling the creators of outer
        contexts.
        """

        def make(create: Callable[..., Any], **options: Any) -> Any:
            if _current.place is None:
                return create(**options)
            row = self._rows[_current.copies % len(self._rows)]
            _current.copies += 1
            with tf.device(row[_current.place]):
                return create(**options)

        with tf.variable_creator_scope(make):
            yield

    @contextlib.contextmanager
    def creating_own(self, strategy: tf.distribute.Strategy) -> Iterator[None]:
        """Returns a context in which this worker creates variables that other workers do not have; use it instead of
        `creating` and the scope of the strategy.

        A strategy over workers creates every variable on all of them, with the values of the first. Here a variable is
        mirrored over the replicas of this worker, at the place that `at` gives.

        Args:
          strategy: The strategy that will run the replicas.
        """

        def make(create: Callable[..., Any], **options: Any) -> Any:
            place, initial = _current.place or 0, options["initial_value"]
            value = initial() if callable(initial) else initial

            def copies(**options: Any) -> list[tf.Variable]:
                made = []
                for row in self._rows:
                    with tf.device(row[place]):
                        made.append(create(**{**options, "initial_value": value}))
                return made

            if len(self._rows) == 1:
                return copies(**options)[0]
            # As `MirroredExtended._create_variable` of TensorFlow 2.21 does.
            classes, policies = distribute_utils.VARIABLE_CLASS_MAPPING, distribute_utils.VARIABLE_POLICY_MAPPING
            return distribute_utils.create_mirrored_variable(strategy, copies, classes, policies, **options)

        with tf.variable_creator_scope(make):
            yield


class _Current(threading.local):
    """The place at which this thread creates variables."""

    def __init__(self) -> None:
        self.place: int | None = None
        self.copies = 0


_current = _Current()


@contextlib.contextmanager
def at(place: int | None) -> Iterator[None]:
    """Returns a context in which variables are created on the devices of a place.

    It must be within `creating`, and threads must not create variables at the same time.
    """
    before = _current.place, _current.copies
    _current.place, _current.copies = place, 0
    try:
        yield
    finally:
        _current.place, _current.copies = before


def place_of(variable: keras.Variable) -> int | None:
    """Returns the place of a variable that belongs to a stage; None for others, which are on the first device."""
    return vars(variable).get(_ATTRIBUTE)


def mark_place(variable: keras.Variable, place: int) -> None:
    """Records the place of a variable."""
    vars(variable)[_ATTRIBUTE] = place


def beside(tensor: tf.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Returns a context that places operations on the device of a graph tensor; does nothing for eager tensors."""
    device = tensor.device if tf.is_symbolic_tensor(tensor) else ""
    return tf.device(device) if device else contextlib.nullcontext()


def by_device(tensors: Iterable[tf.Tensor]) -> list[list[tf.Tensor]]:
    """Returns the tensors of each device together; see `beside`."""
    found: dict[str, list[tf.Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.device, []).append(tensor)
    return [*found.values()]


def call_beside(function: Callable[..., tf.Tensor], tensor: tf.Tensor, *others: tf.Tensor) -> tf.Tensor:
    """Calls a function of tensors on the device of the first; see `beside`."""
    with beside(tensor):
        return function(tensor, *others)


def _with_number_plus(name: str, offset: int) -> str:
    spec = tf.DeviceSpec.from_string(name)
    return str(spec.replace(device_index=(spec.device_index or 0) + offset).to_string())

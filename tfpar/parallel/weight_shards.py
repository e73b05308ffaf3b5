"""Sharded weights: every replica keeps a part, and a weight is whole only while a layer computes with it.

ZeRO stage 3 (Rajbhandari et al. 2020, arXiv:1910.02054). Reading the value in a call of the model gathers the parts of
all replicas; the gradient of the whole value is summed over the replicas, and each replica receives its part. Each of
these two takes one collective call for all weights that are gathered together. Beside a model axis, a device has shards
of its parts of the divided weights, and gathers these parts.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tfpar.optim import keras_calls, keras_internals
from tfpar.parallel.division import Shards, Split
from tfpar.parallel.model_axis import Axis, Place, current_place, place_of_group
from tfpar.parallel.split import shape_of, split_of

import keras
import tensorflow as tf

_LEAST_ELEMENTS = 1024  # smaller weights stay whole


def layers_that_gather(model: keras.Model) -> list[keras.layers.Layer]:
    """The outermost layers that are not models: each gathers its weights when it is called."""
    found = []
    for layer in keras_internals.all_layers(model, include_self=False, recursive=False):
        found += layers_that_gather(layer) if isinstance(layer, keras.Model) else [layer]
    return found


def can_be_sharded(variable: keras.Variable) -> bool:
    """Whether a weight can be sharded and is large enough: at least 1,024 elements and two dimensions."""
    large = math.prod(variable.shape) >= _LEAST_ELEMENTS and len(variable.shape) > 1
    return large and variable.dtype == "float32" and variable.constraint is None


class ReplicaAxis(Axis):
    """The devices of one worker, each in the group of the devices with the same place in all replicas.

    Args:
      devices: For each program of the strategy, the name of its device. The programs of a replica are adjacent, and so
        are the workers that share a replica.
      worker: Rank of this worker.
      replicas: Number of replicas.
      devices_of_replica: Number of devices of a replica.

    Attributes:
      numbers: Numbers of this worker's devices among those of all workers.
      devices_of_replica: Number of devices of a replica.
      bytes_of_step: Bytes that a device sends to those of other replicas in the passes and the update of a training
        step; 0 until the step is traced.
    """

    def __init__(self, devices: Sequence[str], worker: int, replicas: int, devices_of_replica: int = 1) -> None:
        self.devices_of_replica, self.bytes_of_step = devices_of_replica, 0
        step = devices_of_replica
        self.numbers = range(worker * len(devices), (worker + 1) * len(devices))

        def place(number: int, device: str) -> Place:
            members = range(number % step, replicas * step, step)
            return place_of_group(members, number, device, [each // len(devices) for each in members])

        super().__init__([[place(*pair)] for pair in zip(self.numbers, devices, strict=True)], replicas)

    @contextlib.contextmanager
    def on(self, program: int, stage: int = 0) -> Iterator[Place]:
        """Returns a context in which layers that this thread traces gather their weights on the device of a program."""
        before, _current.place = _current.place, self._places[program][stage]
        try:
            yield self._places[program][stage]
        finally:
            _current.place = before


class _Current(threading.local):
    """The device on whose program this thread gathers weights: MirroredStrategy traces every device in its own
    thread."""

    def __init__(self) -> None:
        self.place: Place | None = None


_current = _Current()


def current_replica_place() -> Place | None:
    """The device whose program this thread traces, among those with the same place in all replicas; None if no weights
    are gathered."""
    return _current.place


def is_sharded(variable: keras.Variable) -> bool:
    """Whether replicas have shards of a variable."""
    return isinstance(split_of(variable), Shards)


def replica_split_of(variable: keras.Variable) -> Split | None:
    """Returns the division of a variable among replicas; None if there is none, or if a model axis divides it, too."""
    split = split_of(variable)
    return split.split if isinstance(split, Shards) and split.within is None else None


def is_shard(variable: keras.Variable, value: Any) -> bool:
    """Whether `value` is a shard of a weight, and a program that gathers weights is being traced."""
    split = split_of(variable)
    return (
        isinstance(split, Shards)
        and _current.place is not None
        and tuple(value.shape) == split.part_shape(split.shape) != split.gathered_shape
    )


def gathered(variables: Sequence[keras.Variable], values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns what a replica, or its device on the model axis, has of variables.

    All shards of trained variables are gathered in one call, and those of frozen ones, which have no gradients, in
    another.

    Args:
      variables: Any variables.
      values: For each variable, its value or a shard of it.
    """
    every = [number for number, pair in enumerate(zip(variables, values, strict=True)) if is_shard(*pair)]
    place, found = _current.place, list(values)
    for gather, trained in ((_gather, True), (_gather_frozen, False)):
        numbers = [number for number in every if variables[number].trainable == trained]
        if numbers and place is not None:
            splits = [split for number in numbers if isinstance(split := split_of(variables[number]), Shards)]
            for number, value in zip(numbers, gather(place, [values[each] for each in numbers], splits), strict=True):
                found[number] = value
    return found


def shown_gathered(variables: Sequence[keras.Variable]) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which sharded weights report the shape that they have when they are gathered, because some
    layers read it."""
    splits = [(variable, split_of(variable)) for variable in variables] if _current.place else []
    return keras_calls.shapes_of_variables(
        [(variable, split.gathered_shape) for variable, split in splits if isinstance(split, Shards)]
    )


def traced_whole(variables: Sequence[keras.Variable]) -> contextlib.AbstractContextManager[Any]:
    """Returns a context for tracing a call of the model by itself, outside a replica: nothing is gathered, and
    variables that are not whole here report their whole shape."""
    if current_place() or _current.place:
        return contextlib.nullcontext()
    return keras_calls.shapes_of_variables([(variable, shape_of(variable)) for variable in variables])


class Gathered:
    """The weights that one call of a model has gathered so far, each once."""

    def __init__(self) -> None:
        self._known: dict[int, tf.Tensor] = {}

    def of(self, variable: keras.Variable, value: Any) -> Any:
        """Returns the value, or what is gathered if it is a shard."""
        if value is None or not is_shard(variable, value):
            return value
        if id(variable) not in self._known:
            self._known[id(variable)] = gathered([variable], [value])[0]
        return self._known[id(variable)]


def with_gathered(
    values: Mapping[int, tf.Tensor], variables: Sequence[keras.Variable], given: Sequence[tf.Tensor], after: Any
) -> dict[int, tf.Tensor]:
    """Returns values by `id` of the variable, with the shards of `variables` gathered.

    Args:
      values: Values of any variables.
      variables: The variables of a block.
      given: For each variable of the block, its value or a shard of it.
      after: Tensors that must be ready before anything is gathered: the inputs of the block, so that no block's weights
        are gathered before its turn.
    """
    with tf.control_dependencies(after):
        return {**values, **dict(zip(map(id, variables), gathered(variables, given), strict=True))}


def _gather(place: Place, shards: Sequence[tf.Tensor], splits: Sequence[Shards]) -> list[tf.Tensor]:
    """Returns tensors gathered from the shards of all replicas; the gradient of a shard is summed over all replicas."""
    sizes = [math.prod(shard.shape) for shard in shards]

    @tf.custom_gradient
    def operator(*shards: tf.Tensor) -> Any:
        def scatter(*upstream: Any) -> list[tf.Tensor]:
            if len(splits) == 1 and splits[0].split.axis == 0:
                # As it is: this may be the largest tensor of the step, such as the gradient of a table of tokens.
                return [place.share_of_sum(_dense(upstream[0], splits[0].gathered_shape[0]))]
            columns = [_rows(each, split) for each, split in zip(upstream, splits, strict=True)]
            flat = tf.split(place.share_of_sum(tf.concat(columns, axis=1))[0], sizes)
            return [tf.reshape(each, shard.shape) for each, shard in zip(flat, shards, strict=True)]

        return _gather_frozen(place, shards, splits), scatter

    return list(operator(*shards))


def _gather_frozen(place: Place, shards: Sequence[tf.Tensor], splits: Sequence[Shards]) -> list[tf.Tensor]:
    """`_gather` without a gradient."""
    rows = place.all_gather(tf.concat([tf.reshape(shard, [-1]) for shard in shards], axis=0))
    columns = tf.split(rows, [math.prod(shard.shape) for shard in shards], axis=1)
    return [_joined(column, split) for column, split in zip(columns, splits, strict=True)]


def _rows(gradient: tf.Tensor | tf.IndexedSlices, shards: Shards) -> tf.Tensor:
    """Returns the shards of a gradient as rows: `[replicas, elements]`."""
    split = shards.split
    value = _dense(gradient, shards.gathered_shape[0])
    if split.padding:
        value = tf.pad(value, [[0, split.padding if axis == split.axis else 0] for axis in range(value.shape.rank)])
    if split.axis:
        value = tf.stack(tf.split(value, split.size, axis=split.axis))
    return tf.reshape(value, [split.size, -1])


def _dense(gradient: tf.Tensor | tf.IndexedSlices, rows: int) -> tf.Tensor:
    """Returns a gradient with this number of rows as a tensor."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, rows)
    return tf.convert_to_tensor(gradient)


def _joined(rows: tf.Tensor, shards: Shards) -> tf.Tensor:
    """Returns the value whose shards are these rows."""
    split, shape = shards.split, shards.gathered_shape
    if split.axis:
        return split.joined_tensor(tf.unstack(tf.reshape(rows, [split.size, *shards.part_shape(shards.shape)])))
    return tf.reshape(rows, [-1, *shape[1:]])[: shape[0]]

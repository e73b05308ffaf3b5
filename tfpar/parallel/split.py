"""Variables that are divided over the devices of the model axis, or among replicas.

The strategy mirrors such a variable with the shape of a part, and its copies differ. Keras and the optimizer use the
part; checkpoints, digests, exports and the user's own model use the whole value, through `whole` and `assign_whole`.
If a replica spans several workers, reading a whole value is a collective call of all of them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tfpar.optim import keras_deferred, keras_internals
from tfpar.optim.keras_whole import rows_and_columns
from tfpar.parallel.division import Shards, Split
from tfpar.parallel.held import Held, held_by, mark_held
from tfpar.parallel.pipeline.devices import at, mark_place, place_of
from tfpar.parallel.replica_peers import ReplicaPeers

import keras
import numpy as np
import tensorflow as tf

_ATTRIBUTE, _PEERS, _WEIGHT = "tfpar_split", "tfpar_peers", "tfpar_weight"
_BLOCK_BYTES = 32 << 20


def hold(variable: keras.Variable, held: Held, place: int) -> None:
    """Replaces a variable on the host with one on devices of this worker, or with one without elements.

    Args:
      variable: A variable that was created outside the strategy. Each worker creates its own: no strategy could mirror
        them.
      held: The location of the variable.
      place: The place in this worker's part of a pipeline.
    """
    if held.here:
        move_to_devices(variable, held.split, place, held.layer_peers)
    else:
        # The value is not needed, but reading it may be a collective call.
        value = keras_deferred.value_on_host(variable)
        keras_internals.replace_value(variable, np.zeros(held.absent_shape, value.dtype))
        mark_place(variable, place)
    mark_held(variable, held)


def split_of(variable: keras.Variable) -> Split | Shards | None:
    """Returns the division of a variable; None if every device has all of it."""
    return vars(variable).get(_ATTRIBUTE)


def model_split_of(variable: keras.Variable) -> Split | None:
    """Returns the division of a variable over the model axis, if any."""
    split = split_of(variable)
    return split.within if isinstance(split, Shards) else split


def peers_of(variable: keras.Variable) -> ReplicaPeers | None:
    """Returns the workers that share the parts of a variable; None if this worker has all parts."""
    return vars(variable).get(_PEERS)


def mark(variable: keras.Variable, split: Split | Shards | None, peers: ReplicaPeers | None = None) -> None:
    """Records that the copies of a mirrored variable, here or on several workers, are parts of a whole; or not."""
    vars(variable)[_ATTRIBUTE] = split
    vars(variable)[_PEERS] = peers


def shape_of(variable: keras.Variable) -> tuple[int, ...]:
    """Returns the shape of the whole variable."""
    split, held, shape = split_of(variable), held_by(variable), tuple(variable.shape)
    return split.whole_shape(shape) if split else held.shape if held else shape


def whole_elements(variables: Sequence[keras.Variable]) -> int:
    """Returns the number of elements of the whole variables."""
    return sum(math.prod(shape_of(variable)) for variable in variables)


def whole(variable: keras.Variable, replica: int = 0) -> np.ndarray:
    """Returns a copy of the value of a variable; the whole value if the variable is divided.

    Args:
      variable: The variable.
      replica: For a divided variable, the index of this worker's replica to read.
    """
    split, held, peers = split_of(variable), held_by(variable), peers_of(variable)
    value = _gathered(variable, split, peers) if split and peers else whole_here(variable, replica)
    return held.fetch(value) if held else value


def _gathered(variable: keras.Variable, split: Split | Shards, peers: ReplicaPeers) -> np.ndarray:
    """Returns the whole value of a variable whose parts several workers have.

    One part after the other is sent, so that no other copy of the whole value is needed.
    """
    value = np.empty(shape_of(variable), _dtype(variable))
    for rank, part in enumerate(_sent_parts(variable, split, peers)):
        split.place(value, rank, part)
    return value


def _sent_parts(variable: keras.Variable, split: Split | Shards, peers: ReplicaPeers) -> Iterator[np.ndarray]:
    """Yields the parts of a variable in order, each of which its worker sends to the others when it is asked for."""
    parts = copies_of(variable)
    for rank in range(split.size):
        worker, place = divmod(rank * split.copies, len(parts))
        own = parts[place].numpy() if worker == peers.rank else np.empty(tuple(variable.shape), _dtype(variable))
        yield peers.agreement.broadcast([own], worker)[0]


def whole_blocks(variable: keras.Variable, copy: int = 0) -> Iterator[np.ndarray]:
    """Yields the result of `whole` in blocks: arrays that have its elements in order, one after the other.

    A block has about 32 MiB, or is the part of a device. A weight is one block if another than its first dimension is
    divided.

    Args:
      variable: The variable.
      copy: The copy to read, of those on this worker. For a divided variable, any copy of a replica stands for it.
    """
    held = held_by(variable)
    if held is None:
        yield from _blocks(variable, copy)
        return
    own = _blocks(variable, copy) if held.here else itertools.repeat(None)
    for shape in _block_shapes(variable, held.split):
        block = next(own)
        sent = np.zeros(shape, _dtype(variable)) if block is None else block
        yield held.peers.agreement.broadcast([sent], held.ranks[0])[0]


def _blocks(variable: keras.Variable, copy: int) -> Iterator[np.ndarray]:
    """Yields the blocks of a variable that this worker has, or workers that divide the same layers."""
    split, peers, shape = split_of(variable), peers_of(variable), shape_of(variable)
    if split is None:
        rows = 0
        for block in _block_shapes(variable, None):
            taken = slice(rows, rows := rows + block[0]) if block else ...
            yield copies_of(variable)[copy][taken].numpy()
    elif split.in_order:
        in_turn = _sent_parts(variable, split, peers) if peers else _read_parts(variable, copy // split.devices)
        for rank, part in enumerate(in_turn):
            yield split.without_padding(part, rank, shape)
    else:
        yield _gathered(variable, split, peers) if peers else whole_here(variable, copy // split.devices)


def _block_shapes(variable: keras.Variable, split: Split | Shards | None) -> list[tuple[int, ...]]:
    """Returns the shapes of the blocks of a variable, which every worker knows."""
    shape = shape_of(variable)
    if not shape or (split and not split.in_order):
        return [shape]
    if split:
        part = np.broadcast_to(np.int8(0), split.part_shape(shape))
        return [split.without_padding(part, rank, shape).shape for rank in range(split.size)]
    row = math.prod(shape[1:]) * tf.as_dtype(variable.dtype).size
    step = max(1, _BLOCK_BYTES // max(row, 1))
    return [(min(step, shape[0] - start), *shape[1:]) for start in range(0, shape[0], step)]


def _dtype(variable: keras.Variable) -> Any:
    return tf.as_dtype(variable.dtype).as_numpy_dtype


def whole_here(variable: keras.Variable, replica: int = 0) -> np.ndarray:
    """Returns a copy of the whole value of a variable that this worker has, or all parts of it. Needs no communication.

    Args:
      variable: The variable.
      replica: For a divided variable, the index of this worker's replica to read.
    """
    if split := split_of(variable):
        return split.joined([*_read_parts(variable, replica)])
    return np.array(variable.numpy(), copy=True, order="C")


def ranks_here(variable: keras.Variable) -> list[int]:
    """Returns the ranks of the parts of a divided variable that this worker's devices have, in the order of devices."""
    split = split_of(variable)
    assert split is not None
    return [split.rank_of(device) for device in _devices_here(variable)]


def parts_here(variable: keras.Variable) -> dict[int, np.ndarray]:
    """Returns copies of the parts of which no device before this worker's has a copy, by rank, without padding."""
    split, shape = split_of(variable), shape_of(variable)
    assert split is not None
    devices = zip(_devices_here(variable), copies_of(variable), strict=True)
    first = [(split.rank_of(device), part) for device, part in devices if split.is_first(device)]
    return {rank: split.without_padding(part.numpy(), rank, shape) for rank, part in first}


def _devices_here(variable: keras.Variable) -> range:
    """Returns the numbers of this worker's devices, among those of its `peers_of`."""
    peers, count = peers_of(variable), len(copies_of(variable))
    return range(peers.rank * count, (peers.rank + 1) * count) if peers else range(count)


def whole_tensor(variable: keras.Variable, first: Any) -> tf.Tensor:
    """Returns the result of `whole` as a tensor.

    Args:
      variable: The variable.
      first: The copy to read if the variable is not divided.
    """
    split = split_of(variable)
    if peers_of(variable) or held_by(variable):
        return tf.convert_to_tensor(whole(variable))
    if split is None:
        return first.read_value()
    return split.joined_tensor([part.read_value() for part in _parts(variable)])


def assign_whole(variable: keras.Variable, value: Any) -> None:
    """Assigns a whole value to a variable; if the variable is divided, each device gets its part."""
    split = split_of(variable)
    if split is None:
        assign_parts(variable, lambda _: value)
    else:
        array = np.asarray(value)
        assign_parts(variable, lambda rank: split.part(array, rank or 0))


def assign_parts(variable: keras.Variable, value_of: Callable[[int | None], Any]) -> None:
    """Assigns to a variable; if it is divided, each device gets its part.

    Args:
      variable: The variable.
      value_of: `(rank) -> value` returns the part of a device, or the whole value for None. It is called only for parts
        that this worker holds.
    """
    split, held = split_of(variable), held_by(variable)
    if split is None:
        if held is None or held.here:
            variable.assign(value_of(None))
        return
    for rank, part in zip(ranks_here(variable), copies_of(variable), strict=True):
        part.assign(tf.cast(value_of(rank), part.dtype))


def move_to_devices(
    variable: keras.Variable,
    split: Split | Shards | None = None,
    place: int | None = None,
    peers: ReplicaPeers | None = None,
) -> None:
    """Replaces a variable on the host with one under the current strategy, in the shape of a part if it is divided.

    Args:
      variable: A variable that was created outside the strategy.
      split: The division of the variable.
      place: Its place in a pipeline.
      peers: The workers that share the parts, if this worker does not have all parts.
    """
    value = keras_deferred.value_on_host(variable)
    with at(place):
        keras_internals.replace_value(variable, value if split is None else split.part(value, 0))
    if place is not None:
        mark_place(variable, place)
    if split is not None:
        mark(variable, split, peers)
        assign_whole(variable, value)


def copy_beside(variable: keras.Variable, name: str) -> keras.Variable:
    """Creates a variable with the values of another, divided in the same way, on the same devices.

    Args:
      variable: The other variable. Call this under its strategy.
      name: Name of the new one.
    """
    place, split = place_of(variable), split_of(variable)
    with at(place):
        made = keras.Variable(variable.numpy(), dtype=variable.dtype, trainable=False, name=name)
    if place is not None:
        mark_place(made, place)
    if split is not None:
        mark(made, split, peers_of(variable))
        for copy, value in zip(copies_of(made), copies_of(variable), strict=True):
            copy.assign(value.read_value())
    if held := held_by(variable):
        mark_held(made, held)
    return made


def counted_copies(variable: keras.Variable, *, counts_whole: bool) -> Sequence[Any]:
    """Returns what a sum over all weights of a replica counts of a variable on this worker: its parts, or one copy.

    Args:
      variable: The variable.
      counts_whole: Whether this worker, of those that divide the same layers, counts the weights that are not divided.
    """
    if (held := held_by(variable)) and not held.counts_here:
        return []
    if split_of(variable) is None:
        return copies_of(variable)[:1] if counts_whole else []
    return copies_of(variable) if peers_of(variable) else _parts(variable)


def not_finite(variables: Sequence[keras.Variable]) -> list[str]:
    """Returns the paths of the variables of which this worker's copies or parts have NaN or infinity."""

    def is_finite(copy: Any) -> bool:
        value = tf.cast(copy, tf.float32) if copy.dtype.size < 4 else copy  # float8 has no such operation
        return bool(tf.reduce_all(tf.math.is_finite(value)))

    floats = (variable for variable in variables if tf.as_dtype(variable.dtype).is_floating)
    return [variable.path for variable in floats if not all(map(is_finite, copies_of(variable)))]


def keeps_slots_beside(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes an unbuilt optimizer create its state like the weights: divided in the same way, on the same devices."""
    make = optimizer.add_variable_from_reference

    def make_marked(reference_variable: keras.Variable, *args: Any, **kwargs: Any) -> keras.Variable:
        place = place_of(reference_variable)
        with at(place):
            slot = make(reference_variable, *args, **kwargs)
        vars(slot)[_WEIGHT] = reference_variable
        if split := split_of(reference_variable):
            mark(slot, _filled(split, slot), peers_of(reference_variable))
        if place is not None:
            mark_place(slot, place)
        if held := held_by(reference_variable):
            mark_held(slot, held)
        return slot

    keras_internals.set_untracked(optimizer, add_variable_from_reference=make_marked)


def keep_rows_and_columns_whole(optimizer: keras.optimizers.Optimizer) -> None:
    """Gives Adafactor's means of rows and columns, just built for parts, the shapes that they have for whole weights.

    They are small, and every device keeps all of them, but no worker keeps those of other workers' weights.
    """
    for index, weight in enumerate(keras_internals.trainable_variables(optimizer)):
        slots, shape, place = rows_and_columns(optimizer, index), shape_of(weight), place_of(weight)
        held = held_by(weight)
        for slot, whole_shape in zip(slots, (shape[:-1], (*shape[:-2], *shape[-1:])), strict=bool(slots)):
            if tuple(slot.shape) != whole_shape and (held is None or held.here):
                with at(place):
                    keras_internals.replace_value(slot, np.zeros(whole_shape, _dtype(slot)))
            if held:
                mark_held(slot, dataclasses.replace(held, shape=whole_shape, split=None))


def slots_of(optimizer: keras.optimizers.Optimizer, weight: keras.Variable) -> list[keras.Variable]:
    """Returns the state of a weight, of an optimizer that was built after `keeps_slots_beside`."""
    return [variable for variable in optimizer.variables if vars(variable).get(_WEIGHT) is weight]


def _filled(split: Split | Shards, slot: keras.Variable) -> Split | Shards:
    """Returns the split of a new slot, whose padding has the slot's initial value.

    The gradient of padding is zero, so the value never changes; zeros would lead to a division by zero (Ftrl).
    """
    if not split.has_padding:
        return split
    return split.filled(float(np.ravel(copies_of(slot)[0].numpy())[0]))


def scope_of_values(variables: Sequence[keras.Variable], values: Sequence[Any]) -> keras.StatelessScope:
    """Returns a scope in which variables have these values, which are whole even for divided variables."""
    scope = keras.StatelessScope()  # filled below: as arguments, the values would need the variables' shapes
    for variable, value in zip(variables, values, strict=True):
        scope.state_mapping[id(variable)] = tf.convert_to_tensor(value)
    return scope


def _read_parts(variable: keras.Variable, replica: int) -> Iterator[np.ndarray]:
    """Yields copies of the `_parts`."""
    for part in _parts(variable, replica):
        yield part.numpy()


def _parts(variable: keras.Variable, replica: int = 0) -> list[Any]:
    """Returns all parts by rank, for one of the replicas of this worker, which has all of them."""
    split, copies = split_of(variable), copies_of(variable)
    assert split is not None
    first = replica * split.devices
    return [copies[first + rank * split.copies] for rank in range(split.size)]


def copies_of(variable: keras.Variable) -> Sequence[Any]:
    """Returns this worker's copies of a variable; a worker with one device may have a plain variable."""
    return getattr(variable.value, "values", (variable.value,))

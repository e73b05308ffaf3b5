"""A worker's share of the weights at one place of its replicas, divided among these replicas."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tfpar.exchange import buckets
from tfpar.exchange import spec as specs
from tfpar.exchange.sharding.codecs import sharded_codec
from tfpar.exchange.sharding.shards import Piece, ShardedVector, by_tensor, evenly
from tfpar.optim.optimizers import ELEMENTWISE
from tfpar.parallel.division import Split
from tfpar.parallel.held import held_by
from tfpar.parallel.pipeline.devices import place_of
from tfpar.parallel.split import copies_of, mark, ranks_here, shape_of, split_of
from tfpar.parallel.topology import Topology
from tfpar.training.sharding.replica_share import ReplicaShare
from tfpar.training.sharding.saved import Part

import keras
import numpy as np
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Place:
    """A place of the replicas, whose devices have weights in common with no other place, or have them for all.

    Attributes:
      indices: Indices of its weights among the trainable weights of the model.
      program: The index of its program, among those that the strategy runs for a replica.
      devices: Its device in each replica of this worker.
      one_of_several: Whether a replica has other places, too.
    """

    indices: Sequence[int]
    program: int
    devices: Sequence[str]
    one_of_several: bool = False


class PlaceShare:
    """The share of one worker in the weights of one place.

    Tensors, in vectors and pieces too, are numbered within the place.

    Args:
      place: The place.
      weights: The model's trainable weights.
      make_optimizer: Creates an optimizer, not yet built.
      topology: The topology of the run.
      exchange: The exchange between workers.

    Attributes:
      indices: Indices of its weights among the trainable weights of the model.
      program: The index of its program, among those that the strategy runs for a replica.
      stage: The index of its device, among those of the program.
      variables: Its weights.
      parts: What it has of each of them.
      vectors: The tensors in shards.
      whole: The variables that every worker updates, on its first replica.
      replicas: What each replica of this worker owns.
    """

    def __init__(
        self,
        place: Place,
        weights: Sequence[keras.Variable],
        make_optimizer: Callable[[], keras.optimizers.Optimizer],
        topology: Topology,
        exchange: specs.Spec,
    ) -> None:
        self.indices, self._one_of_several = list(place.indices), place.one_of_several
        self.program, replicas = place.program, len(place.devices)
        self.variables = [weights[index] for index in place.indices]
        self.stage = (place_of(self.variables[0]) or 0) if self.variables else 0
        self.parts = [self._part(index, weights[index]) for index in place.indices]
        optimizers = [make_optimizer() for _ in place.devices]
        self.elementwise = type(optimizers[0]) in ELEMENTWISE
        self.vectors = self._divided(exchange, topology.replicas, replicas)
        sharded = {index for vector in self.vectors for index in vector.indices}
        self.whole = [index for index in range(len(self.variables)) if index not in sharded]
        self.replicas = []
        counts = [0] * len(self.vectors)
        for number, (optimizer, device) in enumerate(zip(optimizers, place.devices, strict=True)):
            owned = []
            for vector, each in enumerate(self.vectors):
                for piece in each.pieces(topology.data_worker * replicas + number):
                    owned.append(((vector, counts[vector]), piece))
                    counts[vector] += 1
            others = [] if number else [self.variables[index] for index in self.whole]
            self.replicas.append(ReplicaShare(optimizer, device, owned, self._piece_variable, others, weights))

    def copies_of(self, index: int) -> Sequence[Any]:
        """This worker's copies of a weight of the place: one in each replica, or in each program of these if all have
        the same."""
        copies = copies_of(self.variables[index])
        programs = len(copies) // len(self.replicas)
        return copies[self.program :: programs] if self.parts[index].split else copies

    @property
    def divided(self) -> bool:
        """Whether its devices have parts of weights."""
        return any(part.split for part in self.parts)

    @property
    def counts_here(self) -> bool:
        """Whether this worker counts its weights in norms; all of them are on the same workers."""
        held = held_by(self.variables[0]) if self.variables else None
        return held is None or held.counts_here

    def _part(self, index: int, variable: keras.Variable) -> Part:
        split = split_of(variable)
        if not isinstance(split, Split):
            return Part(index)
        return Part(index, split, ranks_here(variable)[self.program])

    def _divided(self, exchange: specs.Spec, owners: int, replicas: int) -> list[ShardedVector]:
        """The vectors, for this number of replicas on all workers and on one.

        If devices divide the weights of a replica, small ones have an owner as well, since the devices of other places
        do not have their state. They travel without a codec, in vectors of their own.
        """
        codec = sharded_codec(exchange)
        sizes = [math.prod(variable.shape) for variable in self.variables]
        fitting = [index for index, each in enumerate(self.variables) if can_be_in_pieces(each)]
        large = [
            index for index in fitting if exchange.options.is_compressible(tf.TensorShape(self.variables[index].shape))
        ]
        small = [index for index in fitting if self._one_of_several and index not in set(large)]
        bucket_bytes = exchange.options.bucket_bytes if codec else buckets.DENSE_BUCKET_BYTES
        divide = functools.partial(evenly, bucket_bytes=bucket_bytes) if self.elementwise else by_tensor

        def vectors(indices: Sequence[int], **options: Any) -> Iterator[ShardedVector]:
            for group in self._groups(indices):
                yield from divide(group, sizes, owners, per_worker=replicas, **options)

        return [*vectors(large, block=1 if codec is None else codec.block), *vectors(small, block=1, exact=True)]

    def _groups(self, indices: Sequence[int]) -> list[list[int]]:
        """The tensors in groups that have vectors of their own.

        The devices of a replica must own the same tensors of those that they divide, because they update them together
        if the optimizer needs whole tensors. One of the devices has others, too.
        """
        if self.elementwise:
            return [[*indices]]
        divided = [index for index in indices if self.parts[index].split]
        return [divided, [index for index in indices if not self.parts[index].split]]

    def _piece_variable(self, piece: Piece) -> keras.Variable:
        weight = self.variables[piece.index]
        *scopes, name = weight.path.split("/")
        shape = [piece.size] if self.elementwise else weight.shape
        with contextlib.ExitStack() as stack:
            for scope in scopes:  # name and path determine which weights are decayed, and which Muon leaves to Adam
                stack.enter_context(keras.name_scope(scope, deduplicate=False))
            value = tf.constant(self.elements_of(piece, shape))
            variable = keras.Variable(value, dtype=weight.dtype, name=name)
        if (split := self.parts[piece.index].split) and not self.elementwise:
            mark(variable, split)
        return variable

    def _current(self, index: int) -> np.ndarray:
        return copies_of(self.variables[index])[self.program].numpy()

    def elements_of(self, piece: Piece, shape: Sequence[int]) -> np.ndarray:
        """The current values of the elements of a piece in the model, in this shape."""
        return _elements(self._current(piece.index), piece, shape)

    def load_weights(self, exact: Mapping[int, np.ndarray]) -> None:
        """Sets the pieces to the current values of the model's weights, or to those of `exact`: whole weights by their
        index in the model."""
        for replica in self.replicas:
            for variable, piece in zip(replica.variables, replica.owned, strict=True):
                part = self.parts[piece.index]
                known = exact.get(part.index)
                value = self._current(piece.index) if known is None else part.of(known)
                variable.assign(_elements(value, piece, variable.shape))

    def slots(self) -> Iterator[tuple[str, Piece, keras.Variable, float]]:
        """For each slot of a piece: its name for the whole weight without the optimizer's prefix, the piece, the
        variable, and the value of the slot's padding."""
        for replica in self.replicas:
            for name, piece, variable in replica.slots():
                yield name, piece, variable, replica.initial(variable)

    def part_of(self, piece: Piece, state: keras.Variable) -> Part:
        """What the state of a piece is of: Adafactor's rows and columns belong to the whole weight."""
        part = self.parts[piece.index]
        reduced = not self.elementwise and len(state.shape) < len(self.variables[piece.index].shape)
        return Part(part.index) if reduced else part

    def of_whole(
        self, whole: np.ndarray | None, piece: Piece, variable: keras.Variable, fill: float
    ) -> np.ndarray | None:
        """Takes the value of a slot from that of the whole weight; None if there is none, or it has another shape."""
        if whole is None:
            return None
        if whole.size == math.prod(shape_of(self.variables[piece.index])):
            whole = _elements(self.part_of(piece, variable).of(whole, fill), piece, variable.shape)
        return whole if tuple(whole.shape) == tuple(variable.shape) else None


def can_be_in_pieces(variable: keras.Variable) -> bool:
    """Whether a replica may update a part of a weight by itself."""
    return variable.dtype == "float32" and variable.constraint is None


def _elements(array: np.ndarray, piece: Piece, shape: Sequence[int]) -> np.ndarray:
    return np.asarray(array).reshape(-1)[piece.begin : piece.end].reshape(shape)

"""Moving averages of sharded weights, which the model has as its weights while it is evaluated or exported.

The owner of a piece keeps its average beside the other optimizer state, so no replica has all averages. They are
gathered into the model's own variables; the weights wait in the host's memory meanwhile. A device needs no more memory.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

from tfpar.collectives.agreement import WorkerAgreement
from tfpar.collectives.tensorflow import new_group
from tfpar.exchange.sharding.shards import Piece, ShardedVector
from tfpar.optim import optimizers
from tfpar.parallel.split import whole
from tfpar.parallel.topology import Topology
from tfpar.training.model.averages import MovingAverages
from tfpar.training.sharding.optimizer import OwnShare
from tfpar.training.sharding.place_share import PlaceShare
from tfpar.training.sharding.replica_share import ReplicaShare

import keras
import numpy as np


class SharedAverages(MovingAverages):
    """The moving averages that the owners of shards keep.

    Args:
      model: Its trainable weights are in shards.
      share: This worker's share of them.
      topology: The topology of the run.
    """

    def __init__(self, model: keras.Model, share: OwnShare, topology: Topology) -> None:
        super().__init__(model, share.optimizer)
        group = new_group(topology.workers_alike, max(topology.worker, 0))
        self._share, self._agreement = share, WorkerAgreement(group, "gathering moving averages")
        self._shown = False

    def weights(self) -> list[keras.Variable]:
        """See `MovingAverages`. The model's own variables, which have the averages within `shown`."""
        return list(self._model.trainable_variables)

    def values(self) -> Iterator[tuple[keras.Variable, np.ndarray]]:
        """See `MovingAverages`."""
        if not self.exist:
            return
        with self.shown():
            found = [(variable, whole(variable)) for variable in self._model.trainable_variables]
        yield from found  # whose weights are the model's own again, as the caller may assign them

    def restart(self, weights: Sequence[keras.Variable]) -> None:
        """See `MovingAverages`."""
        if not self.exist:
            return
        restarted = {*map(id, weights)}
        for place in self._share.places:
            for owner in place.replicas:
                others = place.whole if owner is place.replicas[0] else []
                pieces = [*owner.owned, *(Piece(index, 0, math.prod(place.variables[index].shape)) for index in others)]
                for piece, average in zip(pieces, _averages(owner), strict=False):
                    if average is not None and id(place.variables[piece.index]) in restarted:
                        average.assign(place.elements_of(piece, average.shape))

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """See `MovingAverages`. Within itself, it changes nothing."""
        if self._shown or not self.exist:
            yield
            return
        before: list[tuple[Sequence[Any], np.ndarray]] = []
        self._shown = True
        try:
            for place in self._share.places:
                for index, average in self._of_place(place):
                    copies = place.copies_of(index)
                    before.append((copies, copies[0].numpy()))
                    _assign(copies, average)
            yield
        finally:
            for copies, value in before:
                _assign(copies, value)
            self._shown = False

    def _of_place(self, place: PlaceShare) -> Iterator[tuple[int, np.ndarray]]:
        """The averages of what the devices of a place have of their weights, with the number of the weight there."""
        for number, vector in enumerate(place.vectors):
            shards = [_shard_of(owner, number, vector.shard_elements) for owner in place.replicas]
            yield from _tensors(vector, self._agreement, np.concatenate(shards), place.variables)
        first = place.replicas[0]
        begin = len(first.variables)
        averages = _averages(first)[begin : begin + len(place.whole)]
        for index, average in zip(place.whole, averages, strict=True):
            if average is not None:
                yield index, average.numpy()


def _tensors(
    vector: ShardedVector, agreement: WorkerAgreement, own: np.ndarray, variables: Sequence[keras.Variable]
) -> Iterator[tuple[int, np.ndarray]]:
    """The tensors of a vector, with their numbers, from the shards of all workers.

    The shards of one worker after the other are sent, so that no worker needs memory for the whole vector.

    Args:
      vector: The vector.
      agreement: All workers.
      own: This worker's shards, end to end.
      variables: Variables of the shapes of the tensors, by their numbers.
    """
    rows = (agreement.broadcast([own], rank)[0] for rank in range(agreement.size))
    row, used = next(rows), 0
    for index, size in vector.segments:
        parts, left = [], size
        while left:
            if used == row.size:
                row, used = next(rows), 0
            parts.append(row[used : used + left])
            used, left = used + parts[-1].size, left - parts[-1].size
        if index >= 0:
            yield index, np.concatenate(parts).reshape(variables[index].shape)


def _assign(copies: Sequence[Any], value: np.ndarray) -> None:
    for copy in copies:
        copy.assign(value)


def _shard_of(owner: ReplicaShare, number: int, elements: int) -> np.ndarray:
    """The averages of a replica's pieces of one vector, end to end as in its shard, with zeros in place of padding."""
    shard, filled = np.zeros(elements, np.float32), 0
    for (vector, _), average in zip(owner.positions, _averages(owner), strict=False):
        if vector == number and average is not None:
            values = average.numpy().reshape(-1)
            shard[filled : filled + values.size] = values
            filled += values.size
    return shard


def _averages(owner: ReplicaShare) -> list[keras.Variable | None]:
    """The averages of the pieces of a replica, and then of the weights that it updates for its worker."""
    return optimizers.ema_variables(owner.optimizer) or []

"""How a replica that trains independently is divided, and the values of a replica's variables by its programs.

A *value here* is what one worker knows of a variable: the whole value or, if several workers have its parts, those of
this worker's devices. *By program*, a value is a list: the part of each program of a replica, or one value if the
variable is not divided over programs.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

from tfpar.collectives.agreement import WorkerAgreement
from tfpar.parallel.pipeline.devices import beside
from tfpar.parallel.replica_peers import ReplicaPeers
from tfpar.parallel.split import copies_of, counted_copies, peers_of, ranks_here, split_of, whole_here

import keras
import numpy as np
import tensorflow as tf

Tensors = list[tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Parts:
    """How a replica that trains independently is divided over programs and workers.

    Attributes:
      programs: Programs that the strategy runs on this worker for a replica; several if a model axis divides its
        weights.
      peers: The workers that hold a replica between them, with consecutive ranks; None if each worker has whole ones.
      counts_whole: Whether this worker counts the weights that are not divided, as one of those that divide the same
        layers does.
      own_variables: Whether variables are not created under the strategy: workers have different stages of a pipeline,
        or the model itself was built outside it.
    """

    programs: int = 1
    peers: ReplicaPeers | None = None
    counts_whole: bool = True
    own_variables: bool = False

    @property
    def workers(self) -> int:
        """Number of workers that hold a replica between them."""
        return self.peers.size if self.peers else 1

    @property
    def part(self) -> int:
        """Index of this worker among them, from 0."""
        return self.peers.rank if self.peers else 0

    def scope(self, strategy: tf.distribute.Strategy) -> contextlib.AbstractContextManager[Any]:
        """Returns the scope in which weights beside those of the model are created."""
        return contextlib.nullcontext() if self.own_variables else strategy.scope()

    def of_all(self, agreement: WorkerAgreement, row: np.ndarray) -> np.ndarray:
        """Returns the rows `[k]` of all workers, by replica: `[replicas, workers, k]`. All workers call it together."""
        return np.stack(agreement.gather_arrays(row)).reshape(-1, self.workers, len(row))

    def of_replica(self, row: np.ndarray) -> np.ndarray:
        """Returns the rows `[k]` of the workers of this worker's replica, `[workers, k]`. They call it together."""
        return np.stack(self.peers.agreement.gather_arrays(row)) if self.peers else row[np.newaxis]

    def not_counted(self, variable: keras.Variable) -> Sequence[Any]:
        """Returns this worker's copies of a variable, or parts of it, that `counted` leaves out, in its replica."""
        return copies_of(variable)[len(self.counted(variable)) : self.programs]

    def counted(self, variable: keras.Variable) -> Sequence[Any]:
        """Returns what this worker counts of a variable in a sum over its replica, see `counted_copies`."""
        return counted_copies(variable, counts_whole=self.counts_whole)

    def squares(self, tensors: Tensors, variables: Sequence[keras.Variable]) -> tf.Tensor:
        """Returns the squared norms of what belongs to whole and to divided variables that this worker counts.

        Args:
          tensors: A tensor for each variable, of one program.
          variables: The variables.

        Returns:
          Float32 `[2]`; see `summed_squares`.
        """
        kinds: tuple[Tensors, Tensors] = [], []
        for variable, tensor in zip(variables, tensors, strict=True):
            if self.counted(variable):
                kinds[split_of(variable) is not None].append(tensor)
        return tf.stack([squared_norm(kind) for kind in kinds])

    def summed_squares(self, squares: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the sums over the programs of a replica.

        Args:
          squares: The results of `squares` on this worker's programs: `[2, ...]` each.
        """
        return squares[0][0] + tf.add_n([each[1] for each in squares[: self.programs]])

    def distributed(self, strategy: tf.distribute.Strategy, values: Sequence[Tensors]) -> list[Any]:
        """Returns arguments for `strategy.run`, from values by program."""
        if self.programs == 1:
            return [value for [value] in values]

        def of_program(context: Any) -> Tensors:
            program = context.replica_id_in_sync_group % self.programs
            return [value[program if len(value) > 1 else 0] for value in values]

        arguments: list[Any] = strategy.experimental_distribute_values_from_function(of_program)
        return arguments


WHOLE = Parts()


def value_here(variable: keras.Variable) -> np.ndarray:
    """Returns a copy of the value of a variable; if several workers have its parts, those of this worker's devices:
    `[devices, ...]`."""
    if peers_of(variable):
        return np.stack([copy.numpy() for copy in copies_of(variable)])
    return whole_here(variable)


def shape_here(variable: keras.Variable) -> tuple[int, ...]:
    """Returns the shape of `value_here`."""
    if peers_of(variable):
        return (len(copies_of(variable)), *variable.shape)
    split = split_of(variable)
    return split.whole_shape(tuple(variable.shape)) if split else tuple(variable.shape)


def by_program(variable: keras.Variable, value: np.ndarray, programs: int) -> Tensors:
    """Returns a value by program, from a value here."""
    split = split_of(variable)
    if split is None:
        return [tf.constant(value)]
    if peers_of(variable):
        return [tf.constant(part) for part in value]
    return [tf.constant(split.part(value, rank)) for rank in ranks_here(variable)[:programs]]


def joined(variable: keras.Variable, values: Tensors) -> np.ndarray:
    """Returns a value here, from a value by program: the inverse of `by_program`."""
    split, arrays = split_of(variable), [value.numpy() for value in values]
    if split is None:
        [array] = arrays
        return array
    if peers_of(variable):
        return np.stack(arrays)
    by_rank = dict(zip(ranks_here(variable), arrays, strict=False))
    return split.joined([by_rank[rank] for rank in sorted(by_rank)])


def squared_norm(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the squared L2 norm over all elements, float32 scalar, each tensor's computed on its device."""
    if not tensors:
        return tf.zeros([])
    squares = []
    for tensor in tensors:
        with beside(tensor):
            squares.append(2.0 * tf.nn.l2_loss(tf.cast(tensor, tf.float32)))
    return tf.add_n(squares)

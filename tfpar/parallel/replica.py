"""Reads and assigns one replica's copies of mirrored variables.

The step computes new values as tensors and assigns them on each replica. `assign` on the mirrored variable, which Keras
uses, would all-reduce every value again (Keras 3.15 creates its variables with `aggregation=MEAN`), and cannot run
inside a `tf.while_loop`, which running several steps per call from Python requires.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfpar.optim import keras_internals
from tfpar.optim.pure_update import pure_apply

import keras
import tensorflow as tf


def apply_means(optimizer: keras.optimizers.Optimizer, means: Sequence[tf.Tensor | tf.IndexedSlices | None]) -> None:
    """Updates this replica's weights by gradients that are the same on every replica. Call it in a replica context.

    `optimizer.apply_gradients` would first add up the gradients of all replicas (Keras 3.15): for means, it would send
    each a second time, and apply N times the mean.

    Args:
      optimizer: A Keras optimizer, built under the strategy for the weights to update.
      means: The gradients of these weights, in order, such as `Exchange.reduce` returns; None leaves a weight as it is.

    Raises:
      ConfigError: An optimizer that scales the loss or accumulates gradients itself.
      ValueError: The optimizer is not built, or was built for another number of weights.
    """
    weights, state = own(keras_internals.trainable_variables(optimizer)), own(optimizer.variables)
    values, params = ([copy.read_value() for copy in copies] for copies in (state, weights))
    new_weights, new_state = pure_apply(optimizer, values, params, means)
    assign([*weights, *state], [*new_weights, *new_state])


def own(variables: Sequence[keras.Variable]) -> list[Any]:
    """Returns this replica's copies of mirrored variables. Call in a replica context.

    Args:
      variables: Keras variables that were created under the strategy.

    Returns:
      The TensorFlow variables, in the same order; on a TPU the mirrored variables themselves.
    """
    if _on_tpu():
        return [variable.value for variable in variables]
    replica = None
    copies = []
    for variable in variables:
        local = tf.distribute.get_strategy().experimental_local_results(variable.value)
        if len(local) > 1 and replica is None:
            replica = static_replica_id() % len(local)
        copies.append(local[replica or 0])
    return copies


def first(variable: keras.Variable) -> Any:
    """Returns the TensorFlow variable of this process's first replica. Call in a cross-replica context."""
    return tf.distribute.get_strategy().experimental_local_results(variable.value)[0]


def next_batch(strategy: tf.distribute.Strategy, iterator: Any, *, model_devices: int = 1) -> Any:
    """Returns the next batch for the replicas of this process.

    Args:
      strategy: A synchronous strategy.
      iterator: A distributed iterator; or a plain tf.data iterator, whose elements have one row per replica, `[L,
        ...]`, if the process has L > 1 replicas.
      model_devices: Number of devices of a replica, all of which get the replica's row.
    """
    batch = next(iterator)
    devices = len(strategy.extended.worker_devices)
    if devices == 1 or not isinstance(iterator, tf.data.Iterator):
        return batch

    def of_device(context: tf.distribute.ReplicaContext) -> Any:
        if devices <= model_devices:
            return batch
        row = context.replica_id_in_sync_group % devices // model_devices
        return tf.nest.map_structure(lambda part: part[row], batch)

    return strategy.experimental_distribute_values_from_function(of_device)


def read(variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
    """Returns the values of this replica's copies, in the same order. Call in a replica context."""
    return [variable.read_value() for variable in own(variables)]


def assign(copies: Sequence[Any], values: Sequence[tf.Tensor]) -> list[tf.Operation]:
    """Assigns values to this replica's copies. Every replica must assign the same values.

    Args:
      copies: The result of `own`.
      values: One tensor per copy.

    Returns:
      The assignments.
    """
    operations = []
    for copy, value in zip(copies, values, strict=True):
        if _on_tpu():
            # In a TPU replica the handle of a mirrored variable is the replicated handle, and a raw assignment to it
            # is local (TensorFlow 2.21, `tpu_util.make_raw_assign_fn` does the same).
            operations.append(tf.raw_ops.AssignVariableOp(resource=copy.handle, value=tf.cast(value, copy.dtype)))
        else:
            operations.append(copy.assign(value, read_value=False))
    return operations


def static_replica_id() -> int:
    """The index of this replica among all replicas of the strategy, as a Python int. Call in a replica context."""
    context = tf.distribute.get_replica_context()
    return int(tf.get_static_value(context.replica_id_in_sync_group))


def _on_tpu() -> bool:
    return isinstance(tf.distribute.get_strategy(), tf.distribute.TPUStrategy)

"""A replica's own copy of mirrored variables.

The step computes new values as tensors and stores them itself, replica by replica. Keras' way, an `assign` on the
mirrored variable, would all-reduce every value once more (Keras 3.15 creates its variables with
`aggregation=MEAN`), and cannot run inside a `tf.while_loop`, which several steps per host call need.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf


def own(variables: Sequence[keras.Variable]) -> list[Any]:
    """This replica's copies, as TensorFlow variables. Call in a replica context."""
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


def read(variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
    """Values of this replica's copies. Call in a replica context."""
    return [variable.read_value() for variable in own(variables)]


def assign(copies: Sequence[Any], values: Sequence[tf.Tensor]) -> list[tf.Operation]:
    """Stores values in copies that `own` gave, with the same values on every replica; returns what does so."""
    stored = []
    for copy, value in zip(copies, values, strict=True):
        if _on_tpu():
            # In a TPU replica the handle of a mirrored variable is the replicated one, and a raw assignment to it is
            # local (TensorFlow 2.21, `tpu_util.make_raw_assign_fn` does the same).
            stored.append(tf.raw_ops.AssignVariableOp(resource=copy.handle, value=tf.cast(value, copy.dtype)))
        else:
            stored.append(copy.assign(value, read_value=False))
    return stored


def static_replica_id() -> int:
    """This replica's number among the replicas of the strategy, as a Python int."""
    context = tf.distribute.get_replica_context()
    return int(tf.get_static_value(context.replica_id_in_sync_group))


def _on_tpu() -> bool:
    return isinstance(tf.distribute.get_strategy(), tf.distribute.TPUStrategy)

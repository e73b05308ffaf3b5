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


def read(variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
    """Values of this replica's copies. Call in a replica context."""
    return [_local(variable).read_value() for variable in variables]


def assign(variables: Sequence[keras.Variable], values: Sequence[tf.Tensor]) -> list[tf.Operation]:
    """Stores values in this replica's copies. Call in a replica context, with the same values on every replica.

    Returns:
      The operations to wait for, in a graph.
    """
    operations = []
    for variable, value in zip(variables, values, strict=True):
        local = _local(variable)
        if isinstance(local, tf.Variable) and not _on_tpu():
            operations.append(local.assign(value, read_value=False))
        else:
            # In a TPU replica the handle of a mirrored variable is the replicated one, and a raw assignment to it is
            # local (TensorFlow 2.21, `tpu_util.make_raw_assign_fn` does the same).
            operations.append(tf.raw_ops.AssignVariableOp(resource=local.handle, value=tf.cast(value, local.dtype)))
    return [operation for operation in operations if operation is not None]


def static_replica_id() -> int:
    """This replica's number among the replicas of this process, as a Python int."""
    context = tf.distribute.get_replica_context()
    replica = tf.get_static_value(context.replica_id_in_sync_group)
    return int(replica)


def _on_tpu() -> bool:
    return isinstance(tf.distribute.get_strategy(), tf.distribute.TPUStrategy)


def _local(variable: keras.Variable) -> Any:
    value = variable.value
    if _on_tpu():
        return value
    copies = tf.distribute.get_strategy().experimental_local_results(value)
    return copies[0] if len(copies) == 1 else copies[static_replica_id() % len(copies)]

"""Sums over the replicas of a strategy, from within one of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from tfpar.cluster.info import rank_of_task
from tfpar.collectives.group import Group, allocate_instance_keys
from tfpar.collectives.tensorflow import transport_of, world_group

import tensorflow as tf

Sum = Callable[[tf.Tensor], tf.Tensor]


class _Current(threading.local):
    """The sum of this thread: MirroredStrategy traces every replica in a separate thread."""

    def __init__(self) -> None:
        self.sum: Sum | None = None


_current = _Current()


@contextlib.contextmanager
def summing_with(function: Sum) -> Iterator[None]:
    """In this context `sum_over_replicas` calls a function, for replicas of several devices in a strategy that knows
    one device of each.

    Args:
      function: Returns the sum of a tensor over all replicas. It need not have a gradient, and then neither has
        `sum_over_replicas`.
    """
    before, _current.sum = _current.sum, function
    try:
        yield
    finally:
        _current.sum = before


def sum_over_replicas(value: tf.Tensor) -> tf.Tensor:
    """The sum of a tensor over all replicas, which has a gradient. Call it in a replica context, in all replicas.

    If each worker has one replica, and a transport other than TensorFlow's carries data between such devices, the sum
    uses that transport; otherwise the collectives of the strategy. See also `summing_with`.

    Args:
      value: The tensor; the same shape on all replicas.
    """
    if _current.sum is not None:
        return _current.sum(value)
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return value
    group = _group_of_replicas(context)
    if group is None:
        return context.all_reduce(tf.distribute.ReduceOp.SUM, value)

    @tf.custom_gradient
    def summed(part: tf.Tensor) -> tuple[tf.Tensor, object]:
        return _summed(group, part), lambda upstream: _summed(group, upstream)

    return tf.ensure_shape(summed(value), value.shape)


def _summed(group: Group, part: tf.Tensor) -> tf.Tensor:
    # Separate keys: if one worker traces a call more, the keys of the exchange must not change.
    return group.all_reduce(part, allocate_instance_keys(1, group)[0])


def _group_of_replicas(context: tf.distribute.ReplicaContext) -> Group | None:
    """The workers of the strategy, if each is one replica and a native transport connects them; otherwise None."""
    strategy, extended = context.strategy, context.strategy.extended
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy) or len(extended.worker_devices) > 1:
        return None
    if transport_of(extended.worker_devices[0]) is None:
        return None
    return world_group(context.num_replicas_in_sync, worker_rank(strategy), extended.worker_devices[0])


def worker_rank(strategy: tf.distribute.Strategy) -> int:
    """The rank of this worker in the cluster of a strategy over several workers."""
    resolver = strategy.cluster_resolver
    return rank_of_task(resolver.cluster_spec().as_dict(), resolver.task_type, int(resolver.task_id))

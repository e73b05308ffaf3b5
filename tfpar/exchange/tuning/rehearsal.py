"""A rehearsal: a part of an exchange, carried out and timed, beside the time that the cost model predicts for it.

The model adds up what one worker does. Workers that share processors also wait for each other's time slices, and a
transport copies more or less than its measured messages do: a factor has both, and others like them.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from tfpar.collectives.agreement import WorkerAgreement
from tfpar.collectives.group import Group, allocate_instance_keys
from tfpar.exchange.buckets import DENSE_BUCKET_BYTES
from tfpar.exchange.compressed import CompressedReducer
from tfpar.exchange.dense_reducer import DenseReducer
from tfpar.exchange.registry import Spec

import tensorflow as tf

_WARM_UP, _CALLS = 3, 5


def seconds_of(spec: Spec, shapes: Sequence[tf.TensorShape], group: Group, device: str, measured: Any) -> float:
    """Seconds of an exchange of tensors of random numbers, the mean over workers, which call it together.

    Args:
      spec: The exchange. Dense warm-up and comparisons are left out.
      shapes: Static shapes of the tensors.
      group: All workers.
      device: Where the exchange runs, a CPU: a GPU does what is asked of it later.
      measured: What its algorithm measured of the group, see `registry.register`.
    """
    with tf.device(device):
        reducer = _reducer(spec, shapes, group, device, measured)
        [ready] = allocate_instance_keys(1, group)
        given = [tf.random.stateless_normal(shape, [index, 0]) for index, shape in enumerate(shapes)]

        def exchange(gradients: list[tf.Tensor]) -> tf.Tensor:
            fresh = [tf.raw_ops.DeepCopy(x=gradient) for gradient in gradients]  # their memory may be taken for sums
            with tf.control_dependencies(fresh):
                everywhere = group.all_reduce(tf.zeros([1]), ready)
            with tf.control_dependencies([everywhere]):
                began = tf.timestamp()
            with tf.control_dependencies([began]):
                taken = [tf.identity(gradient) for gradient in fresh]
                sums, _ = reducer.reduce_on_device(taken, tf.zeros([1]), lambda _: tf.constant(True))
            with tf.control_dependencies(tf.nest.flatten(sums)):
                return tf.timestamp() - began

        call = tf.function(exchange, autograph=False).get_concrete_function(given)
        seconds = [float(call(given)) for _ in range(_WARM_UP + _CALLS)][_WARM_UP:]
        return WorkerAgreement(group).mean(statistics.median(seconds))


def _reducer(
    spec: Spec, shapes: Sequence[tf.TensorShape], group: Group, device: str, measured: Any
) -> DenseReducer | CompressedReducer:
    if not spec.compresses:
        return DenseReducer(shapes, group, device, DENSE_BUCKET_BYTES)
    lasting = dataclasses.replace(spec, options=dataclasses.replace(spec.options, warmup_steps=0, sample_every=0))
    return CompressedReducer(lasting, shapes, group, device, 0, measured=measured)

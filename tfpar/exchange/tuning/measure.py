"""Measurements for `auto`, about a second at the start: the links, the codecs' speed and their error.

All workers measure at the same time, as they will exchange; they use the mean, the same on each.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence

import tfpar_ops
from tfpar.collectives.cost_model import Link, Speed
from tfpar.collectives.group import Group, allocate_instance_keys
from tfpar_ops import Codec

import numpy as np
import tensorflow as tf

_ELEMENTS = 1 << 20  # of the vector for measuring codecs
_FIRST_BYTES, _LAST_BYTES = 1 << 18, 1 << 24  # of the messages for measuring bandwidth
_LONG_ENOUGH = 0.05  # seconds of a message after which larger ones add no information


@dataclasses.dataclass(frozen=True)
class Measured:
    """The mean over workers.

    Attributes:
      link: Latency and bandwidth.
      speeds: Of each codec, in the order asked for.
      errors: Of each codec, the relative L2 error on normally distributed numbers.
    """

    link: Link
    speeds: list[Speed]
    errors: list[float]


def measure(group: Group, codecs: Sequence[Codec], device: str) -> Measured:
    """Measures; all workers of the group must call it with the same codecs.

    Args:
      group: All workers.
      codecs: The codecs to measure.
      device: Where exchanges run.
    """
    with tf.device(device):
        latency, bandwidth = _link(group)
        own = [latency, bandwidth]
        for codec in codecs:
            own += _codec(codec)
        instance = allocate_instance_keys(1, group)[0]
        values = tf.constant(own, tf.float32)
        total = _traced(lambda value: group.all_reduce(value, instance), values)(values)
    mean = (total / group.size).numpy().astype(float).tolist()
    rates = [mean[place : place + 3] for place in range(2, len(mean), 3)]
    return Measured(
        Link(mean[0], mean[1]), [Speed(encode, decode) for encode, decode, _ in rates], [error for *_, error in rates]
    )


def _link(group: Group) -> tuple[float, float]:
    """Seconds of an empty message, and bytes per second."""
    small, barrier = allocate_instance_keys(2, group)
    value = tf.zeros([16])
    reduce = _traced(lambda value: group.all_reduce(value, small), value)
    ready = _traced(lambda value: group.all_reduce(value, barrier), value)
    reduce(value)
    round_trip = _median(lambda: reduce(value), 15)
    latency = round_trip / (2 * (group.size - 1))  # a ring has this many messages one after the other
    size = _FIRST_BYTES
    while True:
        instance = allocate_instance_keys(1, group)[0]
        rows = tf.zeros([group.size, max(1, size // 4 // group.size)], tf.int32)
        send = _traced(functools.partial(group.all_to_all, instance=instance), rows)
        send(rows)
        times = []
        for _ in range(3):
            ready(value)  # otherwise the first to arrive would also measure its waiting
            began = time.perf_counter()
            send(rows)
            times.append(time.perf_counter() - began)
        # The workers must agree on when to stop.
        seconds = float(ready(tf.fill([16], statistics.median(times)))[0]) / group.size
        sent = 4 * (group.size - 1) * rows.shape[1]
        if seconds > _LONG_ENOUGH or size >= _LAST_BYTES:
            return latency, sent / max(seconds - latency, seconds / 10, 1e-6)
        size *= 4


def _codec(codec: Codec) -> tuple[float, float, float]:
    """Bytes of gradient encoded, and decoded, per second; relative error."""
    values = tf.random.stateless_normal([_ELEMENTS], [1, 2])
    residual = tf.Variable(tf.zeros([_ELEMENTS]), trainable=False)
    seed_step = tf.constant([0, 0], tf.int64) if codec.rounding == "stochastic" else None
    encode = _traced(lambda: tfpar_ops.encode_into(residual, [values], codec, seed_step=seed_step).payload)
    payload = encode()
    error = np.linalg.norm(tfpar_ops.decode_sum(payload, codec, _ELEMENTS).numpy() - values.numpy()) / np.linalg.norm(
        values.numpy()
    )
    rows = tf.concat([payload] * 4, axis=0)
    decode = _traced(lambda rows: tfpar_ops.decode_sum(rows, codec, _ELEMENTS), rows)
    decode(rows)
    encoding, decoding = _median(encode, 5), _median(lambda: decode(rows), 5) / len(rows)
    return 4 * _ELEMENTS / encoding, 4 * _ELEMENTS / decoding, float(error)


def _traced(function: Callable[..., tf.Tensor], *arguments: tf.Tensor) -> Callable[..., tf.Tensor]:
    """The function as a graph. (Calls of a `tf.function` would be counted as retracing, and warned of.)"""
    return tf.function(function, autograph=False).get_concrete_function(*arguments)


def _median(call: Callable[[], object], times: int) -> float:
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)

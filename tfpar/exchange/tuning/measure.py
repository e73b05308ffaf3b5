"""Measurements for `auto`, about a second at the start: the transport over the links, the codecs' speed and error.

All workers measure the same at the same time, as they will exchange: those that share processors compete for them as
they will then. They use the mean, the same on each.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence

import tfpar_ops
from tfpar.collectives.cost_model import COPYING, Link, Speed
from tfpar.collectives.group import Group, allocate_instance_keys
from tfpar.collectives.tensorflow import PER_WORKER, local_copy
from tfpar_ops import Codec

import numpy as np
import tensorflow as tf

_ELEMENTS = 1 << 22  # of the vectors for measuring codecs: with their residuals, more than caches hold
_PAYLOADS = 4  # that are decoded and summed
_REPORT = 16  # numbers that workers sum to agree, or to wait for each other
_FIRST_BYTES, _LAST_BYTES = 1 << 18, 1 << 24  # of the messages for measuring bandwidth
_REPEATS = 5  # of each of these
_SLICES_S, _MOST_CALLS = 0.06, 50
_LEAST_CALLS = 5
_LEAST_SHARE = 0.05  # of a processor
_LONG_ENOUGH = 0.05  # seconds of a message after which larger ones add no information


@dataclasses.dataclass(frozen=True)
class Measured:
    """The mean over workers.

    Attributes:
      link: Latency, bandwidth, and what the processors do for a byte, with the transport of the group.
      speeds: Of each codec, in the order asked for.
      errors: Of each codec, the relative L2 error on normally distributed numbers.
      copying: The speed of sums and copies of float32.
    """

    link: Link
    speeds: list[Speed]
    errors: list[float]
    copying: Speed = COPYING


def measure(group: Group, codecs: Sequence[Codec], device: str) -> Measured:
    """Measures; all workers of the group must call it with the same codecs.

    Args:
      group: All workers.
      codecs: The codecs to measure.
      device: Where exchanges run.
    """
    with tf.device(device):
        total_of = _total(group)
        barrier = functools.partial(total_of, tf.zeros([_REPORT]))  # waits for all workers
        copying, share = _copying(barrier)
        latency, bandwidth, busy = _link(group, total_of)
        own = [latency, bandwidth, busy / share, copying]
        normal = tf.random.stateless_normal([_ELEMENTS], [1, 2])
        for codec in codecs:
            own += _codec(codec, normal, barrier)
        instance = allocate_instance_keys(1, group)[0]
        values = tf.constant(own, tf.float32)
        total = _traced(lambda value: group.all_reduce(value, instance), values)(values)
    latency, bandwidth, handling, copying, *rest = (total / group.size).numpy().astype(float).tolist()
    rates = [rest[place : place + 4] for place in range(0, len(rest), 4)]
    return Measured(
        Link(latency, bandwidth, handling, group.capabilities.chunk_bytes),
        [Speed(*speed) for *speed, _ in rates],
        [error for *_, error in rates],
        Speed(copying, copying),
    )


def _total(group: Group) -> Callable[[tf.Tensor], tf.Tensor]:
    """A function that sums `_REPORT` numbers over all workers, for which it waits."""
    instance = allocate_instance_keys(1, group)[0]
    return _traced(lambda value: group.all_reduce(value, instance), tf.zeros([_REPORT]))


def _copying(barrier: Callable[[], object]) -> tuple[float, float]:
    """Bytes of float32 added up per second, and the processors that this process gets meanwhile.

    The second is less than the machine has where other workers are on it, which measure at the same time.
    """
    values = [tf.fill([_ELEMENTS], float(number)) for number in range(2)]
    add = _traced(lambda one, other: one + other, *values)
    add(*values)
    barrier()
    began, busy = time.perf_counter(), time.process_time()
    seconds = _mean(lambda: add(*values))
    share = (time.process_time() - busy) / (time.perf_counter() - began)
    return 4 * _ELEMENTS / seconds, max(share, _LEAST_SHARE)


def _link(group: Group, total_of: Callable[[tf.Tensor], tf.Tensor]) -> tuple[float, float, float]:
    """Seconds of an empty message, bytes per second, and seconds of processor time per byte."""
    value = tf.zeros([_REPORT])
    total_of(value)
    round_trip = _median(lambda: total_of(value), 15)
    # Small sums: every member sends to all others at once, or a ring has messages one after the other.
    latency = round_trip / (1 if group.capabilities.chunk_bytes else 2 * (group.size - 1))
    size = _FIRST_BYTES
    while True:
        instance = allocate_instance_keys(1, group)[0]
        rows = tf.zeros([group.size, max(1, size // 4 // group.size)], tf.int32)
        send = _traced(functools.partial(group.all_to_all, instance=instance), rows)
        send(rows)
        times, busy = [], 0.0
        for _ in range(_REPEATS):
            total_of(value)  # otherwise the first to arrive would also measure its waiting
            began, before = time.perf_counter(), time.process_time()
            send(rows)
            times.append(time.perf_counter() - began)
            busy += (time.process_time() - before) / _REPEATS
        # The workers must agree on when to stop.
        seconds = float(total_of(tf.fill([_REPORT], statistics.median(times)))[0]) / group.size
        sent = 4 * (group.size - 1) * rows.shape[1]
        if seconds > _LONG_ENOUGH or size >= _LAST_BYTES:
            return latency, sent / max(seconds - latency, seconds / 10, 1e-6), busy / sent
        size *= 4


def _codec(codec: Codec, values: tf.Tensor, barrier: Callable[[], object]) -> tuple[float, float, float, float]:
    """Speeds, in the order of `Speed`, and relative error."""
    residual = local_copy(tf.Variable(tf.zeros([_ELEMENTS]), trainable=False, **PER_WORKER))
    seed_step = tf.constant([0, 0], tf.int64) if codec.rounding == "stochastic" else None
    encoding = functools.partial(tfpar_ops.encode_into, seed_step=seed_step, measures_norms=False)
    encode = _traced(lambda: encoding(residual, [values], codec).payload)
    payload = encode()
    error = np.linalg.norm(tfpar_ops.decode_sum(payload, codec, _ELEMENTS).numpy() - values.numpy()) / np.linalg.norm(
        values.numpy()
    )
    seconds = []
    for rows in (payload, tf.concat([payload] * _PAYLOADS, axis=0)):
        decode = _traced(lambda rows: tfpar_ops.decode_sum(rows, codec, _ELEMENTS), rows)
        seconds.append(_together(functools.partial(decode, rows), barrier))
    single, several = seconds
    each = max((several - single) / (_PAYLOADS - 1), 0.01 * single)
    size = 4 * _ELEMENTS
    return size / _together(encode, barrier), size / each, size / max(single - each, 0.01 * single), float(error)


def _together(call: Callable[[], object], barrier: Callable[[], object]) -> float:
    """Mean of the seconds of a call that all workers make at the same time."""
    call()
    barrier()
    return _mean(call)


def _traced(function: Callable[..., tf.Tensor], *arguments: tf.Tensor) -> Callable[..., tf.Tensor]:
    """The function as a graph. (Calls of a `tf.function` would be counted as retracing, and warned of.)"""
    return tf.function(function, autograph=False).get_concrete_function(*arguments)


def _median(call: Callable[[], object], times: int) -> float:
    """Median of the seconds of a call. All workers make equally many calls, which communicate."""
    seconds: list[float] = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _mean(call: Callable[[], object]) -> float:
    """Mean of the seconds of a call that does not communicate.

    Where workers share processors, a call either runs undisturbed or waits for a few time slices of the others. Most
    calls are shorter than a slice, so that their median would leave the waiting out.
    """
    began = time.perf_counter()
    for calls in range(1, _MOST_CALLS + 1):
        call()
        seconds = time.perf_counter() - began
        if calls >= _LEAST_CALLS and seconds >= _SLICES_S:
            break
    return seconds / calls

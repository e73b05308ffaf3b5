"""Sums the gradients of a weight that stages on several workers use, such as the table of tied embeddings.

Two workers send each other their gradients, each as soon as it has its own. In a step, the backward pass of the last
stage, which has the head, ends long before that of the first stage, so the gradient of the head travels meanwhile. The
first stage only looks rows up: its gradient is zero in all rows but those of the step's tokens, and it sends only
those. Both workers add the same two numbers, so they have the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from tfpar.collectives.tensorflow import run_unordered
from tfpar.parallel.held import Held
from tfpar.training.pipeline.between_workers import Messages

import tensorflow as tf

# Shares of the rows for which there is a message of this length. With more rows that are not zero, all are sent.
_SHARES = (1 / 256, 1 / 32, 1 / 4)
_FEWEST_ROWS = 1024  # of a weight whose rows are counted


def sum_of_holders(gradient: tf.Tensor, held: Held, messages: Messages) -> tf.Tensor:
    """Returns the sum of a weight's gradients over the workers that hold it, the same bits on each.

    Args:
      gradient: The gradient on this worker, float32.
      held: The holders. This worker must be one of them.
      messages: The messages of the function that is being traced.
    """
    return sum_of_ranks(tf.ensure_shape(gradient, held.part_shape), held.ranks, messages)


def sum_of_ranks(value: tf.Tensor, ranks: Sequence[int], messages: Messages) -> tf.Tensor:
    """Returns the sum of a tensor over some workers of the pipeline, the same bits on each.

    Args:
      value: The tensor on this worker, float32.
      ranks: Ranks of the workers in the pipeline. This worker must be one of them.
      messages: The messages of the function that is being traced.
    """
    worker = messages.worker
    with tf.device(messages.device):
        if len(ranks) == 2:
            other = ranks[1 - ranks.index(worker.rank)]
            if messages.channel(worker.rank, other).waits_apart:
                return value + _exchanged(value, other, messages)
        return worker.all_reduce(value, ranks)


def _exchanged(gradient: tf.Tensor, other: int, messages: Messages) -> tf.Tensor:
    """Sends the gradient to another worker, and returns that worker's."""
    own = messages.worker.rank
    rows = gradient.shape[0] if gradient.shape.rank else 0
    lengths = [int(rows * share) for share in _SHARES] if rows >= _FEWEST_ROWS and gradient.shape.rank > 1 else []
    # A length, all rows, and for each other length the places and the rows. Each direction has keys of its own.
    both = [messages.other_keys(other, 2 + 2 * len(lengths)) for _ in range(2)]
    keys, their_keys = both if own < other else reversed(both)
    sending, receiving = messages.channel(own, other), messages.channel(other, own)

    def send_all() -> tf.Tensor:
        return _done([sending.send(gradient, keys[1])])

    def received_all() -> tf.Tensor:
        return receiving.receive(tf.TensorSpec(gradient.shape, gradient.dtype), their_keys[1])

    if not lengths:
        messages.sent.append(send_all())
        return received_all()

    # As bits, because a negative zero added to a negative zero is negative.
    bits = tf.bitcast(gradient, tf.int32)
    places = tf.where(tf.reduce_any(tf.reshape(bits, [rows, -1]) != 0, axis=1))[:, 0]
    needed = tf.searchsorted(tf.constant(lengths), [tf.size(places)])[0]  # len(lengths): all rows
    messages.sent.append(sending.send(needed, keys[0]))
    coming = receiving.receive(tf.TensorSpec([], tf.int32), their_keys[0])

    def send_rows(number: int) -> tf.Tensor:
        # What is left over has the place after the last row, where nothing is.
        filled = tf.pad(places, [[0, lengths[number] - tf.size(places)]], constant_values=rows)
        return _done(
            [
                sending.send(tf.cast(filled, tf.int32), keys[2 + 2 * number]),
                sending.send(tf.gather(gradient, tf.minimum(filled, rows - 1)), keys[3 + 2 * number]),
            ]
        )

    def received_rows(number: int) -> tf.Tensor:
        length, row = lengths[number], gradient.shape[1:]
        filled = receiving.receive(tf.TensorSpec([length], tf.int32), their_keys[2 + 2 * number])
        values = receiving.receive(tf.TensorSpec([length, *row], gradient.dtype), their_keys[3 + 2 * number])
        return tf.scatter_nd(filled[:, None], values, [rows + 1, *row])[:rows]

    sends: list[Callable[[], tf.Tensor]] = [
        *(functools.partial(send_rows, number) for number in range(len(lengths))),
        send_all,
    ]
    receives: list[Callable[[], tf.Tensor]] = [
        *(functools.partial(received_rows, number) for number in range(len(lengths))),
        received_all,
    ]
    messages.sent.append(_switched(needed, sends))
    return _switched(coming, receives)


def _switched(number: tf.Tensor, branches: Sequence[Callable[[], tf.Tensor]]) -> tf.Tensor:
    """Calls one of the branches, in no order with other messages: a message leaves when the other worker receives it,
    and that worker may send one first."""
    result = tf.switch_case(number, branches)
    # Behind it is the operation with the branches (TensorFlow 2.21, `cond_v2._build_case`).
    run_unordered(result.op.inputs[0] if result.op.type == "Identity" else result)
    return result


def _done(sent: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns a number that exists once all has been sent."""
    with tf.control_dependencies(sent):
        return tf.zeros([])

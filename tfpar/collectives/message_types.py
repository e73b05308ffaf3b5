"""The types in which TensorFlow's messages between two workers carry tensors of other types."""

from __future__ import annotations

import tensorflow as tf

# Types for which messages have no kernel (TensorFlow 2.21), with the type as whose bits they are sent instead.
_SENT_AS = {
    **dict.fromkeys((tf.bfloat16, tf.int16, tf.uint16), tf.float16),
    tf.uint32: tf.int32,
    **dict.fromkeys((tf.uint64, tf.complex64, tf.complex128), tf.int64),
}
# No type of messages has as few bits as these.
_WIDENED = {tf.int8: tf.int16, tf.uint8: tf.uint16}


def as_sent(value: tf.Tensor) -> tf.Tensor:
    """A tensor of any type of numbers, as one that messages have a kernel for."""
    value = tf.cast(value, _WIDENED.get(value.dtype, value.dtype))
    return tf.bitcast(value, _SENT_AS[value.dtype]) if value.dtype in _SENT_AS else value


def sent_spec(spec: tf.TensorSpec) -> tf.TensorSpec:
    """Shape and type of `as_sent`."""
    dtype = _WIDENED.get(spec.dtype, spec.dtype)
    sent = _SENT_AS.get(dtype, dtype)
    parts = dtype.size // sent.size
    return tf.TensorSpec([*spec.shape, parts] if parts > 1 else spec.shape, sent)


def as_received(sent: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """The value of which `sent` is `as_sent`."""
    wide = _WIDENED.get(dtype, dtype)
    return tf.cast(tf.bitcast(sent, wide) if sent.dtype != wide else sent, dtype)

"""Questions about graphs of TensorFlow."""

from __future__ import annotations

import tensorflow as tf


def ancestors(operation: tf.Operation) -> set[tf.Operation]:
    """All operations that an operation waits for."""
    found: set[tf.Operation] = set()
    left = [operation]
    while left:
        one = left.pop()
        for other in [*one.control_inputs, *(tensor.op for tensor in one.inputs)]:
            if other not in found:
                found.add(other)
                left.append(other)
    return found

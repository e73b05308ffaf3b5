"""Calls of the native transport within TensorFlow's functions: a mesh of one worker, which is this process."""

from __future__ import annotations

from collections.abc import Iterator

from tests.collectives.one_member import group_of_one
from tfpar.collectives.gloo import PipelinedGlooGroup
from tfpar_ops.transport_library import why_unusable

import pytest
import tensorflow as tf
from tensorflow.python.eager import cancellation

pytestmark = pytest.mark.skipif(bool(why_unusable()), reason="the transport over Gloo is not built here")


@pytest.fixture
def group() -> Iterator[PipelinedGlooGroup]:
    with group_of_one() as group:
        yield group


def test_a_call_that_is_cancelled_before_it_begins_ends_those_after_it(group):
    """Other workers would wait for it, and take a later call with the same key for it."""
    manager = cancellation.CancellationManager()

    @tf.function(autograph=False)
    def total(cancels: tf.Tensor) -> tf.Tensor:
        def cancel(now: tf.Tensor) -> tf.Tensor:
            if now:
                manager.start_cancel()
            return now

        with tf.control_dependencies([tf.py_function(cancel, [cancels], tf.bool)]):
            return group.all_reduce(tf.ones([3]), 1)

    assert total(tf.constant(False)).numpy().tolist() == [1.0, 1.0, 1.0]
    cancelled = manager.get_cancelable_function(total.get_concrete_function(tf.constant(False)))
    with pytest.raises(tf.errors.CancelledError):
        cancelled(tf.constant(True))
    with pytest.raises(tf.errors.CancelledError, match="another operation of this worker failed during a collective"):
        total(tf.constant(False))

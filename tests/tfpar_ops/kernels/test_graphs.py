"""The native operations in graphs: functions, their order and pruning, strategies, gradients."""

from __future__ import annotations

import tfpar_ops
from tests.tfpar_ops import data
from tests.tfpar_ops.kernels.harness import CODECS, ELEMENTS, INT4, SHAPES, residual, tensors
from tfpar_ops import reference
from tfpar_ops.library import OPERATIONS

import numpy as np
import tensorflow as tf


def test_in_a_function_with_static_shapes():
    variable = tf.Variable(tf.zeros([ELEMENTS]))
    traces = []

    @tf.function(autograph=False)
    def step(parts: list[tf.Tensor], seed: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
        made = tfpar_ops.encode_into(variable, parts, CODECS[4], shards=2, seed_step=seed)
        decoded = tfpar_ops.decode(made.payload, CODECS[4], SHAPES)
        traces.append((made.payload.shape, [part.shape for part in decoded]))
        return made.payload, decoded

    expected = tf.zeros([ELEMENTS])
    for number in range(3):
        seed = tf.constant([5, number], tf.int64)
        payload, _ = step(tensors(number), seed)
        made = reference.encode(tensors(number), expected, CODECS[4], shards=2, seed_step=seed)
        np.testing.assert_array_equal(payload, made.payload)
        expected = made.residual
        data.same_bits(variable.numpy(), expected.numpy())
    shard = -(-ELEMENTS // 2 // 512) * 512
    words = CODECS[4].payload_bytes(shard) // 4
    assert traces == [((2, words), SHAPES)]


def test_two_updates_of_one_variable_run_in_their_order():
    """Nothing else connects the two: automatic control dependencies must see that they write."""
    variable = tf.Variable(tf.zeros([1000]))

    @tf.function(autograph=False)
    def twice(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return (
            tfpar_ops.encode_into(variable, [x], INT4).payload,
            tfpar_ops.encode_into(variable, [-2 * x], INT4).payload,
        )

    x = residual(elements=1000)
    first = tfpar_ops.encode([x], tf.zeros([1000]), INT4)
    second = tfpar_ops.encode([-2 * x], first.residual, INT4)
    made = twice(x)
    np.testing.assert_array_equal(made[0], first.payload)
    np.testing.assert_array_equal(made[1], second.payload)
    data.same_bits(variable.numpy(), second.residual.numpy())


def test_an_update_without_a_reader_is_not_pruned():
    variable = tf.Variable(tf.zeros([1000]))

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> None:
        tfpar_ops.encode_into(variable, [x], INT4)

    step(residual(elements=1000))
    assert np.any(variable.numpy())


def test_under_a_mirrored_strategy():
    """Each replica has its residual, updated in place, in threads of their own."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        variable = tf.Variable(
            tf.zeros([ELEMENTS]),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )

    @tf.function(autograph=False)
    def step(parts: list[list[tf.Tensor]]):
        def replica_step() -> tf.Tensor:
            me = tf.distribute.get_replica_context().replica_id_in_sync_group
            mine = [tf.gather(tf.stack(both), me) for both in zip(*parts, strict=True)]
            return tfpar_ops.encode_into(variable, mine, INT4).payload

        return strategy.run(replica_step)

    expected = [tf.zeros([ELEMENTS])] * 2
    for number in range(2):
        parts = [tensors(2 * number), tensors(2 * number + 1)]
        payloads = strategy.experimental_local_results(step(parts))
        for i in range(2):
            made = tfpar_ops.encode(parts[i], expected[i], INT4)
            np.testing.assert_array_equal(payloads[i], made.payload)
            expected[i] = made.residual
            data.same_bits(variable.values[i].numpy(), made.residual.numpy())


def test_nothing_is_differentiable():
    x = residual()
    variable = tf.Variable(tf.zeros([ELEMENTS]))
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        made = tfpar_ops.encode([x], x, INT4)
        results = [
            made.residual,
            made.norms,
            tfpar_ops.encode_into(variable, [x], INT4).norms,
            tfpar_ops.norm_squared([x])[0],
            tfpar_ops.decode_sum(made.payload, INT4, ELEMENTS, factor=x[0]),
            tfpar_ops.decode(made.payload, INT4, [[ELEMENTS]], factor=x[0])[0],
            tfpar_ops.recode(made.payload, x, INT4, ELEMENTS).residual,
        ]
    assert [tape.gradient(result, x) for result in results] == [None] * len(results)
    assert len(OPERATIONS) == 7

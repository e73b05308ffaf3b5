"""The small vector that travels with the gradients: what is in it, and what its sum says."""

from __future__ import annotations

from tfpar.training import sidecar as module
from tfpar.training.objective import LocalSums
from tfpar.training.sidecar import Sidecar

import keras
import numpy as np
import pytest
import tensorflow as tf


def variables() -> list[keras.Variable]:
    """Non-trainable state of a model: statistics, a seed generator, a counter."""
    return [
        keras.Variable(np.zeros((2, 3), np.float32), name="moving_mean"),
        keras.random.SeedGenerator(3).state,
        keras.Variable(np.zeros((), np.float32), name="scale"),
        keras.Variable(0, dtype="int32", trainable=False, name="steps"),
    ]


def metric_variables() -> list[keras.Variable]:
    metrics = [
        keras.metrics.SparseCategoricalAccuracy(),
        keras.metrics.FalsePositives(thresholds=[0.2, 0.5, 0.8]),
    ]
    return [variable for metric in metrics for variable in metric.variables]


def contribution(count: float, loss: float, seed: int = 0, gradient: float = 1.0) -> LocalSums:
    generator = np.random.default_rng(seed)
    return LocalSums(
        loss=tf.constant(loss),
        count=tf.constant(count),
        gradients=[tf.fill([2, 2], gradient)],
        state=[
            tf.constant(generator.normal(size=(2, 3)), tf.float32),
            tf.constant([seed, 7], tf.uint32),
            tf.constant(float(seed)),
            tf.constant(11 + seed),
        ],
        metrics=[tf.constant(generator.integers(0, 9, variable.shape), tf.float32) for variable in metric_variables()],
        assigned={},
        overwritten=[],
    )


BEFORE = contribution(1.0, 0.0, 9).state  # what all replicas start from


def vector_of(layout: Sidecar, sums: LocalSums, before: list[tf.Tensor] | None = None) -> tf.Tensor:
    norm = tf.linalg.global_norm(sums.gradients)
    return layout.flag(layout.pack(sums, (BEFORE if before is None else before)[: len(sums.state)]), norm)


@pytest.mark.parametrize(("replicas", "traveling"), [(1, 0), (2, 7)])
def test_length_counts_what_travels(replicas, traveling):
    """Flag, count and loss; 2 + 3 scalars of metrics; statistics where there is somebody to average with."""
    layout = Sidecar.of(variables(), metric_variables(), replicas)
    assert layout.report_length == 3 + 5
    assert layout.length == 3 + 5 + traveling
    assert vector_of(layout, contribution(4.0, 2.0)).shape == [layout.length]
    assert layout.averaged == ((True, False, True, False) if replicas > 1 else (False,) * 4)


def test_sums_over_replicas_weight_state_by_examples():
    layout = Sidecar.of(variables(), metric_variables(), 3)
    parts = [contribution(5.0, 10.0, 1), contribution(3.0, 2.0, 2), contribution(0.0, 0.0, 3)]
    total = tf.add_n([vector_of(layout, part) for part in parts])
    assert [total[place] for place in (module.NON_FINITE, module.COUNT, module.LOSS)] == [0.0, 8.0, 12.0]

    for local in parts:
        state = layout.state(total, layout.base(BEFORE, local.state))
        for index in (0, 2):
            wanted = (5 * parts[0].state[index] + 3 * parts[1].state[index]) / 8
            np.testing.assert_allclose(state[index], wanted, rtol=1e-6)
        for index in (1, 3):  # what does not travel stays as it is here
            assert state[index] is local.state[index]

    metrics = layout.metrics(total[None, : layout.report_length])
    for found, *each in zip(metrics, *[part.metrics for part in parts], strict=True):
        np.testing.assert_array_equal(found, sum(each))


def test_alone_the_state_is_taken_as_it_is():
    layout = Sidecar.of(variables(), metric_variables(), 1)
    local = contribution(5.0, 10.0)
    state = layout.state(vector_of(layout, local), local.state)
    assert all(found is given for found, given in zip(state, local.state, strict=True))


def test_without_metrics_and_state_three_scalars_travel():
    layout = Sidecar.of([], [], 4)
    assert layout.length == layout.report_length == 3
    assert layout.metrics(tf.zeros([2, 3])) == []
    assert layout.state(tf.zeros([3]), []) == []


@pytest.mark.parametrize(
    ("loss", "gradient", "flag"),
    [
        (1.0, 1.0, 0.0),
        (float("nan"), 1.0, 1.0),
        (float("inf"), 1.0, 1.0),
        (1.0, float("nan"), 1.0),
        (1.0, float("-inf"), 1.0),
        (1.0, 1e30, 1.0),  # finite, but its square is not a float32
        (1.0, 1e18, 0.0),
    ],
)
def test_a_replica_that_is_not_finite_raises_its_flag(loss, gradient, flag):
    layout = Sidecar.of(variables(), metric_variables(), 2)
    vector = vector_of(layout, contribution(4.0, loss, gradient=gradient))
    assert vector[module.NON_FINITE] == flag


def test_flags_of_several_replicas_add_up_and_never_cancel():
    layout = Sidecar.of([], [], 3)
    losses = (float("inf"), float("-inf"), 1.0)
    empty = [contribution(1.0, loss)._replace(state=[], metrics=[]) for loss in losses]
    assert tf.add_n([vector_of(layout, part) for part in empty])[module.NON_FINITE] == 2.0


def test_state_that_does_not_change_keeps_its_bits_and_frozen_weights_do_not_travel():
    layout = Sidecar.of(variables(), metric_variables(), 3)
    parts = [contribution(count, 1.0)._replace(state=BEFORE) for count in (3.0, 7.0, 4.0)]
    total = tf.add_n([vector_of(layout, part) for part in parts])
    for found, old in zip(layout.state(total, layout.base(BEFORE, BEFORE)), BEFORE, strict=True):
        np.testing.assert_array_equal(found, old)
    state = variables()
    frozen = Sidecar.of(state, metric_variables(), 3, frozen=state[:1])
    assert frozen.averaged == (False, False, True, False)
    assert layout.length - frozen.length == 6


def test_metrics_of_a_step_that_was_left_out_do_not_count():
    layout = Sidecar.of([], metric_variables(), 2)
    good = contribution(4.0, 1.0, 1)._replace(state=[])
    bad = contribution(4.0, float("nan"), 2)._replace(state=[])
    bad = bad._replace(metrics=[tf.fill(part.shape, float("nan")) for part in bad.metrics])
    reports = tf.stack([vector_of(layout, part)[: layout.report_length] for part in (good, bad, good)])
    for found, once in zip(layout.metrics(reports), good.metrics, strict=True):
        assert found.shape == once.shape
        np.testing.assert_array_equal(found, 2 * once)


def test_a_step_without_examples_gives_finite_state():
    layout = Sidecar.of(variables(), metric_variables(), 2)
    parts = [contribution(0.0, 0.0, 1), contribution(0.0, 0.0, 2)]
    state = layout.state(tf.add_n([vector_of(layout, part) for part in parts]), layout.base(BEFORE, parts[0].state))
    assert all(np.isfinite(np.asarray(value, np.float64)).all() for value in state)


@pytest.mark.parametrize(
    ("flag", "count", "divisor", "applies"),
    [(0.0, 4.0, 7.0, True), (1.0, 4.0, 7.0, False), (0.0, 0.0, 0.0, False), (0.0, 4.0, 0.0, False)],
)
def test_a_step_with_nothing_to_learn_from_is_not_applied(flag, count, divisor, applies):
    """Beside examples, what the loss is divided by is zero if a mask leaves out all their positions."""
    vector = tf.constant([flag, count, 0.0, 0.0, divisor])
    assert Sidecar.of([], metric_variables(), 2, own_denominator=True).should_apply(vector) == applies
    assert Sidecar.of([], [], 2).should_apply(vector[:3]) == (not flag and count > 0.0)


def test_it_compiles():
    layout = Sidecar.of(variables(), metric_variables(), 2)
    local = contribution(4.0, 2.0, 1)

    @tf.function(jit_compile=True, autograph=False)
    def both(sums: LocalSums) -> tuple[tf.Tensor, list[tf.Tensor]]:
        vector = vector_of(layout, sums)
        return vector, layout.state(2 * vector, layout.base(BEFORE, sums.state))

    vector, state = both(local)
    np.testing.assert_array_equal(vector, vector_of(layout, local))
    for found, given in zip(state, local.state, strict=True):
        assert found.dtype == given.dtype
        np.testing.assert_allclose(found, given, rtol=1e-6)


def test_a_count_in_float64_goes_on_past_the_integers_of_float32():
    before = [tf.constant(2.0**24, tf.float64)]
    layout = Sidecar.of([keras.Variable(before[0], trainable=False, dtype="float64")], [], 2)
    part = contribution(4.0, 1.0)._replace(state=[before[0] + 1.0], metrics=[])
    total = 2 * vector_of(layout, part, before)
    [after] = layout.state(total, layout.base(before, part.state))
    assert after.dtype == tf.float64
    assert after == 2.0**24 + 1.0

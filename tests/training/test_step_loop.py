"""The loop on the device, with a step that only counts: order, prefetching, the snapshot before the last turn."""

from __future__ import annotations

from typing import NamedTuple

from tfpar.parallel.compilation import compilation_plan
from tfpar.precision import LossScale
from tfpar.training import step_loop
from tfpar.training.sidecar import Sidecar
from tfpar.training.step_loop import StepReport, run_steps, while_in_two_parts

import numpy as np
import pytest
import tensorflow as tf


class CountingStep:
    """Adds each batch to the weights; its loss is the batch, and its loss scale doubles."""

    def __init__(self, prefetches: bool) -> None:
        self.sidecar = Sidecar.of([], [], 1)
        devices = ["CPU:0"] if prefetches else ["GPU:0", "GPU:1"]
        self.plan = compilation_plan(replicas=2, local_devices=devices, on_tpu=False, jit_compile=False)
        self.weights = tf.Variable([3.0, 4.0])
        self.traced = 0

    def run_on_replicas(self, batch, step, lr_multiplier, loss_scale, wants_norm):
        self.traced += 1
        done = self.weights.assign_add(tf.stack([batch, 0.0]))
        with tf.control_dependencies([done]):
            norm = tf.where(wants_norm, tf.cast(step, tf.float32), 0.0)
            times = tuple(tf.zeros([4], tf.float64)[i] for i in range(4))
        return StepReport(
            tf.stack([norm, 0.0, 2.0, 2.0 * batch]),
            LossScale(loss_scale.scale * 2.0, loss_scale.good_steps + 1),
            times,
        )

    def counted_weights(self):
        return [self.weights.read_value()]

    def sum_over_parts(self, value):
        return value

    def learning_rate(self, step, lr_multiplier):
        return tf.cast(step, tf.float32) * lr_multiplier

    def next_batch(self, iterator):
        return next(iterator)

    def local_tensors(self, batch):
        return tf.nest.flatten(batch)

    def clock(self, after):
        with tf.control_dependencies(after):
            return tf.identity(tf.zeros([], tf.float64))


@pytest.mark.parametrize("prefetches", [True, False])
def test_steps_run_in_order_and_the_last_is_measured(prefetches):
    step = CountingStep(prefetches)
    assert step.plan.prefetches_in_loop is prefetches
    batches = tf.data.Dataset.from_tensor_slices(np.arange(1.0, 100.0, dtype=np.float32))
    iterator = iter(batches)
    run = tf.function(lambda *arguments: run_steps(step, iterator, *arguments), autograph=False)
    scale = LossScale(tf.constant(1.0), tf.constant(0))
    for first, count_of_steps, losses in ((10, 4, [1, 2, 3, 4]), (14, 1, [5])):
        result = run(tf.constant(first, tf.int64), tf.constant(count_of_steps), scale, tf.constant(0.5))
        scale = result.loss_scale
        np.testing.assert_array_equal(result.loss, losses)
        np.testing.assert_array_equal(result.count, [2.0] * count_of_steps)
        assert result.finite.numpy().all()
        last = first + count_of_steps - 1
        assert result.norms.gradient == last
        assert result.learning_rate == 0.5 * last
        assert result.norms.update == losses[-1]
    assert result.norms.parameter == np.linalg.norm([3 + 15, 4])
    assert scale.scale == 2.0**5
    assert scale.good_steps == 5
    assert next(iterator) == 6.0  # no batch is fetched that no step of the call uses
    assert step.traced == 1


class Turns(NamedTuple):
    done: tf.Tensor
    seen: tf.TensorArray


def test_norms_are_computed_only_where_they_are_wanted():
    step, read = CountingStep(prefetches=True), []
    step.counted_weights = lambda: [_noted(step.weights, read)]
    iterator = iter(tf.data.Dataset.from_tensor_slices(np.arange(1.0, 100.0, dtype=np.float32)))
    run = tf.function(lambda *arguments: run_steps(step, iterator, *arguments), autograph=False)
    arguments = tf.constant(3), LossScale(tf.constant(1.0), tf.constant(0)), tf.constant(0.5)
    without = run(tf.constant(10, tf.int64), *arguments, tf.constant(False))
    assert [float(norm) for norm in without.norms] == [0.0, 0.0, 0.0]
    np.testing.assert_array_equal(without.loss, [1, 2, 3])
    assert len(read) == 1  # `while_in_two_parts` reads the types of the values
    wanted = run(tf.constant(13, tf.int64), *arguments, tf.constant(True))
    assert [float(norm) for norm in wanted.norms] == [15.0, np.hypot(3 + 21, 4, dtype=np.float32), 6.0]
    assert len(read) == 1 + 3


def _noted(variable, read):
    """The value of a variable; each time that it is read at run time, an element is appended to `read`."""
    value = variable.read_value()

    def note(value):
        read.append(value)
        return value

    return tf.ensure_shape(tf.py_function(note, [value], value.dtype), value.shape)


@pytest.mark.parametrize("turns", [1, 2, 5])
def test_the_snapshot_is_taken_before_the_last_turn(turns):
    variable = tf.Variable([0.0])

    def body(index, state, is_last):
        with tf.control_dependencies([state.done]):
            done = variable.assign_add([1.0])
        return Turns(tf.identity(done), state.seen.write(index, is_last))

    @tf.function(autograph=False)
    def run(turns):
        start = Turns(tf.zeros([1]), tf.TensorArray(tf.bool, size=turns, element_shape=[]))
        [snapshot], state = while_in_two_parts(turns, body, lambda: [variable.read_value()], start, tf.constant(True))
        return snapshot, state.seen.stack(), state.done

    snapshot, seen, done = run(tf.constant(turns))
    assert snapshot.numpy() == [turns - 1]
    assert seen.numpy().tolist() == [False] * (turns - 1) + [True]
    assert done.numpy() == [turns]


def test_a_fake_step_is_all_that_the_loop_needs():
    """The protocol names everything: what a training step has besides stays unknown to the loop."""
    step: step_loop.Step = CountingStep(prefetches=True)
    assert {name for name in vars(step_loop.Step) if not name.startswith("_")} <= set(dir(step))

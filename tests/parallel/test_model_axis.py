"""Devices that communicate within a step."""

from __future__ import annotations

from tfpar.parallel.model_axis import place_of_group

import tensorflow as tf


def test_members_go_on_with_the_same_call_after_an_error():
    """An error in the trace of the first member leaves the second without a trace. They would wait for each other."""

    def places():
        return [place_of_group([70, 71], number, "CPU:0", [0, 0]) for number in (70, 71)]

    def next_call(place):
        with tf.Graph().as_default():
            return int(tf.get_static_value(place.sum(tf.zeros([2])).op.inputs[3]))

    first, _ = places()
    assert [next_call(first), next_call(first)] == [1, 2]
    assert [next_call(place) for place in places()] == [3, 3]

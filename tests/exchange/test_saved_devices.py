"""Residuals of devices with parts of the weights go back to devices with the same parts, and to no others."""

from __future__ import annotations

from tfpar.collectives.tensorflow import new_group
from tfpar.config import ConfigError
from tfpar.exchange import DevicesOfReplica, Exchange
from tfpar.exchange import spec as specs
from tfpar.exchange.per_device import (
    PlacesReducer,
    check_saved_devices,
    per_device_reducer,
    places_in_turn,
    places_of_part,
    places_that_divide,
)

import numpy as np
import pytest
import tensorflow as tf

DIVIDED = [tf.TensorShape([64, 64]), tf.TensorShape([64, 32]), tf.TensorShape([7])]  # on a device
WHOLE = [tf.TensorShape([64, 64]), tf.TensorShape([64, 64]), tf.TensorShape([7])]
CPUS = ["CPU:0", "CPU:1"]


def exchange_of_two_devices(spec: str) -> Exchange:
    """That of the first of two workers."""
    exchange, replica = Exchange(spec), places_that_divide([1], 3, 2)
    variables = [tf.TensorSpec(shape) for shape in DIVIDED]
    strategy = tf.distribute.MirroredStrategy(CPUS)
    exchange.build(variables, strategy=strategy, group=new_group((0, 1), 0), per_device=replica)
    return exchange


def reducer_of(shapes: list[tf.TensorShape], replica: DevicesOfReplica) -> PlacesReducer:
    """That of the first of two workers."""
    strategy = tf.distribute.MirroredStrategy(CPUS)
    return per_device_reducer(specs.parse("int4:min_elements=64"), shapes, new_group((0, 1), 0), strategy, 0, replica)


def of_two_devices() -> PlacesReducer:
    return reducer_of(DIVIDED, places_that_divide([1], 3, 2))


def test_the_same_parts_get_theirs_back():
    saved, reducer = of_two_devices(), of_two_devices()
    for number, residual in enumerate(saved.state):
        residual.assign(tf.cast(tf.fill(residual.shape, number + 1), residual.dtype))
    check_saved_devices(reducer, 2, lambda _: saved.export())
    reducer.restore(2, lambda _: saved.export())
    assert len(saved.state) > 1
    for one, other in zip(saved.state, reducer.state, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


@pytest.mark.parametrize(
    ("shapes", "replica", "said"),
    [
        # As many devices, which are stages.
        (WHOLE, places_in_turn([0, 1, 1], [CPUS]), "the devices of the saved run had other layers or other parts"),
        (WHOLE, places_that_divide([1], 3, 2), "the devices of the saved run had other layers or other parts of them"),
        (DIVIDED, places_that_divide([1], 3, 1), "the saved run had replicas of 2 devices each"),
        (DIVIDED, places_of_part([1], 3, 1, 2, 0), "the saved run had replicas of 2 devices each"),
    ],
)
def test_other_parts_are_refused(shapes, replica, said):
    saved = of_two_devices()
    with pytest.raises(ConfigError, match=f"--mesh: {said}"):
        check_saved_devices(reducer_of(shapes, replica), 2, lambda _: saved.export())


def test_an_exchange_of_none_refuses_what_it_would_lose():
    saved = exchange_of_two_devices("int4:min_elements=64")
    exchange_of_two_devices("none").restore(2, lambda _: saved.export())  # all are zero
    saved.state[1].assign(tf.ones_like(saved.state[1]))
    with pytest.raises(ConfigError, match="a residual that has not been applied yet, of replicas of several devices"):
        exchange_of_two_devices("none").restore(2, lambda _: saved.export())

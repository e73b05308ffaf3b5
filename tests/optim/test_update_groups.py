"""Updates of weights in groups: the same numbers as at once, one group after the other."""

from __future__ import annotations

from tests.graphs import ancestors
from tfpar.optim.optimizers import ELEMENTWISE
from tfpar.optim.pure_update import pure_apply

import keras
import numpy as np
import pytest
import tensorflow as tf

SHAPES = [(40, 10), (10,), (30, 20), (7,), (50, 8)]
GROUP_BYTES = 1600  # that of the first weight


def built(kind, **options):
    variables = [keras.Variable(np.full(shape, 0.5, np.float32)) for shape in SHAPES]
    optimizer = kind(learning_rate=0.01, **options)
    optimizer.build(variables)
    return optimizer, variables


def updated(optimizer, variables, **options):
    """The results of two updates."""
    generator = np.random.default_rng(1)
    gradients = [tf.constant(generator.normal(size=shape), tf.float32) for shape in SHAPES]

    @tf.function(autograph=False)
    def update(params, slots, gradients, factor):
        for _ in range(2):
            params, slots = pure_apply(optimizer, slots, params, gradients, factor=factor, **options)
        return params, slots

    values = [[tf.convert_to_tensor(each) for each in some] for some in (variables, optimizer.variables)]
    return tf.nest.flatten(update(*values, gradients, tf.constant(0.25)))


@pytest.mark.parametrize("kind", sorted(ELEMENTWISE, key=lambda kind: kind.__name__))
def test_groups_give_the_same_numbers(kind):
    """Up to the last bit: TensorFlow rewrites some arithmetic that waits for nothing else."""
    for options in ({}, {"weight_decay": 0.1, "use_ema": True, "ema_momentum": 0.9}):
        together = updated(*built(kind, **options))
        grouped = updated(*built(kind, **options), group_bytes=GROUP_BYTES)
        for expected, found in zip(together, grouped, strict=True):
            np.testing.assert_allclose(found, expected, rtol=3e-7)


def test_the_factor_multiplies_gradients():
    optimizer, variables = built(keras.optimizers.SGD)
    gradients = [tf.ones(shape) for shape in SHAPES]
    slots = [tf.convert_to_tensor(each) for each in optimizer.variables]
    params = [tf.convert_to_tensor(each) for each in variables]
    for group_bytes in (0, GROUP_BYTES):
        new, _ = pure_apply(optimizer, slots, params, gradients, factor=tf.constant(0.25), group_bytes=group_bytes)
        np.testing.assert_allclose(new[0], np.full(SHAPES[0], 0.5 - 0.01 * 0.25), rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "in_order"),
    [({"weight_decay": 0.1}, True), ({"global_clipnorm": 1.0}, False), ({"clipnorm": 1.0}, False)],
)
def test_a_group_waits_for_the_one_before(options, in_order):
    """All of a later group: its gradient is not even multiplied before. Clipping needs all gradients first."""
    optimizer, _ = built(keras.optimizers.AdamW, **options)
    with tf.Graph().as_default():
        params = [tf.compat.v1.placeholder(tf.float32, shape) for shape in SHAPES]
        given = [tf.compat.v1.placeholder(tf.float32, shape) for shape in SHAPES]
        slots = [tf.compat.v1.placeholder(each.dtype, each.shape) for each in optimizer.variables]
        new, _ = pure_apply(
            optimizer, slots, params, given, tf.constant(0.1), factor=tf.constant(0.5), group_bytes=1600
        )
        first, last = new[0].op, new[-1].op
        multiplied = next(one for one in ancestors(last) if given[-1] in one.inputs)
        assert (first in ancestors(multiplied)) == in_order
        assert last not in ancestors(first)

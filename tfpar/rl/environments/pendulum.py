"""Pendulum: a pendulum is swung up and held by a torque that is too weak to lift it.

The dynamics are those of Gymnasium's `Pendulum-v1`: 0.05 s per step, a torque of at most 2 Nm; episodes never
terminate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tfpar.rl.environments import drawing
from tfpar.rl.environments.protocol import Continuous, Environment, State, Transition, stacked

import tensorflow as tf

_MAX_SPEED, _MAX_TORQUE, _SECONDS, _GRAVITY = 8.0, 2.0, 0.05, 10.0  # mass 1 kg, length 1 m


def _reset(numbers: Sequence[tf.Tensor]) -> State:
    return (2.0 * numbers[0] - 1.0) * math.pi, 2.0 * numbers[1] - 1.0


def _step(state: State, action: tf.Tensor, _: Sequence[tf.Tensor]) -> Transition:
    angle, speed = state
    torque = tf.clip_by_value(action[:, 0], -_MAX_TORQUE, _MAX_TORQUE)
    effect, price = (tf.cast(each, angle.dtype) for each in (3.0 * torque, 0.001 * torque * torque))
    upright = tf.math.floormod(angle + math.pi, 2.0 * math.pi) - math.pi
    cost = upright * upright + 0.1 * speed * speed + price
    speed += (1.5 * _GRAVITY * tf.sin(angle) + effect) * _SECONDS
    speed = tf.clip_by_value(speed, -_MAX_SPEED, _MAX_SPEED)
    return Transition((angle + speed * _SECONDS, speed), -cost, tf.zeros_like(angle, tf.bool))


PENDULUM = Environment(
    name="Pendulum-v1",
    observation_shape=(3,),
    actions=Continuous((-_MAX_TORQUE,), (_MAX_TORQUE,)),
    max_steps=200,
    reset_numbers=2,
    reset=_reset,
    step=_step,
    observe=lambda state: stacked(tf.cos(state[0]), tf.sin(state[0]), state[1]),
    render=drawing.pendulum,
    goal=-150.0,
)

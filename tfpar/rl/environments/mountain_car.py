"""MountainCar: a car too weak for a hill gains speed in the valley (Moore 1990).

The dynamics are those of Gymnasium's `MountainCar-v0`: reward -1 for every step until the car is at the flag.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfpar.rl.environments import drawing
from tfpar.rl.environments.protocol import Discrete, Environment, State, Transition, stacked

import tensorflow as tf

_LOWEST, _HIGHEST, _MAX_SPEED, _FLAG = -1.2, 0.6, 0.07, 0.5
_FORCE, _GRAVITY = 0.001, 0.0025


def _reset(numbers: Sequence[tf.Tensor]) -> State:
    return 0.2 * numbers[0] - 0.6, tf.zeros_like(numbers[0])


def _step(state: State, action: tf.Tensor, _: Sequence[tf.Tensor]) -> Transition:
    position, speed = state
    speed += tf.cast(action - 1, position.dtype) * _FORCE - tf.cos(3.0 * position) * _GRAVITY
    speed = tf.clip_by_value(speed, -_MAX_SPEED, _MAX_SPEED)
    position = tf.clip_by_value(position + speed, _LOWEST, _HIGHEST)
    at_wall = (position <= _LOWEST) & (speed < 0.0)
    speed = tf.where(at_wall, tf.zeros_like(speed), speed)
    return Transition((position, speed), -tf.ones_like(position), (position >= _FLAG) & (speed >= 0.0))


MOUNTAIN_CAR = Environment(
    name="MountainCar-v0",
    observation_shape=(2,),
    actions=Discrete(3),
    max_steps=200,
    reset_numbers=1,
    reset=_reset,
    step=_step,
    observe=lambda state: stacked(*state),
    render=drawing.car_in_valley,
    goal=-105.0,
)

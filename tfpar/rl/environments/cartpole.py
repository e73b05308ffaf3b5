"""CartPole: a pole on a cart is kept upright (Barto, Sutton and Anderson 1983), with the equations of Florian (2007).

The dynamics are those of Gymnasium's `CartPole-v1`: explicit Euler, 0.02 s per step, reward 1 for every step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tfpar.rl.environments import drawing
from tfpar.rl.environments.protocol import Discrete, Environment, State, Transition, stacked

import tensorflow as tf

_GRAVITY, _CART_MASS, _POLE_MASS, _HALF_LENGTH, _FORCE, _SECONDS = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
_TOTAL_MASS, _POLE_MOMENT = _CART_MASS + _POLE_MASS, _POLE_MASS * _HALF_LENGTH
_MAX_POSITION, _MAX_ANGLE = 2.4, 12.0 * 2.0 * math.pi / 360.0  # metres, radians


def _reset(numbers: Sequence[tf.Tensor]) -> State:
    return tuple(0.1 * number - 0.05 for number in numbers)


def _step(state: State, action: tf.Tensor, _: Sequence[tf.Tensor]) -> Transition:
    position, speed, angle, rotation = state
    force = tf.cast(2 * action - 1, position.dtype) * _FORCE
    cosine, sine = tf.cos(angle), tf.sin(angle)
    push = (force + _POLE_MOMENT * rotation * rotation * sine) / _TOTAL_MASS
    inertia = _HALF_LENGTH * (4.0 / 3.0 - _POLE_MASS * cosine * cosine / _TOTAL_MASS)
    angular = (_GRAVITY * sine - cosine * push) / inertia
    acceleration = push - _POLE_MOMENT * angular * cosine / _TOTAL_MASS
    moved = (
        position + _SECONDS * speed,
        speed + _SECONDS * acceleration,
        angle + _SECONDS * rotation,
        rotation + _SECONDS * angular,
    )
    fallen = (tf.abs(moved[0]) > _MAX_POSITION) | (tf.abs(moved[2]) > _MAX_ANGLE)
    return Transition(moved, tf.ones_like(position), fallen)


CARTPOLE = Environment(
    name="CartPole-v1",
    observation_shape=(4,),
    actions=Discrete(2),
    max_steps=500,
    reset_numbers=4,
    reset=_reset,
    step=_step,
    observe=lambda state: stacked(*state),
    render=drawing.cart_and_pole,
    goal=495.0,
)

"""Acrobot: two links swing up by a torque between them (Sutton 1996; Sutton and Barto 1998, section 11.3).

The dynamics are those of Gymnasium's `Acrobot-v1`, which follows the book: one Runge-Kutta step of 0.2 s, reward -1 for
every step that does not reach the height.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tfpar.rl.environments import drawing
from tfpar.rl.environments.protocol import Discrete, Environment, State, Transition, stacked

import tensorflow as tf

_SECONDS, _GRAVITY = 0.2, 9.8
_LENGTH, _CENTRE = 1.0, 0.5  # metres; both masses are 1 kg, both moments of inertia 1 kg m²
_MAX_SPEEDS = 4.0 * math.pi, 9.0 * math.pi


def _reset(numbers: Sequence[tf.Tensor]) -> State:
    return tuple(0.2 * number - 0.1 for number in numbers)


def _derivative(state: Sequence[tf.Tensor], torque: tf.Tensor) -> list[tf.Tensor]:
    """Time derivatives of both angles and both angular speeds."""
    # In the order of Gymnasium's operations: the system is chaotic, and amplifies even the rounding of float64.
    angle1, angle2, speed1, speed2 = state
    cosine, sine = tf.cos(angle2), tf.sin(angle2)
    d1 = _CENTRE**2 + (_LENGTH**2 + _CENTRE**2 + 2.0 * _LENGTH * _CENTRE * cosine) + 1.0 + 1.0
    d2 = (_CENTRE**2 + _LENGTH * _CENTRE * cosine) + 1.0
    phi2 = _CENTRE * _GRAVITY * tf.cos(angle1 + angle2 - math.pi / 2.0)
    phi1 = (
        -_LENGTH * _CENTRE * (speed2 * speed2) * sine
        - 2.0 * _LENGTH * _CENTRE * speed2 * speed1 * sine
        + (_CENTRE + _LENGTH) * _GRAVITY * tf.cos(angle1 - math.pi / 2.0)
        + phi2
    )
    numerator = torque + d2 / d1 * phi1 - _LENGTH * _CENTRE * (speed1 * speed1) * sine - phi2
    angular2 = numerator / (_CENTRE**2 + 1.0 - d2 * d2 / d1)
    angular1 = -(d2 * angular2 + phi1) / d1
    return [speed1, speed2, angular1, angular2]


def _step(state: State, action: tf.Tensor, _: Sequence[tf.Tensor]) -> Transition:
    torque = tf.cast(action - 1, state[0].dtype)

    def moved(slopes: Sequence[tf.Tensor], seconds: float) -> list[tf.Tensor]:
        return [part + seconds * slope for part, slope in zip(state, slopes, strict=True)]

    k1 = _derivative(state, torque)
    k2 = _derivative(moved(k1, _SECONDS / 2.0), torque)
    k3 = _derivative(moved(k2, _SECONDS / 2.0), torque)
    k4 = _derivative(moved(k3, _SECONDS), torque)
    slopes = [a + 2.0 * b + 2.0 * c + d for a, b, c, d in zip(k1, k2, k3, k4, strict=True)]
    angle1, angle2, speed1, speed2 = moved(slopes, _SECONDS / 6.0)
    new = (
        _wrapped(angle1),
        _wrapped(angle2),
        tf.clip_by_value(speed1, -_MAX_SPEEDS[0], _MAX_SPEEDS[0]),
        tf.clip_by_value(speed2, -_MAX_SPEEDS[1], _MAX_SPEEDS[1]),
    )
    up = -tf.cos(new[0]) - tf.cos(new[1] + new[0]) > 1.0
    return Transition(new, tf.where(up, tf.zeros_like(angle1), -tf.ones_like(angle1)), up)


def _wrapped(angle: tf.Tensor) -> tf.Tensor:
    """Returns the same angle in the range -π to π."""
    turns = tf.math.ceil((tf.abs(angle) - math.pi) / (2.0 * math.pi))  # in one step, rarely more than one
    return angle - tf.sign(angle) * tf.maximum(turns, 0.0) * (2.0 * math.pi)


def _observe(state: State) -> tf.Tensor:
    angle1, angle2, speed1, speed2 = state
    return stacked(tf.cos(angle1), tf.sin(angle1), tf.cos(angle2), tf.sin(angle2), speed1, speed2)


ACROBOT = Environment(
    name="Acrobot-v1",
    observation_shape=(6,),
    actions=Discrete(3),
    max_steps=500,
    reset_numbers=4,
    reset=_reset,
    step=_step,
    observe=_observe,
    render=drawing.two_rods,
    goal=-80.0,
)

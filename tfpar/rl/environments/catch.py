"""Catch: a ball falls over a board of 10 x 5 pixels, and a paddle in the last row catches it (Mnih et al. 2014).

The game is that of bsuite (Osband et al. 2020): the ball falls one row per step; the reward is 1 if the paddle catches
it and -1 if not.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfpar.rl.environments.protocol import Discrete, Environment, State, Transition

import numpy as np
import tensorflow as tf

ROWS, COLUMNS = 10, 5
_PIXELS = 16  # side, in picture pixels, of a pixel of the board


def _reset(numbers: Sequence[tf.Tensor]) -> State:
    column = tf.cast(numbers[0] * COLUMNS, tf.int32)
    return tf.zeros_like(column), column, tf.fill(tf.shape(column), COLUMNS // 2)


def _step(state: State, action: tf.Tensor, _: Sequence[tf.Tensor]) -> Transition:
    row, column, paddle = state
    paddle = tf.clip_by_value(paddle + action - 1, 0, COLUMNS - 1)
    row += 1
    down = tf.equal(row, ROWS - 1)
    caught = tf.where(tf.equal(column, paddle), 1.0, -1.0)
    return Transition((row, column, paddle), tf.where(down, caught, 0.0), down)


def _observe(state: State) -> tf.Tensor:
    row, column, paddle = state
    ball, own = row * COLUMNS + column, (ROWS - 1) * COLUMNS + paddle
    pixels = tf.range(ROWS * COLUMNS)
    lit = tf.equal(pixels, ball[:, tf.newaxis]) | tf.equal(pixels, own[:, tf.newaxis])
    return tf.reshape(tf.cast(lit, tf.float32), [-1, ROWS, COLUMNS, 1])


def _render(observation: np.ndarray) -> np.ndarray:
    board = np.kron(observation[..., 0] > 0.0, np.ones([_PIXELS, _PIXELS]))
    return np.repeat((255 * board).astype(np.uint8)[..., np.newaxis], 3, axis=-1)


CATCH = Environment(
    name="Catch",
    observation_shape=(ROWS, COLUMNS, 1),
    actions=Discrete(3),
    max_steps=ROWS,
    reset_numbers=1,
    reset=_reset,
    step=_step,
    observe=_observe,
    render=_render,
    goal=1.0,
)

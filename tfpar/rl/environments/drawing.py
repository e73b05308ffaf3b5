"""Line drawings of observations: for TensorBoard, not as input of a policy."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

_SIDE = 128
_WHITE, _BLACK, _BLUE = (255, 255, 255), (40, 40, 40), (60, 100, 200)

Point = tuple[float, float]


def lines(*strokes: Sequence[Point], moving: int) -> np.ndarray:
    """Draws polylines on a white background; returns the picture, uint8 `[128, 128, 3]`.

    Args:
      *strokes: The points of each polyline; coordinates are in [-1, 1] and increase to the right and upwards.
      moving: Number of polylines, at the end of `strokes`, that are drawn bold and blue.
    """
    from PIL import Image, ImageDraw  # imported here, because few processes draw

    canvas = Image.new("RGB", (_SIDE, _SIDE), _WHITE)
    draw = ImageDraw.Draw(canvas)
    for place, stroke in enumerate(strokes):
        points = [((1.0 + x) / 2.0 * (_SIDE - 1), (1.0 - y) / 2.0 * (_SIDE - 1)) for x, y in stroke]
        bold = place >= len(strokes) - moving
        draw.line(points, fill=_BLUE if bold else _BLACK, width=5 if bold else 2, joint="curve")
    return np.asarray(canvas)


def beside(start: Point, angle: float, length: float) -> Point:
    """Returns the end of a rod from `start`, at `angle` (radians, counter-clockwise) from straight down."""
    return start[0] + length * math.sin(angle), start[1] - length * math.cos(angle)


def _box(x: float, y: float, width: float, height: float) -> list[Point]:
    """Returns a rectangle around a point; `width` and `height` are half of its sides."""
    sides = ((-1, -1), (1, -1), (1, 1), (-1, 1), (-1, -1))
    return [(x + width * right, y + height * up) for right, up in sides]


def cart_and_pole(observation: np.ndarray) -> np.ndarray:
    """Draws CartPole from its position (m, at most 2.4) and the angle of the pole (radians, clockwise from upright)."""
    x, y = float(observation[0]) / 2.4, -0.4
    cart = _box(x, y, 0.15, 0.08)
    pole = [(x, y), beside((x, y), math.pi - float(observation[2]), 0.8)]
    return lines([(-1.0, y - 0.1), (1.0, y - 0.1)], cart, pole, moving=2)


def two_rods(observation: np.ndarray) -> np.ndarray:
    """Draws Acrobot from cosine and sine of the first rod's angle and of the second's relative angle, and the goal."""
    first = math.atan2(float(observation[1]), float(observation[0]))
    second = first + math.atan2(float(observation[3]), float(observation[2]))
    elbow = beside((0.0, 0.0), first, 0.45)
    rods = [(0.0, 0.0), elbow, beside(elbow, second, 0.45)]
    return lines([(-1.0, 0.45), (1.0, 0.45)], rods, moving=1)


def car_in_valley(observation: np.ndarray) -> np.ndarray:
    """Draws MountainCar from its position, -1.2 to 0.6."""

    def on_track(x: float) -> Point:
        return (x + 0.3) / 0.9, 0.6 * math.sin(3.0 * x) - 0.2

    track = [on_track(-1.2 + 0.03 * place) for place in range(61)]
    x, y = on_track(float(observation[0]))
    goal = on_track(0.5)
    return lines(track, [goal, (goal[0], goal[1] + 0.3)], _box(x, y + 0.08, 0.08, 0.05), moving=1)


def pendulum(observation: np.ndarray) -> np.ndarray:
    """Draws Pendulum from the cosine and sine of its angle from upright, counter-clockwise."""
    angle = math.atan2(float(observation[1]), float(observation[0]))
    return lines([(0.0, 0.0), beside((0.0, 0.0), math.pi + angle, 0.8)], moving=1)

"""Patterns by which payloads of a codec move between workers: the possible values of `pattern=`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from tfpar.collectives.cost_model import Cost
from tfpar.exchange.algorithms import message_plans, point_to_point, two_phase
from tfpar.exchange.algorithms.point_to_point import PointToPoint
from tfpar.exchange.algorithms.two_phase import TwoPhase
from tfpar.exchange.buckets import Bucket


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A way to sum encoded vectors over the workers.

    Attributes:
      build: `(codec, shapes, group, seed, name, error_feedback=) -> Bucket`. Patterns of collectives also take the
        `state` of another bucket.
      cost: `(codec, elements, workers, link, speed) -> Cost`; takes `pipeline`, too, where `build` does.
      sums_all_at_once: Whether a worker adds up the payloads of all others in one operation.
      is_candidate: Whether `auto` considers it.
      penalty: Factor by which `auto` multiplies the predicted time.
      can_pipeline: Whether `build` takes `pipeline`.
    """

    build: Callable[..., Bucket]
    cost: Callable[..., Cost]
    sums_all_at_once: bool = False
    is_candidate: bool = False
    penalty: float = 1.0
    can_pipeline: bool = False


# Every hop of these waits for the previous one, with encoding and decoding in between, which the cost model ignores;
# where equal times were predicted, they took 1.35 to 1.45 times as long (4 workers, 1 Gbit/s and unshaped).
_HOP_PENALTY = 1.4


def _point_to_point(name: str, *, is_candidate: bool) -> Pattern:
    return Pattern(
        functools.partial(PointToPoint, pattern=name),
        functools.partial(point_to_point.cost, pattern=name),
        is_candidate=is_candidate,
        penalty=_HOP_PENALTY,
    )


# `two_phase`, `all_gather`, `hierarchical` use collective calls, of TensorFlow's runtime or the native transport, or
# one pipelined operation of the latter; the others use messages between two workers.
# All of them are hierarchical if a worker has several replicas, whose gradients it adds up first: `hierarchical` is
# another name for the default.
PATTERNS = {
    "two_phase": Pattern(TwoPhase, two_phase.cost, sums_all_at_once=True, is_candidate=True, can_pipeline=True),
    "all_gather": Pattern(
        functools.partial(TwoPhase, all_gather=True),
        functools.partial(two_phase.cost, all_gather=True),
        sums_all_at_once=True,
        is_candidate=True,
    ),
    "hierarchical": Pattern(TwoPhase, two_phase.cost, sums_all_at_once=True, can_pipeline=True),
    # halving_doubling equals binary_blocks for a power of two.
    **{name: _point_to_point(name, is_candidate=name != "halving_doubling") for name in message_plans.PLANS},
}

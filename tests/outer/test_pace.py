"""`--local_steps=auto`: the length of a round from what was measured, chosen once and kept."""

from __future__ import annotations

from tfpar.config import ExperimentConfig, OuterConfig
from tfpar.outer.local.pace import LONGEST, Pace

import pytest


@pytest.mark.parametrize(
    ("step", "exchange", "share", "expected"),
    [(0.1, 1.0, 0.05, 190), (0.1, 0.5, 0.5, 5), (1.0, 0.001, 0.05, 1), (1e-4, 60.0, 0.01, LONGEST)],
)
def test_rounds_are_as_long_as_the_share_asks_for(step, exchange, share, expected):
    pace = Pace()
    pace.note_steps(1, 30.0)  # compiles
    for seconds in (20.0, exchange * 3, exchange):  # the first traces
        assert not pace.complete
        pace.note_steps(10, 10 * step)
        pace.note_exchange(seconds)
    assert pace.complete
    steps = pace.local_steps(share)
    assert steps == expected
    if 1 < steps < LONGEST:
        assert exchange / (exchange + steps * step) <= share * (1 + 1e-9)
        assert exchange / (exchange + (steps - 1) * step) > share


def test_auto_is_a_word_for_a_number():
    config = ExperimentConfig.from_flat_dict({"local_steps": "auto"})
    assert config.outer == OuterConfig(local_steps="auto") == OuterConfig(**vars(config.outer))
    assert config.outer.uses_rounds
    assert ExperimentConfig.from_flat_dict(config.as_flat_dict()).outer == config.outer

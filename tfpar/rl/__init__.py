"""Reinforcement learning: environments on the device, rollouts, and algorithms that learn from them.

The names below import TensorFlow when they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfpar.rl.environments import Continuous, Discrete, Environment, Transition
    from tfpar.rl.options import complete
    from tfpar.rl.policy import build_policy
    from tfpar.rl.trainer import ReinforcementTrainer

_HOMES = {
    "Continuous": "tfpar.rl.environments",
    "Discrete": "tfpar.rl.environments",
    "Environment": "tfpar.rl.environments",
    "ReinforcementTrainer": "tfpar.rl.trainer",
    "Transition": "tfpar.rl.environments",
    "build_policy": "tfpar.rl.policy",
    "complete": "tfpar.rl.options",
}

__all__ = [
    "Continuous",
    "Discrete",
    "Environment",
    "ReinforcementTrainer",
    "Transition",
    "build_policy",
    "complete",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'tfpar.rl' has no attribute {name!r}")

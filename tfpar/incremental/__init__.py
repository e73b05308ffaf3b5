"""Incremental learning: tasks one after the other, and methods against forgetting earlier tasks.

The names below import TensorFlow when they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfpar.incremental.checks import check, watching
    from tfpar.incremental.learner import IncrementalLearner
    from tfpar.incremental.online.learner import OnlineLearner
    from tfpar.incremental.tasks import Task, split_tasks

_HOMES = {
    "IncrementalLearner": "tfpar.incremental.learner",
    "OnlineLearner": "tfpar.incremental.online.learner",
    "check": "tfpar.incremental.checks",
    "Task": "tfpar.incremental.tasks",
    "split_tasks": "tfpar.incremental.tasks",
    "watching": "tfpar.incremental.checks",
}

__all__ = ["IncrementalLearner", "OnlineLearner", "Task", "check", "split_tasks", "watching"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'tfpar.incremental' has no attribute {name!r}")

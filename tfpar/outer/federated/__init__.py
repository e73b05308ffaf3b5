"""Federated averaging: a population of clients that train independently, and a server that averages their movements.

The names below import TensorFlow when they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfpar.outer.federated.checks import DEFAULTS, check, complete
    from tfpar.outer.federated.population import Population
    from tfpar.outer.federated.trainer import FederatedTrainer

_HOMES = {
    "DEFAULTS": "tfpar.outer.federated.checks",
    "FederatedTrainer": "tfpar.outer.federated.trainer",
    "Population": "tfpar.outer.federated.population",
    "check": "tfpar.outer.federated.checks",
    "complete": "tfpar.outer.federated.checks",
}

__all__ = ["DEFAULTS", "FederatedTrainer", "Population", "check", "complete"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'tfpar.outer.federated' has no attribute {name!r}")

"""Rounds of local steps between the workers of a cluster."""

from __future__ import annotations

from tfpar.outer.local.rounds import RoundReport, Rounds

__all__ = ["RoundReport", "Rounds"]

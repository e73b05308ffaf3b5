"""Rounds of local steps between the workers of a cluster."""

from __future__ import annotations

from tfpar.outer.local.fragments import FragmentExchange, exchange_of
from tfpar.outer.local.parts import Parts
from tfpar.outer.local.rounds import RoundReport, Rounds
from tfpar.outer.local.streaming import Streaming

AnyRounds = Rounds | Streaming

__all__ = ["AnyRounds", "FragmentExchange", "Parts", "RoundReport", "Rounds", "Streaming", "exchange_of"]

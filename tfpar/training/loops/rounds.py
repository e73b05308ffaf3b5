"""Rounds of local steps in the synchronous loop: when they end, and what is reported of them."""

from __future__ import annotations

import time

from tfpar.exchange import Traffic
from tfpar.exchange.reducer import dense_traffic
from tfpar.monitor import timings
from tfpar.outer.local import RoundReport, Rounds
from tfpar.training.loops.context import RunContext
from tfpar.training.loops.joined_reports import joined_reports
from tfpar.training.loops.pacing import next_multiple
from tfpar.training.loops.state import Interval, LoopState
from tfpar.training.sidecar import Sidecar

import numpy as np

# Workers wait for each other at the end of a call from Python: rarely, on a slow link.
CALL_SECONDS = 5.0

_WAITING = [timings.COLUMNS.index(name) for name in ("exchange", "total")]


class LoopRounds:
    """Ends rounds at every multiple of their length, and at the end of the run.

    Args:
      context: What is run.
      rounds: Its rounds.
    """

    def __init__(self, context: RunContext, rounds: Rounds) -> None:
        self._context, self._rounds = context, rounds
        self._report: RoundReport | None = None
        self._concluded_at = 0
        self._began_waiting = 0.0

    def begin(self, step: int) -> int:
        """Begins a round, or goes on with it; returns where the loop must stop next."""
        self._rounds.begin()
        return next_multiple(step, self._rounds.steps)

    def join(self, own: Interval, divisors: np.ndarray, row: np.ndarray) -> tuple[Interval, np.ndarray]:
        """Counts this worker's steps, and puts the reports of all workers together; see `joined_reports`."""
        self._began_waiting = time.perf_counter()
        self._rounds.note(len(own.losses), float(np.sum(divisors[own.applied], dtype=np.float64)))
        return joined_reports(own, divisors, row, self._context.agreement)

    def end_if_due(self, state: LoopState, durations: np.ndarray) -> None:
        """Ends the round after a call, if it is due; what workers have waited counts as exchange of the last step."""
        if state.step % self._rounds.steps == 0 or state.finished:
            self._end(state)
        durations[-1, _WAITING] += time.perf_counter() - self._began_waiting

    def conclude(self, state: LoopState) -> LoopState:
        """Ends the last round of a run that a hook has stopped; of one that is to be resumed, shows the outer weights.

        Returns:
          The state; another one if weights have changed, which must then be evaluated and saved again.
        """
        self._concluded_at = state.step
        if not self._rounds.under_way:
            return state
        if not state.finished:
            self._rounds.show_outer()
            return state
        self._end(state)
        return state.replace(evaluated_at=-1, best_step=-1)

    def scalars(self) -> dict[str, float]:
        """What the monitor records of the last round; nothing before the first."""
        if self._report is None:
            return {}
        return {
            "worker_drift": self._report.drift,
            "outer_movement": self._report.movement,
            "outer_update": self._report.update,
            "round_bytes": float(self._report.wire_bytes),
        }

    @property
    def traffic(self) -> Traffic:
        """Bytes of a step in the mean: as planned, and once the run has ended as it was."""
        program = self._context.program
        sidecar = Sidecar.of_core(program.core, program.topology.replicas)
        elements = sum(variable.value.shape.num_elements() for variable in program.model.trainable_variables)
        dense = dense_traffic(elements, program.topology.replicas, sidecar.length)
        if not self._concluded_at:
            return self._rounds.traffic(dense)
        return self._rounds.traffic(dense, self._rounds.done, self._concluded_at)

    def _end(self, state: LoopState) -> None:
        self._report = self._rounds.end(self._context.agreement, state.step) or self._report

"""Rounds of local steps in the synchronous loop: when they end, and what is reported about them."""

from __future__ import annotations

import contextlib
import time

from tfpar.collectives.agreement import WorkerAgreement
from tfpar.exchange import Traffic
from tfpar.exchange.reducer import dense_traffic
from tfpar.monitor import timings
from tfpar.outer.local import AnyRounds, RoundReport, Rounds
from tfpar.outer.local.pace import Pace
from tfpar.training.loops import timed_rounds
from tfpar.training.loops.context import RunContext
from tfpar.training.loops.joined_reports import joined_reports
from tfpar.training.loops.state import Interval, LoopState
from tfpar.training.loops.timed_rounds import OwnSteps
from tfpar.training.sidecar import Sidecar

import numpy as np

# The length of a call from Python. Workers wait for each other at its end, which should be rare on a slow link.
CALL_SECONDS = 5.0

# The charts of each fragment.
_CHARTS = ("worker_drift", "movement_norm", "update_norm", "wire_bytes")

_WAITING = [timings.COLUMNS.index(name) for name in ("exchange", "total")]


class LoopRounds:
    """Lets workers exchange at the steps at which rounds ask for it, and at the end of the run.

    Args:
      context: The run.
      rounds: Its rounds.
    """

    def __init__(self, context: RunContext, rounds: AnyRounds) -> None:
        self._context, self._rounds = context, rounds
        self._reports: dict[int, RoundReport] = {}  # the last report of each fragment
        self._concluded_at = 0
        self._began_waiting = 0.0
        self._rates: np.ndarray | None = None  # with `seconds`, steps per second of each worker in the last round

    def begin(self, step: int) -> int:
        """Begins a round, or continues it; returns where the loop must stop next."""
        self._rounds.begin()
        return self._rounds.next_stop(step)

    @property
    def seconds(self) -> float:
        """Duration of a round in which each worker takes as many steps as it can; 0 if rounds have a number of
        steps."""
        return self._rounds.seconds

    @property
    def is_first(self) -> bool:
        """With `seconds`: whether no round has ended since the start."""
        return self._rates is None

    def limits(self, steps: int) -> tuple[float, int]:
        """With `seconds`: the duration and the most steps of this worker's part of the next round.

        Workers of different speeds would not reach a stop within a round at the same time with the same number of
        steps: the fast ones would wait. The first round after a start has no other limit, as speeds are not known.

        Args:
          steps: Steps of the run until the next stop.
        """
        if self._rates is None:
            return self.seconds, steps
        most, expected = timed_rounds.limits(steps, self._rates)
        return min(self.seconds, expected), int(most[self._rounds.worker])

    def position(self, step: int) -> int:
        """The number of this worker's next step. With `seconds`, each worker goes through its own part of the order."""
        if not self.seconds:
            return step
        assert isinstance(self._rounds, Rounds)
        if self._rounds.taken is None:
            self._rounds.taken = np.full(self._rounds.workers, step, np.int64)
        return int(self._rounds.taken[self._rounds.worker])

    def join_timed(
        self, own: OwnSteps, step: int, row: np.ndarray, agreement: WorkerAgreement
    ) -> tuple[Interval, np.ndarray]:
        """`join` for workers that have taken different numbers of steps; the first number of `row` is their time in
        seconds.

        The run's step counts examples: it is the number of steps that all workers together have taken, divided by the
        number of workers.
        """
        self._began_waiting = time.perf_counter()
        rounds = self._rounds
        assert isinstance(rounds, Rounds)
        before = rounds.taken if rounds.taken is not None else np.full(rounds.workers, step, np.int64)

        def steps_of(taken: np.ndarray) -> int:
            rounds.taken = before + taken
            return int(rounds.taken.sum()) // rounds.workers - step

        joined, rows, weights = timed_rounds.joined_steps(own, row, steps_of, agreement)
        assert rounds.taken is not None
        self._rates = (rounds.taken - before) / np.maximum(rows[:, 0], 1e-9)
        rounds.note(len(joined.losses), weights)
        return joined, rows

    def join(
        self, own: Interval, loss_counts: np.ndarray, row: np.ndarray, agreement: WorkerAgreement
    ) -> tuple[Interval, np.ndarray]:
        """Counts this worker's steps, and joins the reports of all workers; see `joined_reports`."""
        self._began_waiting = time.perf_counter()
        joined, rows, weights = joined_reports(own, loss_counts, row, agreement, self._rounds.parts.workers)
        self._rounds.note(len(own.losses), weights)
        if self._rounds.pace:
            self._rounds.pace.note_steps(len(own.losses), float(rows[:, 0].mean()))
        return joined, rows

    def end_if_due(self, state: LoopState, durations: np.ndarray) -> None:
        """Exchanges after a call, if an exchange is due; waiting for it counts as exchange time of the last step."""
        began = time.perf_counter()
        self._note(reports := self._rounds.after_steps(self._context.agreement, state.step, finished=state.finished))
        if reports and isinstance(self._rounds, Rounds) and self._rounds.pace:
            self._measure(self._rounds, self._rounds.pace, time.perf_counter() - began)
        durations[-1, _WAITING] += time.perf_counter() - self._began_waiting

    def showing_outer(self) -> contextlib.AbstractContextManager[None]:
        """While this is open, the model has the outer weights, also in the middle of a round."""
        return self._rounds.sets.showing_outer() if self._rounds.under_way else contextlib.nullcontext()

    def conclude(self, state: LoopState) -> LoopState:
        """Ends the last round of a run that a hook has stopped; shows the outer weights if the run is to be resumed.

        Returns:
          The state; another one if weights have changed, because they must then be evaluated and saved again.
        """
        self._concluded_at = state.step
        if not self._rounds.under_way:
            return state
        if not state.finished:
            self._rounds.sets.show_outer()
            return state
        self._note(self._rounds.finish(self._context.agreement, state.step))
        return state.replace(evaluated_at=-1, best_step=-1)

    def scalars(self) -> dict[str, float]:
        """The values that the monitor records for the last round; empty before the first."""
        reports = self._reports
        if not reports:
            return {}
        squares = np.sum([np.square([one.drift, one.movement, one.update]) for one in reports.values()], axis=0)
        names = ("worker_drift", "outer_movement", "outer_update")
        scalars = dict(zip(names, np.sqrt(squares).tolist(), strict=True))
        scalars["round_bytes"] = float(sum(one.wire_bytes for one in reports.values()))
        if self._rounds.fragments > 1:
            for number, one in sorted(reports.items()):
                values = (one.drift, one.movement, one.update, float(one.wire_bytes))
                scalars |= {f"rounds_by_fragment/{number}/{name}": x for name, x in zip(_CHARTS, values, strict=True)}
        return scalars

    @property
    def traffic(self) -> Traffic:
        """Mean bytes of a step: as planned or, once the run has ended, as they were."""
        program = self._context.program
        sidecar = Sidecar.of_core(program.core, program.topology.replicas)
        elements = sum(variable.value.shape.num_elements() for variable in program.model.trainable_variables)
        dense = dense_traffic(elements, program.topology.replicas, sidecar.length)
        if not self._concluded_at:
            return self._rounds.traffic(dense)
        return self._rounds.traffic(dense, self._concluded_at)

    def _measure(self, rounds: Rounds, pace: Pace, seconds: float) -> None:
        """Records the time of an exchange; once enough is known, all workers choose the same length of rounds."""
        pace.note_exchange(max(self._context.agreement.gather(seconds)))
        if pace.complete:
            share, step = self._context.program.config.outer.outer_time_share, pace.step_seconds / pace.steps
            text = f"{1e3 * pace.exchange_seconds:.1f} ms an exchange, {1e3 * step:.1f} ms a step"
            self._context.monitor.message(
                f"--local_steps=auto: {text}; with rounds of {rounds.choose()} local steps, exchanges take at most "
                f"{share:.0%} of the time"
            )

    def _note(self, reports: list[RoundReport]) -> None:
        self._reports |= {report.fragment: report for report in reports}

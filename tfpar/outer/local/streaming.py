"""Local steps with an exchange in fragments while steps run (Streaming DiLoCo, Douillard et al. 2025).

The model is divided into P fragments. Each fragment is exchanged every H steps, so an exchange starts every H/P steps:
the movement of worker k, `d_k = outer - inner_k`, is read at that step, and sent while the worker continues training.
The mean is applied `delay` steps later, at the same step on every worker, no matter when it has arrived: the outer
optimizer computes new outer weights from it, and worker k continues from `a * inner_k + (1 - a) * outer` (algorithm 2,
line 15), which keeps a part of its steps since then. Results do not depend on the duration of the exchange.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tfpar.collectives.agreement import WorkerAgreement
from tfpar.config import OuterConfig
from tfpar.exchange import Traffic
from tfpar.outer import optimizers
from tfpar.outer.local.fragments import FragmentExchange
from tfpar.outer.local.lost import LostWorkers
from tfpar.outer.local.parts import WHOLE, Parts, Tensors, by_program, joined
from tfpar.outer.local.programs import FragmentPrograms, Summed
from tfpar.outer.local.rounds import STEP_BYTES, RoundReport
from tfpar.outer.local.weights import TwoSets

import keras
import numpy as np
import tensorflow as tf


@dataclasses.dataclass(frozen=True, eq=False)
class _RunningExchange:
    """A fragment between the start of its exchange and its application.

    Attributes:
      due: The step at which it is applied.
      result: The mean movement of each weight and, in the last fragment, each state, by program; and the vector of the
        other sums.
    """

    due: int
    result: concurrent.futures.Future[Summed]


class Streaming:
    """The outer weights of a run, and the fragments that are being exchanged. Every worker has one such object.

    Args:
      options: The length of a round, the number of fragments, the delay, and the outer optimizer.
      weights: See `Rounds`.
      state: See `Rounds`; it is exchanged with the last fragment.
      kept: See `Rounds`.
      inner: See `Rounds`.
      exchange: The exchange that is built for the weights.
      strategy: See `Rounds`.
      worker: See `Rounds`.
      workers: See `Rounds`.
      parts: See `Rounds`.

    Attributes:
      fragments: Number of fragments, P.
      steps: Steps between two exchanges of a fragment, H.
      pending: Steps since all workers had the outer weights.
      done: Rounds done: the number of times that the last fragment was applied.
      state_count: The number of state variables, the last ones of `model_variables`.
      applied: The number of times that each fragment was applied.
    """

    def __init__(
        self,
        options: OuterConfig,
        weights: Sequence[keras.Variable],
        state: Sequence[keras.Variable],
        kept: Sequence[keras.Variable],
        *,
        inner: keras.optimizers.Optimizer,
        exchange: FragmentExchange,
        strategy: tf.distribute.Strategy,
        worker: int,
        workers: int,
        parts: Parts = WHOLE,
    ) -> None:
        self.steps, self.pending = options.local_steps, 0
        self.pace, self.seconds = None, 0.0  # --local_steps=auto and --round_seconds are refused
        self.worker, self.workers, self.parts = worker, workers, parts
        self.inner, self.kept = inner, list(kept)
        self._options, self._exchange = options, exchange
        self.state_count = len(state)
        self.sets = TwoSets(weights, state, strategy, parts)
        self.model_variables = self.sets.model
        self.fragments = len(exchange.fragments)
        self._last = self.fragments - 1
        states = tuple(range(len(weights), len(weights) + len(state)))
        self._places = [
            (*places, *(states if part == self._last else ())) for part, places in enumerate(exchange.fragments)
        ]
        self._programs = []
        for part, places in enumerate(exchange.fragments):
            with parts.scope(strategy):
                optimizer = optimizers.build(options, [weights[place] for place in places], f"outer_{part}")
            self._programs.append(
                FragmentPrograms(
                    self.sets,
                    self._places[part],
                    len(places),
                    optimizer=optimizer,
                    learning_rate=options.learning_rate,
                    exchange=exchange.parts[part],
                    strategy=strategy,
                    worker=worker,
                    workers=workers,
                    parts=parts,
                )
            )
        self._offsets = [round((part + 1) * self.steps / self.fragments) for part in range(self.fragments)]
        self.applied = [0] * self.fragments
        self._running: dict[int, _RunningExchange] = {}
        self._counts = np.zeros([self.fragments, workers])
        self._lost = LostWorkers(reports=worker == parts.part == 0)

    def retrace(self) -> None:
        """Traces the exchanges again the next time, because they have changed."""
        for programs in self._programs:
            programs.retrace()

    @property
    def outer_state(self) -> list[keras.Variable]:
        """Variables of the outer optimizers, the same on every worker."""
        return [variable for programs in self._programs for variable in programs.optimizer.variables]

    @property
    def weight(self) -> float:
        """This worker's loss count since the exchange of the least recently exchanged fragment, see `note`."""
        return float(self._counts[:, self.worker].max())

    @property
    def done(self) -> int:
        """Rounds done."""
        return self.applied[self._last]

    @property
    def under_way(self) -> bool:
        """Whether workers have different weights."""
        return self.pending > 0

    def start(self) -> None:
        """Begins with the weights that the model has now, the same on every worker."""
        for exchange in self._running.values():
            exchange.result.result()
        self._running.clear()
        self._counts[:] = 0.0
        self.applied = [0] * self.fragments
        self.pending, self.sets.shown = 0, False
        self._lost.reset()
        self.begin()

    def begin(self) -> None:
        """See `Rounds.begin`."""
        if not self.under_way:
            self.sets.keep()

    def next_stop(self, step: int) -> int:
        """Returns the next step at which the exchange of a fragment starts or is applied."""
        leaving = [step + (offset - step - 1) % self.steps + 1 for offset in self._offsets]
        return min([*leaving, *(exchange.due for exchange in self._running.values() if exchange.due > step)])

    def note(self, steps: int, weights: np.ndarray) -> None:
        """Counts local steps.

        Args:
          steps: Number of steps, the same on every worker.
          weights: Float64 `[workers]`: the loss count of each worker, i.e. the number of examples or positions over
            which its losses were averaged in the steps that it has applied.
        """
        self.pending += steps
        self._counts += weights

    def after_steps(self, agreement: WorkerAgreement, step: int, *, finished: bool) -> list[RoundReport]:
        """Applies the fragments that are due at a step, then starts the exchanges that are due.

        Args:
          agreement: The agreement between the workers.
          step: Steps done.
          finished: Whether the run ends here.

        Returns:
          The reports of the fragments that were applied.

        Raises:
          TrainingError: A worker contributed nothing three times in a row.
        """
        self.sets.show_inner()
        due = sorted(part for part, exchange in self._running.items() if exchange.due <= step)
        reports = [self._finish_exchange(part, step) for part in due]
        if finished:
            return [report for report in reports if report] + self.finish(agreement, step)
        for part, offset in enumerate(self._offsets):
            if step % self.steps == offset % self.steps:
                if part in self._running:  # H has become smaller since its exchange started
                    reports.append(self._finish_exchange(part, step))
                self._start_exchange(part, step + self._options.delay)
                if self._options.delay == 0:
                    reports.append(self._finish_exchange(part, step))
        return [report for report in reports if report]

    def finish(self, agreement: WorkerAgreement, step: int) -> list[RoundReport]:
        """Ends the run: applies running exchanges, then the movements since; all workers then have the same weights.

        Args:
          agreement: The agreement between the workers.
          step: Steps done.

        Raises:
          TrainingError: A worker contributed nothing three times in a row.
        """
        del agreement
        self.sets.show_inner()
        reports = [self._finish_exchange(part, step) for part in sorted(self._running)]
        for part in range(self.fragments):
            if self._counts[part].any():
                self._start_exchange(part, step)
                reports.append(self._finish_exchange(part, step, own_share=0.0))
        self.sets.take_back()
        self.pending = 0
        return [report for report in reports if report]

    def traffic_of(self, part: int) -> Traffic:
        """Returns the bytes of the exchange of one fragment."""
        return self._exchange.parts[part].traffic(self.workers, self._programs[part].sidecar_length)

    def traffic(self, dense: Traffic, steps: int = 0) -> Traffic:
        """Returns the bytes of a step, averaged over rounds.

        Args:
          dense: The traffic of a step that exchanges gradients.
          steps: Steps done; 0 stands for the steps of a whole round.
        """
        if self.workers == 1:
            return dense
        every = [self.traffic_of(part) for part in range(self.fragments)]
        times = [count / steps if steps else 1.0 / self.steps for count in self.applied]
        payload = sum(one.payload_bytes * time for one, time in zip(every, times, strict=True))
        sent = sum(one.wire_bytes * time for one, time in zip(every, times, strict=True))
        sent += STEP_BYTES * (self.workers * self.parts.workers - 1)
        largest = max(every, key=lambda one: one.dense_bytes)  # a small fragment may have nothing to encode
        return Traffic(largest.codec, largest.pattern, round(payload), round(sent), dense.dense_bytes)

    def apply(self, movement: Sequence[np.ndarray], state: Sequence[np.ndarray]) -> None:
        """See `Rounds.apply`."""
        changes = [old - new for old, new in zip(self.sets.outer_values()[len(movement) :], state, strict=True)]
        for part, places in enumerate(self._places):
            values = [movement[place] if place < len(movement) else changes[place - len(movement)] for place in places]
            self._programs[part].apply(self._by_program(part, values), 0.0)
        self.pending = 0

    def inner_values(self) -> list[np.ndarray]:
        """See `Rounds.inner_values`."""
        return self.sets.inner_values()

    def resume_inner(self, values: Sequence[np.ndarray], pending: int, weight: float) -> None:
        """See `Rounds.resume_inner`."""
        del weight
        for variable, value in zip(self.model_variables, values, strict=True):
            self.assign_here(variable, value)
        self.pending = pending

    def assign_here(self, variable: keras.Variable, value: Any) -> None:
        """Assigns to this worker's copies of a variable."""
        self.sets.assign_here(variable, value)

    # Additional arrays of checkpoints; see `saved.py`.

    def export(self) -> dict[str, np.ndarray]:
        """Waits for running exchanges; returns their results and the counts."""
        arrays = {"counts": self._counts.copy(), "applied": np.array(self.applied, np.int64)}
        for part, exchange in self._running.items():
            arrays[f"flight/{part}/due"] = np.array(exchange.due, np.int64)
            values, vector = exchange.result.result()
            pairs = zip(self._programs[part].model, values, strict=True)
            exported = [*(joined(*pair) for pair in pairs), vector.numpy()]
            arrays |= {f"flight/{part}/{number}": value for number, value in enumerate(exported)}
        return arrays

    def restore(self, arrays: Mapping[str, np.ndarray], *, same_workers: bool) -> set[int]:
        """Restores what `export` returned.

        Args:
          arrays: The arrays of this worker, or of another one if the number of workers has changed.
          same_workers: Whether the number of workers is the same. If not, the results of exchanges are applied to the
            outer weights at once.

        Returns:
          The indices of the weights and states that were applied.
        """
        self.applied = arrays["applied"].tolist()
        if same_workers:
            self._counts = np.array(arrays["counts"], np.float64)
        landed: set[int] = set()
        for part in range(self.fragments):
            if f"flight/{part}/due" not in arrays:
                continue
            count = len(self._places[part])
            *values, vector = (arrays[f"flight/{part}/{number}"] for number in range(count + 1))
            future: concurrent.futures.Future[Summed] = concurrent.futures.Future()
            future.set_result((self._by_program(part, values), tf.constant(vector)))
            self._running[part] = _RunningExchange(int(arrays[f"flight/{part}/due"]), future)
            if not same_workers:
                self._apply_sums(part, *self._running.pop(part).result.result(), own_share=0.0)
                landed |= set(self._places[part])
        return landed

    def _by_program(self, part: int, values: Sequence[np.ndarray]) -> list[Tensors]:
        """Values of a fragment by program, from values here."""
        pairs = zip(self._programs[part].model, values, strict=True)
        return [by_program(*pair, self.parts.programs) for pair in pairs]

    @property
    def own_share(self) -> float:
        """The share of a worker's own weights in the weights from which it continues."""
        return self._options.own_share

    # The exchange of a fragment.

    def _start_exchange(self, part: int, due: int) -> None:
        """Reads the movement of this worker, and starts its exchange."""
        programs = self._programs[part]
        row = np.array([float(math.isfinite(self.sets.moved())), programs.squared_movement()])
        own = self.parts.of_replica(row)
        finite, squared = bool(own[:, 0].all()), float(own[:, 1].sum())
        total = float(self._counts[part].sum())
        share = self._counts[part, self.worker] / total if total else 1.0 / self.workers
        given = programs.read(share, squared, gives=finite)
        self._counts[part] = 0.0
        if not finite:
            self.sets.take_back()
            self.sets.mend(self.inner.variables)
        self._running[part] = _RunningExchange(due, self._exchange.start(programs.sums(given)))

    def _finish_exchange(self, part: int, step: int, own_share: float | None = None) -> RoundReport | None:
        """Waits for the exchange of a fragment and applies it; None if no worker contributed."""
        values, vector = self._running.pop(part).result.result()
        total, spread, *flags = vector.numpy().tolist()
        lost = [not round(flag) for flag in flags for _ in range(self.parts.workers)]
        self._lost.note(np.flatnonzero(lost).tolist(), step, "exchange")
        squares = self._apply_sums(part, values, vector, self.own_share if own_share is None else own_share)
        if squares is None:
            return None
        movement, update = np.sqrt(self.parts.of_replica(squares).sum(axis=0)).tolist()
        if not (self._running or self._counts.any() or self.own_share):
            self.pending = 0
        drift = max(spread / total - movement**2, 0.0) ** 0.5
        return RoundReport(drift, movement, update, self.traffic_of(part).wire_bytes, part)

    def _apply_sums(self, part: int, values: list[Tensors], vector: tf.Tensor, own_share: float) -> np.ndarray | None:
        """Applies the result of an exchange; returns squared norms, see `FragmentPrograms.apply`."""
        if float(vector[0]) == 0.0:
            return None
        self.applied[part] += 1
        return self._programs[part].apply(values, own_share)

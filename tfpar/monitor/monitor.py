"""The output of a run: the terminal, TensorBoard, the profiler, and the figures of summary.json."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tfpar.config import ExperimentConfig
from tfpar.monitor import options_record, tags
from tfpar.monitor.epoch_lines import EpochLines
from tfpar.monitor.histograms import WeightHistograms, Weights
from tfpar.monitor.live_line import LiveLine
from tfpar.monitor.metrics_table import MetricsTable
from tfpar.monitor.profiling import ProfileWindow, needs_viewer
from tfpar.monitor.progress import Progress
from tfpar.monitor.tensorboard import EventFiles
from tfpar.monitor.timings import MetricSums, RecentSteps, Timings, Utilisation, Window
from tfpar.process import logs

import numpy as np

_POINT_SECONDS = 2.0
# Without --log_every: points of a run, and the fewest steps between two.
_POINTS, _FEWEST_STEPS = 60, 10
_log = logging.getLogger(__name__)


class Monitor:
    """Follows a run. Every process has one; only the chief's logs and writes.

    Step numbers count finished steps: `on_steps` with `last_step=10` reports steps up to the tenth.

    Args:
      workdir: The run's directory; TensorBoard's files go to `train/` and `eval/` in it, and the points also to
        `metrics.csv`. None: the terminal only.
      is_chief: Whether this process logs and writes.
      config: The experiment: options to record, `log_every`, `profile_steps`, `histogram_every`.
      total_steps: Steps in the whole run.
      flops_per_example: Floating-point operations that training on one example takes, forward and backward.
      peak_flops: Operations per second that one replica could do at best; 0 or None: no MFU is given.
      replicas: Replicas in the whole run.
      worker: This worker's rank.
      workers: Workers in the whole run.
      metric_results: Gives metrics by name from the sums that `on_steps` takes.
      line: The values in the progress line; by default loss, first metric, speed and waiting for input.
      progress: The terminal; by default a `Progress` on standard output.

    Attributes:
      cadence: Steps between two points. There are others, some time after the last, if `timed_points`.
    """

    def __init__(
        self,
        workdir: str | None,
        *,
        is_chief: bool,
        config: ExperimentConfig,
        total_steps: int,
        flops_per_example: float | None = None,
        peak_flops: float | None = None,
        replicas: int = 1,
        worker: int = 0,
        workers: int = 1,
        metric_results: Callable[[Sequence[np.ndarray]], Mapping[str, Any]] = lambda sums: {},
        line: LiveLine | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._total_steps = total_steps
        self._global_batch_size = config.input.global_batch_size
        self._utilisation = Utilisation(flops_per_example or 0.0, (peak_flops or 0.0) * replicas)
        self._timings = Timings()
        # Where the user sets the length of a call or of a round, it is not cut for points.
        self.timed_points = not config.monitor.log_every
        is_set = config.train.steps_per_loop or config.outer.round_seconds
        self._cuts_calls = self.timed_points and not is_set
        self.cadence = config.monitor.log_every or max(_FEWEST_STEPS, total_steps // _POINTS)
        profiles = config.monitor.profiles(worker)
        self._profile = ProfileWindow(config.monitor.profile_window(), worker=worker, profiles=profiles)
        self._histograms = WeightHistograms(config.monitor.histogram_every)
        verbose = config.monitor.verbose if is_chief else 0
        self._lowest_level = logging.INFO if verbose else logs.NOTE
        self._is_chief, self._workdir = is_chief, workdir
        self._progress = (progress or Progress(total_steps)) if verbose == 1 else None
        self._epochs = EpochLines(total_steps, self.message) if verbose == 2 else None
        self._recent, self._live_line = RecentSteps(), line or LiveLine()
        self._point = Window()
        self._metric_results = metric_results
        self._point_sums = MetricSums()
        self._last_point: float | None = None
        self._counts_seen: set[str] = set()
        self._scales_loss = config.precision.precision == "mixed_float16"
        self._options = config.as_flat_dict()
        self._events: EventFiles | None = None
        self._table: MetricsTable | None = None
        self._unwritten: list[str] = []
        if is_chief and workdir:
            self._events = EventFiles(workdir, self._options, workers=workers)
            self._table = MetricsTable(workdir)

    def begin(self, step: int) -> None:
        """Call once it is known that there is something to train, before anything is recorded.

        Writes `config.yaml`. Removes the points of an earlier start that come after `step` from `metrics.csv`, and has
        TensorBoard leave them out.

        Args:
          step: Finished steps, of which this start knows.
        """
        if self._events is None or self._table is None or self._workdir is None:
            return
        self._events.begin(step, options_record.trial_of(self._workdir) if step else "")
        self._unwritten += options_record.write_config(self._workdir, self._events.trial, self._options)
        self._table.begin(step)

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Surrounds the training: however it ends, the profiler is stopped and everything is on disk."""
        try:
            yield
        except BaseException:
            if self._events:
                self._events.end_session(success=False)
            raise
        finally:
            self.close()

    @property
    def failures(self) -> list[str]:
        """What could not be written, and why."""
        written = [each.failures for each in (self._events, self._table) if each]
        return [*self._unwritten, *(line for lines in written for line in lines)]

    @property
    def records(self) -> bool:
        """Whether this process writes TensorBoard's files."""
        return self._events is not None

    def message(self, text: str, level: int = logging.INFO) -> None:
        """Logs lines in the chief's process, and nothing in others."""
        if self._is_chief and level >= self._lowest_level:
            _log.log(level, "%s", text)

    def next_boundary(self, step: int) -> int:
        """Where the next call from Python must end at the latest, so that profile, histograms and points are exact.

        The same in every process, because all processes must make the same calls.

        Args:
          step: Finished steps.

        Returns:
          A number of finished steps above `step`.
        """
        end = max(self._total_steps, step + 1)
        if self._cuts_calls:
            end = min(end, (step // self.cadence + 1) * self.cadence)
        return self._histograms.next_boundary(step, self._profile.next_boundary(step, end))

    def before_step(self, step: int, weights: Weights = dict) -> None:
        """Call before each call that trains, with the finished steps; starts the profiler when its window begins.

        Args:
          step: Finished steps.
          weights: Returns the trainable weights by name; called if histograms of the next step are due.
        """
        if self._profile.begins(step):
            if self._workdir is None:
                _log.warning("--profile_steps needs a --workdir to write to; nothing is profiled")
                self._profile.give_up()
            else:
                self._profile.start(self._events.directory if self._events else self._workdir, step)
        if self._events:
            self._histograms.before_step(step, weights)

    def marked_step(self, step: int) -> contextlib.AbstractContextManager[object]:
        """Surrounds a call that trains, after `step` finished steps, so that a profile knows its number."""
        return self._profile.step(step + 1)

    def after_step(self, step: int, weights: Weights = dict) -> None:
        """Call after each call that trains, with the finished steps; stops the profiler when its window is over.

        Args:
          step: Finished steps.
          weights: As for `before_step`.
        """
        if self._profile.finished(step):
            self._stop_profile()
        if self._events and (values := self._histograms.after_step(step, weights)):
            self._events.histograms(step, values)

    def on_steps(
        self,
        last_step: int,
        losses: np.ndarray,
        durations: np.ndarray,
        scalars: Mapping[str, float],
        *,
        examples: np.ndarray | None = None,
        metric_sums: Sequence[np.ndarray] = (),
        worker_seconds: Sequence[float] = (),
    ) -> None:
        """Records the steps of one call.

        Args:
          last_step: Finished steps after the call.
          losses: [n] mean loss of each step.
          durations: [n, 6] seconds of each step, see `timings.COLUMNS`.
          scalars: Values at the last step: `learning_rate`, `loss_scale`, `skipped_steps`, `skipped_examples`, those of
            the exchange, and `gradient_norm`, `parameter_norm`, `update_norm`, with which there is a point if there
            are `timed_points`; any other name is a metric.
          examples: [n] examples of each step; by default the global batch size.
          metric_sums: States of the metrics, summed over the steps. A line shows their values over the last steps, a
            point those since the last point, as for the loss.
          worker_seconds: Seconds that each worker needed for these steps without the exchange, in the order of their
            ranks.
        """
        losses = np.asarray(losses, np.float64)
        durations = np.asarray(durations, np.float64)
        counts = np.full(len(losses), float(self._global_batch_size)) if examples is None else np.asarray(examples)
        self._timings.add(durations, counts)
        if self._epochs:
            self._epochs.flush()
        if self._progress:
            self._recent.add(losses, durations, counts, metric_sums)
            if self._progress.due() or last_step >= self._total_steps:
                self._progress.update(last_step, self._line(scalars))
        if self._events:
            self._point_sums.add(metric_sums)
            self._point.add_workers(worker_seconds, len(losses))
            self._write_points(last_step, losses, durations, counts, scalars)

    def on_epoch(self, number: int, last_step: int, values: Mapping[str, Any]) -> None:
        """Prints a line about an epoch, under `--verbose=2`.

        Args:
          number: Of the epoch, from 0.
          last_step: Finished steps after it.
          values: Loss and metrics by name.
        """
        if self._epochs:
            self._epochs.on_epoch(number, last_step, tags.by_element(values))

    def on_evaluation(self, step: int, results: Mapping[str, Any]) -> None:
        """Records an evaluation.

        Args:
          step: Finished steps.
          results: `loss`, metrics by name, and `examples`, their number.
        """
        shown = tags.by_element({name: value for name, value in results.items() if name != "examples"})
        if self._events and shown:
            loss = {name: value for name, value in shown.items() if name == "loss"}
            self._scalars("eval", step, loss | tags.of_metrics(shown))
            self._events.flush()
        values = "  ".join(f"{name} {value:.4f}" for name, value in shown.items())
        count = f"  ({results['examples']:.0f} examples)" if "examples" in results else ""
        line = f"evaluation at step {step}  {values}{count}"
        if self._epochs:
            self._epochs.on_evaluation(step, line)
        else:
            if self._progress:
                self._progress.refresh(step)
            self.message(line)

    def text(self, tag: str, text: str, *, step: int = 0) -> None:
        """Records text, shown as it is, in TensorBoard."""
        if self._events:
            self._events.text(tag, text, step)

    def histograms(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        """Records the distributions of arrays, by tag."""
        if self._events:
            self._events.histograms(step, values)

    def table(self, tag: str, values: Mapping[str, Any], *, step: int = 0) -> None:
        """Records facts that do not change from step to step, as a text table in TensorBoard."""
        if self._events:
            self._events.markdown(tag, options_record.table(values), step)

    def sample_text(self, tag: str, text: str, *, step: int = 0) -> None:
        """Records text read from the data or written by a language model, under `samples/`."""
        self.text(f"samples/{tag}", text, step=step)

    def images(self, tag: str, batch: Any, *, step: int = 0, run: str = "train") -> None:
        """Records images [n, height, width, 1, 3 or 4]; see `EventFiles.images`."""
        if self._events:
            self._events.images(tag, batch, step, run=run)

    def statistics(self) -> dict[str, float | None]:
        """The run's speed without its first, compiling call: the figures for summary.json.

        Returns:
          `examples_per_second`, `step_ms_p50`, `step_ms_p95`, `input_wait_fraction`, `mfu` (None if the peak or
          the FLOPs of a step are not known), and `env_steps_per_second` of reinforcement learning; None if there was
          no other call. In every process, not only the chief's.
        """
        figures = self._timings.statistics()
        rate = figures["examples_per_second"]
        if rate is None:
            return {**figures, "mfu": None, **dict.fromkeys(self._live_line.pace(0.0))}
        return {**figures, "mfu": self._utilisation.at(rate), **self._live_line.pace(rate)}

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Records how the run ended, beside its hyperparameters.

        Args:
          summary: The contents of summary.json; `train_loss`, `examples_per_second` and `mfu` are recorded.
        """
        if self._progress:
            self._progress.close()
        if self._epochs:
            self._epochs.flush()
        if self._events:
            final = {tag: summary[name] for name, tag in tags.FINAL.items() if summary.get(name) is not None}
            if final:
                self._events.scalars("eval", int(summary.get("steps", self._total_steps)), final)
            self._events.end_session(success=True)
            self._events.flush()

    def close(self) -> None:
        """Stops the profiler, ends the progress line and closes the files."""
        self._stop_profile()
        if self._progress:
            self._progress.close()
        if self._events:
            self._events.close()

    def _line(self, scalars: Mapping[str, float]) -> dict[str, str]:
        shown, sums = self._recent.window()
        metrics = {name: value for name, value in scalars.items() if tags.tag(name) == f"metrics/{name}"}
        return self._live_line.values(shown, {**metrics, **tags.by_element(self._metric_results(sums))})

    def _write_points(
        self,
        last_step: int,
        losses: np.ndarray,
        durations: np.ndarray,
        examples: np.ndarray,
        scalars: Mapping[str, float],
    ) -> None:
        """Adds steps to the window, and closes it where a point is due."""
        first = last_step - len(losses)
        ends = [end - first for end in self._point_steps(first, last_step, "update_norm" in scalars)]
        results = self._metric_results(self._point_sums.take()) if ends else {}
        at_last, begin = self._tagged(scalars) | tags.of_metrics(results), 0
        for end in ends:
            self._point.add(losses[begin:end], durations[begin:end], examples[begin:end])
            values = self._point_values()
            if end == ends[-1] == len(losses):
                values |= at_last
                at_last = {}
            self._scalars("train", first + end, values)
            self._point.clear()
            begin = end
        self._point.add(losses[begin:], durations[begin:], examples[begin:])
        if ends and at_last:
            self._scalars("train", last_step, at_last)

    def _point_steps(self, first: int, last: int, has_norms: bool) -> list[int]:
        """After which of the steps `first + 1` to `last` there is a point."""
        cadence = self.cadence
        steps = list(range((first // cadence + 1) * cadence, last + 1, cadence))
        if self.timed_points:
            now = time.monotonic()
            late = has_norms or self._last_point is None or now - self._last_point >= _POINT_SECONDS
            if (late or last >= self._total_steps) and last not in steps:
                steps.append(last)
            self._last_point = now if steps else self._last_point
        return steps

    def _tagged(self, scalars: Mapping[str, float]) -> dict[str, float]:
        """Values by the name of their chart; without those that have not changed yet."""
        self._counts_seen |= {name for name in tags.COUNTS if scalars.get(name)}
        left_out = {"loss", *(name for name in tags.COUNTS if name not in self._counts_seen)}
        if not self._scales_loss:
            left_out.add("loss_scale")
        return {tags.tag(name): value for name, value in scalars.items() if name not in left_out}

    def _point_values(self) -> dict[str, float]:
        rate = self._point.examples_per_second
        values = {"loss": self._point.loss, "time/examples_per_second": rate}
        values |= {f"time/{name}": pace for name, pace in self._live_line.pace(rate).items()}
        values |= tags.time_values(self._point.milliseconds())
        values |= tags.worker_values(self._point.worker_seconds, self._point.worker_steps)
        mfu = self._utilisation.at(rate)
        return values if mfu is None else {**values, "time/mfu": mfu}

    def _scalars(self, run: str, step: int, values: Mapping[str, float]) -> None:
        if self._events:
            self._events.scalars(run, step, values)
        if self._table:
            self._table.append(run, step, {name: value for name, value in values.items() if "_stacked/" not in name})

    def _stop_profile(self) -> None:
        if self._profile.running and self._profile.stop():
            first, last = self._profile.profiled
            self.message(f"profiled steps {first} to {last}: tab PROFILE of TensorBoard{needs_viewer()}")

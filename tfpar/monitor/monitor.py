"""What one sees of a run: the terminal, TensorBoard, the profiler, and the figures of summary.json."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tfpar.config import ExperimentConfig
from tfpar.monitor.progress import Progress
from tfpar.monitor.tensorboard import EventFiles
from tfpar.monitor.timings import MetricSums, RecentSteps, Timings, Window
from tfpar.process import logs

import numpy as np
import tensorflow as tf

# Scalars with a place of their own in TensorBoard; all others are metrics.
_TIME_TAGS = {"total": "step", "overlapped": "exchange_overlapped"}
_TAGS = {
    "learning_rate": "learning_rate",
    "loss_scale": "loss_scale",
    "skipped_steps": "skipped_steps",
    "skipped_examples": "skipped_examples",
    "gradient_norm": "norms/gradient",
    "parameter_norm": "norms/parameter",
    "update_norm": "norms/update",
    "payload_bytes": "exchange/payload_bytes",
    "wire_bytes": "exchange/wire_bytes",
    "compression_ratio": "exchange/compression_ratio",
    "residual_over_gradient": "exchange/residual_over_gradient",
    "cosine": "exchange/cosine_to_dense",
}
_POINT_SECONDS = 2.0
_log = logging.getLogger(__name__)


class Monitor:
    """Follows a run. Every process has one; only the chief's logs and writes.

    Step numbers count finished steps: `on_steps` with `last_step=10` reports steps up to the tenth.

    Args:
      workdir: The run's directory; TensorBoard files go to `tensorboard/` in it. None: the terminal only.
      is_chief: Whether this process logs and writes.
      config: The experiment: options to record, `log_every`, `profile_steps`.
      total_steps: Steps in the whole run.
      flops_per_example: Floating-point operations that training on one example takes, forward and backward.
      peak_flops: Operations per second that one replica could do at best; 0 or None: no MFU is given.
      replicas: Replicas in the whole run.
      metric_results: Gives metrics by name from the sums that `on_steps` takes.
      progress: The terminal; by default a `Progress` on standard output.
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
        metric_results: Callable[[Sequence[np.ndarray]], Mapping[str, float]] = lambda sums: {},
        progress: Progress | None = None,
    ) -> None:
        self._total_steps = total_steps
        self._global_batch_size = config.input.global_batch_size
        # MFU per example and second: one multiplication gives the figure.
        self._mfu_factor = (flops_per_example or 0.0) / (peak_flops * replicas) if peak_flops else 0.0
        self._timings = Timings()
        self._log_every = config.monitor.log_every
        self._profile = _ProfileWindow(config.monitor.profile_window())
        verbose = config.monitor.verbose if is_chief else 0
        self._lowest_level = logging.INFO if verbose else logs.NOTE
        self._is_chief = is_chief
        self._progress = (progress or Progress(total_steps)) if verbose == 1 else None
        self._epochs_in_lines = verbose == 2
        self._recent = RecentSteps()
        self._point = Window()
        self._metric_results = metric_results
        self._point_sums = MetricSums()
        self._last_point: float | None = None
        self._events: EventFiles | None = None
        if is_chief and workdir:
            self._events = EventFiles(workdir, config.as_flat_dict())

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
        return self._events.failures if self._events else []

    def message(self, text: str, level: int = logging.INFO) -> None:
        """Logs lines in the chief's process, and nothing in others."""
        if self._is_chief and level >= self._lowest_level:
            _log.log(level, "%s", text)

    def next_boundary(self, step: int) -> int:
        """Where the next call from Python must end at the latest, so that the profile window is met exactly.

        The same in every process, because all processes must make the same calls.

        Args:
          step: Finished steps.

        Returns:
          A number of finished steps above `step`.
        """
        return self._profile.next_boundary(step, otherwise=max(self._total_steps, step + 1))

    def before_step(self, step: int) -> None:
        """Call before each call that trains, with the finished steps; starts the profiler when its window begins."""
        if self._is_chief and self._profile.begins(step):
            if self._events is None:
                _log.warning("--profile_steps needs a --workdir to write to; nothing is profiled")
                self._profile.give_up()
            else:
                self._profile.start(self._events.directory)

    def after_step(self, step: int) -> None:
        """Call after each call that trains, with the finished steps; stops the profiler when its window is over."""
        if self._profile.running and step >= self._profile.last:
            self._stop_profile()

    def on_steps(
        self,
        last_step: int,
        losses: np.ndarray,
        durations: np.ndarray,
        scalars: Mapping[str, float],
        *,
        examples: np.ndarray | None = None,
        metric_sums: Sequence[np.ndarray] = (),
    ) -> None:
        """Records the steps of one call.

        Args:
          last_step: Finished steps after the call.
          losses: [n] mean loss of each step.
          durations: [n, 6] seconds of each step, see `timings.COLUMNS`.
          scalars: Values at the last step: `learning_rate`, `gradient_norm`, `parameter_norm`, `update_norm`,
            `loss_scale`, `skipped_steps`, `skipped_examples`, those of the exchange; any other name is a metric.
          examples: [n] examples of each step; by default the global batch size.
          metric_sums: States of the metrics, summed over the steps. A line shows their values over the last steps, a
            point those since the last point, as for the loss.
        """
        losses = np.asarray(losses, np.float64)
        durations = np.asarray(durations, np.float64)
        counts = np.full(len(losses), float(self._global_batch_size)) if examples is None else np.asarray(examples)
        self._timings.add(durations, counts)
        if self._progress:
            self._recent.add(losses, durations, counts, metric_sums)
            if self._progress.due() or last_step >= self._total_steps:
                self._progress.update(last_step, self._line(scalars))
        if self._events:
            self._point_sums.add(metric_sums)
            self._write_points(last_step, losses, durations, counts, scalars)

    def on_epoch(self, number: int, last_step: int, values: Mapping[str, float]) -> None:
        """Prints a line about an epoch, under `--verbose=2`.

        Args:
          number: Of the epoch, from 0.
          last_step: Finished steps after it.
          values: Loss and metrics by name.
        """
        if self._epochs_in_lines:
            shown = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
            self.message(f"epoch {number + 1}  step {last_step}/{self._total_steps}  {shown}")

    def on_evaluation(self, step: int, results: Mapping[str, float]) -> None:
        """Records an evaluation.

        Args:
          step: Finished steps.
          results: `loss`, metrics by name, and `examples`, their number.
        """
        shown = {name: value for name, value in results.items() if name != "examples"}
        if self._events and shown:
            self._events.scalars(
                "eval", step, {name if name == "loss" else f"metrics/{name}": value for name, value in shown.items()}
            )
            self._events.flush()
        values = "  ".join(f"{name} {value:.4f}" for name, value in shown.items())
        count = f"  ({results['examples']:.0f} examples)" if "examples" in results else ""
        if not self._epochs_in_lines:  # whose lines have it, too
            self.message(f"evaluation at step {step}  {values}{count}")

    def text(self, tag: str, text: str, *, step: int = 0) -> None:
        """Records text, shown as it is, in TensorBoard."""
        if self._events:
            self._events.text(tag, text, step)

    def sample_text(self, tag: str, text: str, *, step: int = 0) -> None:
        """Records text read from the data or written by a language model, under `samples/`."""
        self.text(f"samples/{tag}", text, step=step)

    def images(self, tag: str, batch: Any, *, step: int = 0) -> None:
        """Records images [n, height, width, 1, 3 or 4], under `samples/`; see `EventFiles.images`."""
        if self._events:
            self._events.images(f"samples/{tag}", batch, step)

    def statistics(self) -> dict[str, float | None]:
        """The run's speed without its first, compiling call: the figures for summary.json.

        Returns:
          `examples_per_second`, `step_ms_p50`, `step_ms_p95`, `input_wait_fraction`, and `mfu` (None if the peak is
          not known). In every process, not only the chief's.
        """
        figures = self._timings.statistics()
        return {**figures, "mfu": self._mfu(figures["examples_per_second"])}

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Records how the run ended, beside its hyperparameters.

        Args:
          summary: The contents of summary.json; `train_loss`, `examples_per_second` and `mfu` are recorded.
        """
        if self._progress:
            self._progress.close()
        if self._events:
            names = ("train_loss", "examples_per_second", "mfu")
            final = {f"final/{name}": summary[name] for name in names if summary.get(name) is not None}
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

    def _mfu(self, examples_per_second: float) -> float | None:
        """Model FLOPs utilisation (Chowdhery et al. 2022, appendix B)."""
        return examples_per_second * self._mfu_factor if self._mfu_factor else None

    def _line(self, scalars: Mapping[str, float]) -> dict[str, str]:
        shown, sums = self._recent.window()
        scalars = {**scalars, **self._metric_results(sums)}
        metrics = [name for name in scalars if name not in _TAGS and name != "loss"]
        return {
            "loss": f"{shown.loss:.4f} ({_mean_of(shown.steps)})",
            **{name: f"{scalars[name]:.4f}" for name in metrics[:1]},
            "examples/s": f"{shown.examples_per_second:.0f}",
            "input wait": f"{100 * shown.input_wait_fraction:.1f}%",
        }

    def _write_points(
        self,
        last_step: int,
        losses: np.ndarray,
        durations: np.ndarray,
        examples: np.ndarray,
        scalars: Mapping[str, float],
    ) -> None:
        """Adds steps to the window, and closes it at every multiple of `log_every`, or else every 2 s."""
        assert self._events is not None
        first = last_step - len(losses)
        if self._log_every:
            ends = [step - first for step in range(first + 1, last_step + 1) if step % self._log_every == 0]
        else:
            now = time.monotonic()
            due = self._last_point is None or now - self._last_point >= _POINT_SECONDS or last_step >= self._total_steps
            ends = [len(losses)] if due else []
            self._last_point = now if due else self._last_point
        if ends:
            scalars = {**scalars, **self._metric_results(self._point_sums.take())}
        at_last = {_TAGS.get(name, f"metrics/{name}"): value for name, value in scalars.items() if name != "loss"}
        begin = 0
        for end in ends:
            self._point.add(losses[begin:end], durations[begin:end], examples[begin:end])
            values = self._point_values()
            if end == ends[-1] == len(losses):
                values |= at_last
                at_last = {}
            self._events.scalars("train", first + end, values)
            self._point.clear()
            begin = end
        self._point.add(losses[begin:], durations[begin:], examples[begin:])
        if ends and at_last:
            self._events.scalars("train", last_step, at_last)

    def _point_values(self) -> dict[str, float]:
        values = {"loss": self._point.loss, "throughput/examples_per_second": self._point.examples_per_second}
        for name, milliseconds in self._point.milliseconds().items():
            if name != "overlapped" or milliseconds:
                values[f"time_ms/{_TIME_TAGS.get(name, name)}"] = milliseconds
        mfu = self._mfu(self._point.examples_per_second)
        return values if mfu is None else {**values, "mfu": mfu}

    def _stop_profile(self) -> None:
        if self._profile.running and self._profile.stop():
            self.message(
                f"profiled steps {self._profile.first} to {self._profile.last}: tab PROFILE of TensorBoard "
                "(needs the xprof plug-in)"
            )


def _mean_of(steps: int) -> str:
    return f"mean of {steps} steps" if steps > 1 else "1 step"


class _ProfileWindow:
    """Runs TensorFlow's profiler over the steps `first` to `last`, both counted from 1 and both included."""

    def __init__(self, window: tuple[int, int] | None) -> None:
        self._open = window is not None
        first, self.last = window or (0, 0)
        self.first = max(first, 1)
        self.running = False

    def next_boundary(self, step: int, otherwise: int) -> int:
        edges = [edge for edge in (self.first - 1, self.last) if self.last and edge > step]
        return min([otherwise, *edges])

    def begins(self, step: int) -> bool:
        return self._open and not self.running and self.first <= step + 1 <= self.last

    def give_up(self) -> None:
        self._open = False

    def start(self, directory: str) -> None:
        try:
            tf.profiler.experimental.start(directory)
        except tf.errors.OpError as error:  # e.g. another profiler session in this process
            _log.warning("--profile_steps: the profiler does not start: %s", error.message)
            self.give_up()
        else:
            self.running = True

    def stop(self) -> bool:
        self.running = self._open = False
        try:
            tf.profiler.experimental.stop()
        except tf.errors.OpError as error:
            _log.warning("--profile_steps: the profile is lost: %s", error.message)
            return False
        return True

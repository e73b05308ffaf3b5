"""Learning rate schedules by name.

A schedule maps the number of finished steps to a learning rate. All of them are Keras
`LearningRateSchedule`s, so they also serve as the learning rate of any Keras optimizer, and all of
them are plain tensor arithmetic, so they run in a graph and under XLA. Reduce-on-plateau depends on what an
evaluation finds, which no function of the step can know: `PlateauController` lives on the host, and its
multiplier enters the step as a tensor.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from tfpar.config import ConfigError, ScheduleConfig, unknown_name
from tfpar.optim.plateau import PlateauController

import keras
import tensorflow as tf

_WHOLE = {"cycle_steps", "patience", "cooldown"}  # arguments that count steps or evaluations

Schedule: TypeAlias = keras.optimizers.schedules.LearningRateSchedule


def build(config: ScheduleConfig, peak: float, total_steps: int) -> Schedule:
    """The schedule of a configuration.

    | name | learning rate | `schedule_args` |
    |---|---|---|
    | constant | the peak | |
    | cosine | half a cosine from the peak to `final` x peak (Loshchilov and Hutter 2017) | final=0 |
    | step | times `factor` at each milestone | milestones=[0.5,0.75], factor=0.1 |
    | one_cycle | up from `start` x peak in the share `rise`, down to `final` x peak (Smith 2018) | rise, start, final |
    | cyclic | triangles between `minimum` x peak and the peak (Smith 2017) | cycle_steps, minimum, mode, gamma |
    | plateau | the peak, times `PlateauController`'s multiplier | see `plateau` |

    Warm-up is linear (Goyal et al. 2017) and part of the total: with `w` warm-up steps, step `t < w` runs at
    `(t + 1) / (w + 1)` of the rate the schedule starts from, so that no step is wasted at rate 0. One-cycle has a
    rise of its own; `warmup_steps` is its length there. `warmup_steps` below 1 is a share of all steps. Milestones are
    shares of all steps where none is above 1, else step numbers; both count from the start of training.

    Args:
      config: Name, arguments and warm-up.
      peak: The highest learning rate.
      total_steps: Steps in the whole run.

    Returns:
      A callable: finished steps (Python number, or int or float tensor []) -> learning rate, float32 [].

    Raises:
      ConfigError: An unknown name or argument, with suggestions, or a value out of range.
    """
    if config.schedule not in _BUILDERS:
        raise unknown_name("--schedule", config.schedule, _BUILDERS)
    if total_steps < 1:
        raise ConfigError(f"total_steps={total_steps}: a schedule needs at least one step.")
    builder = _BUILDERS[config.schedule]
    return builder(float(peak), total_steps, _warmup(config, total_steps), **_checked_arguments(config, builder))


def check_schedule(config: ScheduleConfig) -> None:
    """Checks name and arguments before the number of steps is known.

    Raises:
      ConfigError: What `build` or `plateau` would refuse whatever the length of the run.
    """
    if 0 < config.warmup_steps < 1:  # a share of what is not known yet
        config = dataclasses.replace(config, warmup_steps=1)
    build(config, 1.0, 10**15)  # so long that nothing said here depends on it
    plateau(config)


def check_evaluated(config: ScheduleConfig, evaluated: bool) -> None:
    """Refuses `--schedule=plateau` for a run that makes no evaluations.

    Raises:
      ConfigError: With what to do.
    """
    if config.schedule == "plateau" and not evaluated:
        raise ConfigError(
            "--schedule=plateau needs evaluations, and there are no validation examples. Hold some out "
            "(--validation_fraction=0.1), or choose another schedule."
        )


def plateau(config: ScheduleConfig) -> PlateauController | None:
    """The controller of `--schedule=plateau` from `schedule_args` (factor, patience, ...); None for other schedules.

    Raises:
      ConfigError: An unknown argument, with suggestions, or a value out of range.
    """
    if config.schedule != "plateau":
        return None
    arguments = _checked_arguments(config, PlateauController)
    try:
        return PlateauController(**arguments)
    except ValueError as error:
        raise ConfigError(f"--schedule_args={config.schedule_args!r}: {error}") from error


@keras.saving.register_keras_serializable("tfpar")
class Constant(Schedule):
    """Always the same learning rate.

    Args:
      learning_rate: That rate.
    """

    def __init__(self, learning_rate: float) -> None:
        self.learning_rate = learning_rate

    def __call__(self, step: Any) -> tf.Tensor:
        """The rate, float32 []."""
        return tf.constant(self.learning_rate, tf.float32)

    def get_config(self) -> dict[str, Any]:
        """The arguments that make the same schedule again."""
        return {"learning_rate": self.learning_rate}


@keras.saving.register_keras_serializable("tfpar")
class WarmUp(Schedule):
    """Linear warm-up before another schedule (Goyal et al. 2017, section 2.2).

    Args:
      schedule: What follows; it starts from its own step 0 when the warm-up is over.
      warmup_steps: Steps `w` of warm-up. Step `t < w` runs at `(t + 1) / (w + 1)` of `schedule(0)`.
    """

    def __init__(self, schedule: Schedule, warmup_steps: int) -> None:
        self.schedule = schedule
        self.warmup_steps = warmup_steps

    def __call__(self, step: Any) -> tf.Tensor:
        """The rate after `step` finished steps, float32 []."""
        step = tf.cast(step, tf.float32)
        target = tf.cast(self.schedule(0), tf.float32)
        rising = target * (step + 1.0) / (self.warmup_steps + 1.0)
        after = tf.cast(self.schedule(tf.maximum(step - self.warmup_steps, 0.0)), tf.float32)
        return tf.where(step < self.warmup_steps, rising, after)

    def get_config(self) -> dict[str, Any]:
        """The arguments that make the same schedule again."""
        schedule = keras.optimizers.schedules.serialize(self.schedule)
        return {"schedule": schedule, "warmup_steps": self.warmup_steps}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> WarmUp:
        """The schedule of a `get_config()`."""
        return cls(keras.saving.deserialize_keras_object(config["schedule"]), config["warmup_steps"])


@keras.saving.register_keras_serializable("tfpar")
class OneCycle(Schedule):
    """One rise and one fall, both half a cosine (Smith 2018, "super-convergence").

    Args:
      peak: The highest learning rate, reached after `rise_steps`.
      total_steps: Steps after which the fall is over.
      rise_steps: Steps of the rise.
      start: Share of the peak to start from.
      final: Share of the peak to end with.
    """

    def __init__(self, peak: float, total_steps: int, rise_steps: int, start: float, final: float) -> None:
        self.peak = peak
        self.total_steps = total_steps
        self.rise_steps = rise_steps
        self.start = start
        self.final = final

    def __call__(self, step: Any) -> tf.Tensor:
        """The rate after `step` finished steps, float32 []."""
        step = tf.cast(step, tf.float32)
        risen = tf.minimum(step / max(self.rise_steps, 1), 1.0)
        fallen = tf.clip_by_value((step - self.rise_steps) / (self.total_steps - self.rise_steps), 0.0, 1.0)
        rising = self.start + (1.0 - self.start) * 0.5 * (1.0 - tf.cos(math.pi * risen))
        falling = self.final + (1.0 - self.final) * 0.5 * (1.0 + tf.cos(math.pi * fallen))
        return self.peak * tf.where(step < self.rise_steps, rising, falling)

    def get_config(self) -> dict[str, Any]:
        """The arguments that make the same schedule again."""
        return {
            "peak": self.peak,
            "total_steps": self.total_steps,
            "rise_steps": self.rise_steps,
            "start": self.start,
            "final": self.final,
        }


@keras.saving.register_keras_serializable("tfpar")
class Cyclic(Schedule):
    """Triangles between two rates (Smith 2017, "Cyclical Learning Rates").

    Args:
      peak: The highest learning rate.
      minimum: The lowest one.
      cycle_steps: Steps from one minimum to the next (twice the paper's `stepsize`).
      mode: `triangular`; `triangular2` halves the height from cycle to cycle; `exp_range` multiplies it by
        `gamma` with every step.
      gamma: See `mode`.
    """

    def __init__(
        self, peak: float, minimum: float, cycle_steps: int, mode: str = "triangular", gamma: float = 1.0
    ) -> None:
        self.peak = peak
        self.minimum = minimum
        self.cycle_steps = cycle_steps
        self.mode = mode
        self.gamma = gamma

    def __call__(self, step: Any) -> tf.Tensor:
        """The rate after `step` finished steps, float32 []."""
        step = tf.cast(step, tf.float32)
        cycle = tf.floor(step / self.cycle_steps)
        phase = step / self.cycle_steps - cycle
        height = 1.0 - tf.abs(2.0 * phase - 1.0)
        if self.mode == "triangular2":
            height *= tf.pow(0.5, cycle)
        elif self.mode == "exp_range":
            height *= tf.pow(tf.constant(self.gamma, tf.float32), step)
        return self.minimum + (self.peak - self.minimum) * height

    def get_config(self) -> dict[str, Any]:
        """The arguments that make the same schedule again."""
        return {
            "peak": self.peak,
            "minimum": self.minimum,
            "cycle_steps": self.cycle_steps,
            "mode": self.mode,
            "gamma": self.gamma,
        }


def _warmed_up(schedule: Schedule, warmup: int) -> Schedule:
    return WarmUp(schedule, warmup) if warmup else schedule


def _constant(peak: float, steps: int, warmup: int) -> Schedule:
    return _warmed_up(Constant(peak), warmup)


def _plateau(peak: float, steps: int, warmup: int, **arguments: Any) -> Schedule:
    return _constant(peak, steps, warmup)


def _cosine(peak: float, steps: int, warmup: int, *, final: float = 0.0) -> Schedule:
    _require(0.0 <= final <= 1.0, f"final={final} is a share of the peak, between 0 and 1.")
    return _warmed_up(keras.optimizers.schedules.CosineDecay(peak, steps - warmup, alpha=final), warmup)


def _step(
    peak: float, steps: int, warmup: int, *, milestones: Sequence[float] = (0.5, 0.75), factor: float = 0.1
) -> Schedule:
    _require(factor > 0.0, f"factor={factor} must be positive.")
    _require(len(milestones) > 0, "milestones=[] is empty; use --schedule=constant.")
    _require(
        milestones[0] > 0 and all(a < b for a, b in itertools.pairwise(milestones)),
        f"milestones={list(milestones)} must be positive and increase.",
    )
    shares = all(at <= 1 for at in milestones)
    _require(
        shares or all(float(at).is_integer() for at in milestones),
        f"milestones={list(milestones)}: either all are shares, at most 1, or all are step numbers, whole numbers.",
    )
    first_steps = [round(at * steps if shares else at) for at in milestones]
    counted = f" are steps {first_steps} of {steps}, which" if shares else ""
    _require(
        warmup < first_steps[0] and all(a < b for a, b in itertools.pairwise(first_steps)),
        f"milestones={list(milestones)}{counted} must differ and come after the warm-up (--warmup_steps={warmup}).",
    )
    # Keras keeps the old value at a boundary itself; here a milestone is the first step at the new rate.
    boundaries = [step - warmup - 1 for step in first_steps]
    values = [peak * factor**count for count in range(len(first_steps) + 1)]
    return _warmed_up(keras.optimizers.schedules.PiecewiseConstantDecay(boundaries, values), warmup)


def _one_cycle(
    peak: float, steps: int, warmup: int, *, rise: float | None = None, start: float = 0.04, final: float = 4e-6
) -> Schedule:
    _require(
        rise is None or not warmup, f"rise={rise} and --warmup_steps={warmup} are the same thing; give one of them."
    )
    share = 0.3 if rise is None else rise
    _require(0.0 <= share < 1.0, f"rise={share} is a share of all steps, at least 0 and below 1.")
    _require(0.0 <= start <= 1.0 and 0.0 <= final <= 1.0, f"start={start} and final={final} are shares of the peak.")
    return OneCycle(peak, steps, warmup or min(round(share * steps), steps - 1), start, final)


def _cyclic(
    peak: float,
    steps: int,
    warmup: int,
    *,
    cycle_steps: int | None = None,
    minimum: float = 0.1,
    mode: str = "triangular",
    gamma: float = 0.9999,
) -> Schedule:
    length = max((steps - warmup) // 4, 2) if cycle_steps is None else cycle_steps
    _require(length >= 2, f"cycle_steps={length} must be at least 2 steps.")
    _require(0.0 <= minimum <= 1.0, f"minimum={minimum} is a share of the peak, between 0 and 1.")
    _require(0.0 < gamma <= 1.0, f"gamma={gamma} must be above 0 and at most 1.")
    if mode not in ("triangular", "triangular2", "exp_range"):
        raise unknown_name("--schedule_args mode", str(mode), ("triangular", "triangular2", "exp_range"))
    return _warmed_up(Cyclic(peak, minimum * peak, int(length), mode, gamma), warmup)


_BUILDERS: dict[str, Callable[..., Schedule]] = {
    "constant": _constant,
    "cosine": _cosine,
    "step": _step,
    "one_cycle": _one_cycle,
    "cyclic": _cyclic,
    "plateau": _plateau,
}


def _warmup(config: ScheduleConfig, total_steps: int) -> int:
    """The steps of warm-up, fewer than all."""
    given = config.warmup_steps
    if given < 1:
        # Without warm-up, one-cycle rises for a share of its own: a small share must not mean a large one.
        least = int(config.schedule == "one_cycle" and given > 0)
        return min(max(round(given * total_steps), least), total_steps - 1)
    if not given.is_integer():
        raise ConfigError(f"--warmup_steps={given:g} is neither a whole number of steps nor a share of them, below 1.")
    if given >= total_steps:
        raise ConfigError(
            f"--warmup_steps={given:g} takes up all of the run's {total_steps} steps. Warm up for fewer than "
            f"{total_steps}, or for a share of the steps (--warmup_steps=0.05), or train longer (--steps, --epochs)."
        )
    return int(given)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(f"--schedule_args: {message}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _checked_arguments(config: ScheduleConfig, builder: Callable[..., Any]) -> dict[str, Any]:
    """`schedule_args`, each a known keyword with a value of its default's kind."""
    if builder is _plateau:
        builder = PlateauController
    keywords = {
        name: parameter.default
        for name, parameter in inspect.signature(builder).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    arguments = config.arguments()
    for name, value in arguments.items():
        if name not in keywords:
            if not keywords:
                raise ConfigError(f"--schedule_args={name}=...: --schedule={config.schedule} takes no arguments.")
            raise unknown_name("--schedule_args", name, keywords)
        default = keywords[name]
        if isinstance(default, (tuple, list)):
            fits = isinstance(value, list) and all(map(_is_number, value))
            wanted = "a list of numbers, e.g. [0.5,0.75]"
        elif isinstance(default, str):
            fits, wanted = isinstance(value, str), "a word"
        else:
            whole = name in _WHOLE
            fits = _is_number(value) and (not whole or float(value).is_integer())
            wanted = "a whole number" if whole else "a number"
        if not fits:
            raise ConfigError(f"--schedule_args={name}={value!r}: {name} is {wanted}.")
    return arguments

"""Sections of a few options: model, exchange, precision, optimizer, schedule, checkpoint and monitor."""

from __future__ import annotations

import dataclasses
from typing import Any

from tfpar.config.errors import ConfigError
from tfpar.config.fields import ConfigBase, option, parse_arguments

# Stands for a name where a program passed its own model, optimizer or data set.
CUSTOM = "custom"
PRECISIONS = ("float32", "mixed_bfloat16", "mixed_float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(ConfigBase):
    """Which model to build."""

    model: str = option("convnet", "Name of the model to build, e.g. mlp, convnet, resnet18, vit, transformer_lm_tiny.")
    model_args: str = option("", "Keyword arguments for the model builder, e.g. 'activation=gelu,dropout=0.1'.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.arguments()

    def arguments(self) -> dict[str, Any]:
        """`model_args` as keyword arguments."""
        return parse_arguments("--model_args", self.model_args, example="width=64,activation=gelu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExchangeConfig(ConfigBase):
    """How gradients travel between replicas."""

    exchange: str = option(
        "none",
        "How gradients travel between workers: none (dense float32 all-reduce), a codec such as bf16, int8, int4, "
        "sign, topk:SHARE or powersgd:RANK, or auto, which measures links and codecs at the start. Options follow a "
        "colon, as in 'int4:block=512,rounding=stochastic,pattern=ring'. `python -m tfpar.exchange` lists all.",
        may_change_on_resume=True,
    )
    exchange_retune_every: int = option(
        0,
        "With --exchange=auto: steps after which links and codecs are measured again. 0: never.",
        minimum=0,
        may_change_on_resume=True,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionConfig(ConfigBase):
    """Which number formats are used in the computation."""

    precision: str = option("float32", "Keras dtype policy of the model.", choices=PRECISIONS)
    tf32: bool = option(
        True,
        "Let NVIDIA GPUs use TensorFloat-32 (10-bit mantissa) in float32 matrix products.",
        may_change_on_resume=True,
    )
    initial_loss_scale: float = option(2.0**15, "Initial dynamic loss scale, for mixed_float16 only.", minimum=1.0)
    loss_scale_growth_steps: int = option(
        2000, "Consecutive finite steps after which the loss scale doubles.", minimum=1
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig(ConfigBase):
    """How weights are updated."""

    optimizer: str = option(
        "adamw",
        "sgd | adam | adamw | adafactor | lamb | lars | lion | muon, or another of Keras': adadelta, adagrad, adamax, "
        "ftrl, nadam, rmsprop.",
    )
    optimizer_args: str = option("", "Keyword arguments for the optimizer, e.g. 'beta_2=0.95,nesterov=true'.")
    learning_rate: float = option(
        1e-3, "Peak learning rate; if --base_batch_size is set, for a batch of that size.", minimum=0.0
    )
    base_batch_size: int = option(
        0,
        "Linear scaling (Goyal et al. 2017): multiplies the learning rate by global_batch_size / base_batch_size; in a "
        "federation, by client_batch / base_batch_size. 0: off.",
        minimum=0,
    )
    weight_decay: float = option(0.0, "Decoupled weight decay.", minimum=0.0)
    weight_decay_exclude: str = option(
        "bias,norm,bn,embedding",
        "Comma-separated strings; variables with one of them in their path are not decayed.",
    )
    clip_norm: float = option(
        0.0,
        "Clip the reduced gradient to this global L2 norm (Pascanu et al. 2013). 0: off.",
        minimum=0.0,
    )
    ema: float = option(
        0.0,
        "Momentum of an exponential moving average of the weights, which evaluation then uses. 0: off.",
        minimum=0.0,
        maximum=0.999999,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.arguments()

    def arguments(self) -> dict[str, Any]:
        """`optimizer_args` as keyword arguments."""
        return parse_arguments("--optimizer_args", self.optimizer_args, example="beta_2=0.95,nesterov=true")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleConfig(ConfigBase):
    """How the learning rate changes."""

    schedule: str = option("cosine", "constant | cosine | step | one_cycle | cyclic | plateau.")
    schedule_args: str = option("", "Keyword arguments for the schedule, e.g. 'milestones=[0.5,0.75],factor=0.1'.")
    warmup_steps: float = option(
        0.0,
        "Steps of linear warm-up before the schedule starts; below 1, such as 0.05: their share of all steps.",
        minimum=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.arguments()

    def arguments(self) -> dict[str, Any]:
        """`schedule_args` as keyword arguments."""
        return parse_arguments("--schedule_args", self.schedule_args, example="milestones=[0.5,0.75],factor=0.1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig(ConfigBase):
    """Where a run is saved, and how it is resumed."""

    workdir: str = option(
        "",
        "Directory of the run: checkpoints, TensorBoard events, summary.json, model.keras. A run that has a checkpoint "
        "there is resumed.",
        may_change_on_resume=True,
        per_host=True,
    )
    checkpoint_every: int = option(
        0,
        "Steps between checkpoints. 0: at every evaluation and at the end.",
        minimum=0,
        may_change_on_resume=True,
    )
    keep_checkpoints: int = option(
        3,
        "How many of the newest checkpoints to keep, besides the best one.",
        minimum=1,
        may_change_on_resume=True,
        per_host=True,
    )
    on_checkpoint_error: str = option(
        "warn",
        "What to do when a checkpoint cannot be written (full disk, read-only directory): 'warn' continues training "
        "and reports it at the end; 'fail' ends the run. Older checkpoints are kept either way.",
        choices=("warn", "fail"),
        may_change_on_resume=True,
        per_host=True,
    )
    warm_start: str = option(
        "",
        "Start from these weights: the workdir of another run, a checkpoint directory or a .keras file.",
        may_change_on_resume=True,
        per_host=True,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MonitorConfig(ConfigBase):
    """What is shown and recorded during a run."""

    log_every: int = option(
        0,
        "Steps between points in TensorBoard and metrics.csv. 0: every two seconds and at least 60 times in a run, but "
        "not more often than every 10 steps.",
        minimum=0,
        may_change_on_resume=True,
    )
    histogram_every: int = option(
        0,
        "Steps between histograms of the weights, and of what a step changes in them, in TensorBoard. 0: none.",
        minimum=0,
        may_change_on_resume=True,
    )
    profile_steps: str = option(
        "",
        "First and last step to profile, e.g. '10,15'; shown in TensorBoard's tab PROFILE "
        "(pip install 'tfpar[profile]').",
        may_change_on_resume=True,
    )
    profile_workers: str = option(
        "0", "Ranks of the workers that --profile_steps profiles, e.g. '0,3', or 'all'.", may_change_on_resume=True
    )
    verbose: int = option(
        1,
        "What is printed, as in Keras. 0: warnings and errors; 1: progress, live on a terminal; 2: a line per epoch.",
        minimum=0,
        maximum=2,
        may_change_on_resume=True,
        per_host=True,
    )
    tensorflow_log: bool = option(
        False, "Show TensorFlow's start-up messages and the information log.", may_change_on_resume=True, per_host=True
    )

    def __post_init__(self) -> None:
        if self.verbose in (True, False, "auto"):  # as Keras' methods take it
            object.__setattr__(self, "verbose", 1 if self.verbose == "auto" else int(self.verbose))
        super().__post_init__()
        self.profile_window()
        self.profiles(0)

    def profile_window(self) -> tuple[int, int] | None:
        """`profile_steps` as (first, last) step, or None if no profile was requested."""
        if not self.profile_steps:
            return None
        try:
            first, last = (int(part) for part in self.profile_steps.split(","))
        except ValueError:
            first, last = 0, -1
        if not 0 <= first <= last:
            raise ConfigError(
                f"--profile_steps={self.profile_steps!r} is not a window of steps. Write e.g. --profile_steps=10,15."
            )
        return first, last

    def profiles(self, worker: int) -> bool:
        """Whether `profile_workers` names this worker.

        Args:
          worker: Its rank.
        """
        if self.profile_workers == "all":
            return True
        ranks = [part.strip() for part in self.profile_workers.split(",")]
        if not all(rank.isdecimal() for rank in ranks):
            raise ConfigError(
                f"--profile_workers={self.profile_workers!r} is not a list of ranks. Write e.g. --profile_workers=0,3, "
                "or --profile_workers=all."
            )
        return worker in [int(rank) for rank in ranks]

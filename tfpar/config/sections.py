"""The sections of an experiment's configuration, one frozen dataclass each: model, input, strategy and so on.

Every field carries its help text, its choices, its bounds, whether it may change when a run is resumed and whether
workers may be given different values. The absl flags (`tfpar.config.flags`), the `--help` page, `docs/flags.md`, the
validation and the record in TensorBoard all derive from it. Building a dataclass validates it; an invalid value raises
`ConfigError` before anything is started or written.

This module imports neither TensorFlow nor Keras: reading a configuration costs nothing.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from tfpar.config.errors import ConfigError
from tfpar.config.fields import ConfigBase, option, parse_arguments

# Stands for a name where a program passed its own model, optimizer or data set.
CUSTOM = "custom"
PRECISIONS = ("float32", "mixed_bfloat16", "mixed_float16")
ALL_WEIGHTS = "all"  # of --trainable


def check_pattern(flag: str, pattern: str, remedy: str) -> None:
    """Refuses what is no regular expression.

    Raises:
      ConfigError: With what is wrong.
    """
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{flag}={pattern!r} is no regular expression ({error}). {remedy}") from error


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

    optimizer: str = option("adamw", "sgd | adam | adamw | lamb | lars | lion | muon.")
    optimizer_args: str = option("", "Keyword arguments for the optimizer, e.g. 'beta_2=0.95,nesterov=true'.")
    learning_rate: float = option(
        1e-3, "Peak learning rate; if --base_batch_size is set, for a batch of that size.", minimum=0.0
    )
    base_batch_size: int = option(
        0,
        "Linear scaling (Goyal et al. 2017): multiplies the learning rate by global_batch_size / base_batch_size. "
        "0: off.",
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
    warmup_steps: int = option(0, "Steps of linear warm-up before the schedule starts.", minimum=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.arguments()

    def arguments(self) -> dict[str, Any]:
        """`schedule_args` as keyword arguments."""
        return parse_arguments("--schedule_args", self.schedule_args, example="milestones=[0.5,0.75],factor=0.1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(ConfigBase):
    """How to train, and for how long."""

    steps: int = option(0, "Steps to train for. 0: --epochs decides.", minimum=0, may_change_on_resume=True)
    epochs: float = option(
        0.0, "Passes over the training examples. 0: --steps decides.", minimum=0.0, may_change_on_resume=True
    )
    stop_after: int = option(
        0,
        "Save a checkpoint and stop after this many steps of this process; the next start resumes there. 0: off.",
        minimum=0,
        may_change_on_resume=True,
    )
    accumulate_steps: int = option(
        1,
        "Micro-batches per step; their gradients are summed locally in float32.",
        minimum=1,
        may_change_on_resume=True,
    )
    loss_weighting: str = option(
        "positions",
        "What losses with masks average over: all 'positions', as in Keras, or those of each of the 'examples' first.",
        choices=("positions", "examples"),
    )
    jit_compile: str = option(
        "auto",
        "Compile the forward and backward pass with XLA. 'auto' does, except for models that synchronise batch "
        "statistics between replicas, and for convolutional models on CPUs, where XLA is slower. Without XLA a "
        "compressed exchange overlaps the backward pass, which helps on slow links.",
        choices=("auto", "true", "false"),
        may_change_on_resume=True,
    )
    trainable: str = option(
        "",
        "Weights that are trained: a regular expression, searched in their paths, or all. The others are frozen: they "
        "do not travel and have no optimizer state. Empty: what the model says; with --lora, adapters alone.",
    )
    lora: str = option(
        "",
        "Low-rank adapters (Hu et al. 2022) that are trained in place of the kernels beside them: RANK, or RANK:REGEX "
        "with a regular expression that is searched in the paths of layers, e.g. 8:(query|value)$. RANK alone: queries "
        "and values of attention; in a model without them, every Dense and EinsumDense layer.",
    )
    recompute: str = option(
        "none",
        "Activations that the backward pass computes again instead of keeping them, so that a larger batch or model "
        "fits: none; blocks, the layers made of layers, as in a transformer, or stretches of the model's graph; or a "
        "regular expression, searched in the paths of layers. A step takes up to a third longer.",
        may_change_on_resume=True,
    )
    shard: str = option(
        "none",
        "What replicas divide among themselves instead of each having all: none; optimizer, the optimizer's state; "
        "gradients, which are that and the sums of gradients; or weights, which are all three. With optimizer and "
        "gradients a replica updates its share of the weights and gets the others' new weights, for the same bytes on "
        "the network; with a codec, changes of weights travel encoded in place of the sums of gradients. With "
        "gradients and weights, each micro-batch of --accumulate_steps travels by itself. With weights, both passes "
        "gather the weights of each block, which the backward pass computes again as with --recompute=blocks.",
        choices=("none", "optimizer", "gradients", "weights"),
        may_change_on_resume=True,
    )
    steps_per_loop: int = option(
        0,
        "Steps per call from Python. 0: enough to make the overhead of the call negligible.",
        minimum=0,
        may_change_on_resume=True,
    )
    eval_every: int = option(
        0, "Steps between evaluations. 0: at the end of every epoch.", minimum=0, may_change_on_resume=True
    )
    eval_batch_size: int = option(
        0,
        "Examples in a batch of evaluation and prediction, over all replicas. 0: --global_batch_size.",
        minimum=0,
        may_change_on_resume=True,
    )
    eval_steps: int = option(
        0,
        "Batches of each evaluation during training, from the beginning of the validation examples. 0: all.",
        minimum=0,
        may_change_on_resume=True,
    )
    seed: int = option(0, "Seed of initialisation, shuffling, augmentation and dropout.", minimum=0)
    deterministic: bool = option(
        False, "Use deterministic kernels only, so that a repeated run gives the same bits.", may_change_on_resume=True
    )
    max_bad_steps: int = option(
        50,
        "Consecutive steps that may be skipped because the loss or a gradient is not finite, or no example is usable. "
        "More end the run, and the examples are named. 0: no limit.",
        minimum=0,
        may_change_on_resume=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps and self.epochs:
            raise ConfigError(
                f"--steps={self.steps} and --epochs={self.epochs} contradict each other: give one of them."
            )
        check_pattern("--trainable", self.trainable, "Write e.g. --trainable=head, or all.")
        self.adapters()

    def adapters(self) -> tuple[int, str]:
        """`lora` as the rank, 0 for no adapters, and the expression; empty where that is left to the model."""
        rank, _, pattern = self.lora.partition(":")
        if not self.lora:
            return 0, ""
        if not rank.isdecimal() or int(rank) < 1 or self.lora.endswith(":"):
            raise ConfigError(
                f"--lora={self.lora!r} is not RANK or RANK:REGEX. Write e.g. --lora=8 or --lora=8:query$."
            )
        check_pattern("--lora", pattern, "Write e.g. --lora=8:(query|value)$.")
        return int(rank), pattern


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

"""Typed configuration of an experiment: one frozen dataclass per room.

Every field carries its help text, its choices and its bounds, so that the absl flags
(`tfpar.config.flags`), the `--help` page, the validation and the record in TensorBoard all come
from one place. Building a dataclass validates it; an invalid value raises `ConfigError`
before anything is started or written.

This module imports neither TensorFlow nor Keras: reading a configuration costs nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tfpar.config.errors import ConfigError, unknown_name
from tfpar.config.fields import Options, option, parse_arguments

STRATEGIES = ("auto", "one_device", "mirrored", "multi_worker", "parameter_server", "tpu")
# In the place of a name: a program gave a model, optimizer or data set of its own.
CUSTOM = "custom"
PRECISIONS = ("float32", "mixed_bfloat16", "mixed_float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(Options):
    """Which model to build."""

    model: str = option("convnet", "Model builder by name, e.g. mlp, convnet, resnet18, vit, transformer_lm_tiny.")
    model_args: str = option("", "Keyword overrides for the builder, e.g. 'activation=gelu,dropout=0.1'.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.arguments()

    def arguments(self) -> dict[str, Any]:
        """`model_args` as keyword arguments."""
        return parse_arguments("--model_args", self.model_args, example="width=64,activation=gelu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputConfig(Options):
    """Where examples come from and how they are batched."""

    dataset: str = option(
        "digits",
        "digits | tfds:NAME | text[:PATH] | images:DIR | tfrecord:GLOB | synthetic:SHAPE. 'text' without a path "
        "reads the sources of the installed Python standard library.",
    )
    data_dir: str = option(
        "", "Where data sets are stored. Empty: TFDS' own default, $TFDS_DATA_DIR or ~/tensorflow_datasets."
    )
    global_batch_size: int = option(64, "Examples per update over all replicas and micro-batches together.", minimum=1)
    shard_by: str = option(
        "example",
        "How examples go to workers: 'example' permutes all examples globally; 'file' gives each worker whole files "
        "(fewer open files on network storage; order then depends on the number of workers).",
        choices=("example", "file"),
    )
    remainder: str = option(
        "pad",
        "The last, partial batch of an epoch: 'pad' trains on it with its true weight, 'drop' leaves it out.",
        choices=("pad", "drop"),
    )
    uneven_batches: bool = option(
        False,
        "Allow a global batch that does not divide by replicas x accumulate_steps. Short replicas are padded; "
        "the weighting stays exact, some computation is wasted.",
    )
    shuffle: bool = option(True, "Shuffle the training examples anew each epoch, as a pure function of --seed.")
    sequence_length: int = option(128, "Tokens per example, for text.", minimum=1)
    validation_fraction: float = option(
        0.1, "Share held out where a source has no validation split of its own.", minimum=0.0, maximum=0.9
    )
    image_size: int = option(32, "Height and width that images:DIR is resized to, in pixels.", minimum=1)
    augment: str = option(
        "none", "Augmentation layers, e.g. 'crop:2,flip' or 'shift:1'; run on the device inside the step."
    )
    cache: str = option(
        "auto",
        "'memory' decodes every example once and keeps it, 'none' decodes each epoch, 'auto' keeps what fits in 1 GiB.",
        choices=("auto", "memory", "none"),
    )
    on_bad_record: str = option(
        "fail",
        "An example that cannot be used (damaged record, image that does not decode, label out of range, NaN): 'fail' "
        "ends the run and names it, 'skip' trains without it, at weight 0, and counts it.",
        choices=("fail", "skip"),
    )
    prefetch: int = option(4, "Batches prepared ahead, per replica.", minimum=0)
    input_threads: int = option(0, "Parallel calls in the input pipeline; 0 lets tf.data tune it.", minimum=0)
    data_service: str = option(
        "", "Address of a tf.data service dispatcher, e.g. grpc://host:5050; empty: read in the worker."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategyConfig(Options):
    """Where the computation runs."""

    strategy: str = option(
        "auto",
        "How replicas are laid out. 'auto' takes a TPU if there is one, then TF_CONFIG, then all GPUs, then a CPU.",
        choices=STRATEGIES,
    )
    devices: int = option(
        0,
        "Devices (replicas) per worker. 0: all GPUs, or one CPU device. Without GPUs, N splits the CPU into N logical "
        "devices.",
        minimum=0,
    )
    tpu: str = option("", "Name or address of the TPU; empty: what the environment gives, 'local' for a TPU VM.")
    peer_timeout: float = option(
        30.0,
        "Seconds after which a worker or parameter server that does not answer is lost, and all others (with "
        "parameter_server: the chief) end with an error that names it. A slow one (compiling, evaluating) answers.",
        minimum=8.0,
    )
    start_timeout: float = option(
        600.0, "Seconds that workers and parameter servers wait for each other at the start.", minimum=1.0
    )
    stall_timeout: float = option(
        1800.0,
        "Seconds in which a worker must finish some updates; one that does not, as in a deadlock of its program, says "
        "where it hangs and ends. The first update, evaluation and checkpoints may each take 5 times as long. 0: off.",
        minimum=0.0,
        maximum=1e7,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExchangeConfig(Options):
    """How gradients travel between replicas."""

    exchange: str = option(
        "none",
        "How gradients travel between hosts: none (dense float32 all-reduce), bf16, fp16, fp8, int8, int4, int2, sign, "
        "topk:SHARE, powersgd:RANK, or auto, which measures links and codecs at the start. Options follow, as in "
        "'int4:block=512,rounding=stochastic,pattern=ring'; README.md lists them.",
    )
    exchange_retune_every: int = option(
        0, "With --exchange=auto: updates after which links and codecs are measured again. 0: never.", minimum=0
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionConfig(Options):
    """Which number formats compute."""

    precision: str = option("float32", "Keras dtype policy of the model.", choices=PRECISIONS)
    tf32: bool = option(True, "Let NVIDIA GPUs use TensorFloat-32 for float32 matrix products (10-bit mantissa).")
    initial_loss_scale: float = option(2.0**15, "First dynamic loss scale; used by mixed_float16 only.", minimum=1.0)
    loss_scale_growth_steps: int = option(
        2000, "Finite updates in a row after which the loss scale doubles.", minimum=1
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Options):
    """How weights are updated."""

    optimizer: str = option("adamw", "sgd | adam | adamw | lamb | lars | lion | muon.")
    optimizer_args: str = option("", "Keyword overrides for the optimizer, e.g. 'beta_2=0.95,nesterov=true'.")
    learning_rate: float = option(
        1e-3, "Peak learning rate, for a batch of --base_batch_size if that is set.", minimum=0.0
    )
    base_batch_size: int = option(
        0,
        "Linear scaling (Goyal et al. 2017): the learning rate times global_batch_size / base_batch_size. 0: off.",
        minimum=0,
    )
    weight_decay: float = option(0.0, "Decoupled weight decay.", minimum=0.0)
    weight_decay_exclude: str = option(
        "bias,norm,bn,embedding", "Comma-separated parts of variable paths that are not decayed."
    )
    clip_norm: float = option(
        0.0, "Clip the reduced gradient to this global L2 norm (Pascanu et al. 2013). 0: off.", minimum=0.0
    )
    ema: float = option(
        0.0,
        "Momentum of an exponential moving average of the weights, used for evaluation. 0: off.",
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
class ScheduleConfig(Options):
    """How the learning rate moves."""

    schedule: str = option("cosine", "constant | cosine | step | one_cycle | cyclic | plateau.")
    schedule_args: str = option("", "Keyword overrides for the schedule, e.g. 'milestones=[0.5,0.75],factor=0.1'.")
    warmup_steps: int = option(0, "Updates of linear warm-up before the schedule starts.", minimum=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.arguments()

    def arguments(self) -> dict[str, Any]:
        """`schedule_args` as keyword arguments."""
        return parse_arguments("--schedule_args", self.schedule_args, example="milestones=[0.5,0.75],factor=0.1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(Options):
    """How long and how to train."""

    steps: int = option(0, "Updates to train for. 0: --epochs decides.", minimum=0)
    epochs: float = option(0.0, "Passes over the training examples. 0: --steps decides.", minimum=0.0)
    stop_after: int = option(
        0,
        "Stop, with a checkpoint, after this many updates of this process; the next start goes on there. For queues "
        "with a time limit. 0: off.",
        minimum=0,
    )
    accumulate_steps: int = option(1, "Micro-batches per update; gradients add up locally in float32.", minimum=1)
    jit_compile: str = option(
        "auto",
        "XLA for forward and backward: 'auto' compiles, except where a model synchronises batch statistics across "
        "replicas, and convolutional models on CPUs, where XLA is slower. Without XLA, a compressed exchange "
        "overlaps the backward pass, which pays on slow links.",
        choices=("auto", "true", "false"),
    )
    steps_per_loop: int = option(
        0, "Updates per call from Python. 0: chosen so that the call overhead vanishes.", minimum=0
    )
    eval_every: int = option(0, "Updates between evaluations. 0: at the end of every epoch.", minimum=0)
    seed: int = option(0, "Seed of initialisation, shuffling, augmentation and dropout.", minimum=0)
    deterministic: bool = option(False, "Only deterministic kernels, so that a repeated run gives the same bits.")
    max_bad_steps: int = option(
        50,
        "Updates in a row that may be left out because loss or gradients are not finite, or no example can be used; "
        "then the run ends, with the examples named. 0: no limit.",
        minimum=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps and self.epochs:
            raise ConfigError(
                f"--steps={self.steps} and --epochs={self.epochs} contradict each other: give one of them."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Options):
    """Where a run is kept, and how it goes on."""

    workdir: str = option("", "Directory of the run: checkpoints, TensorBoard events, summary.json, model.keras.")
    checkpoint_every: int = option(0, "Updates between checkpoints. 0: at every evaluation and at the end.", minimum=0)
    keep_checkpoints: int = option(3, "Newest checkpoints that are kept; the best one is kept besides.", minimum=1)
    on_checkpoint_error: str = option(
        "warn",
        "When a checkpoint cannot be written (full disk, read-only directory): 'warn' trains on and reports it at the "
        "end, 'fail' ends the run. Older checkpoints stay either way.",
        choices=("warn", "fail"),
    )
    warm_start: str = option(
        "", "Start from these weights: another run's workdir, a checkpoint directory or a .keras file."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MonitorConfig(Options):
    """What one sees while it runs."""

    log_every: int = option(0, "Updates between TensorBoard points. 0: about every two seconds.", minimum=0)
    profile_steps: str = option("", "First and last update of a profiler window, e.g. '10,15'; shown in TensorBoard.")
    verbose: bool = option(False, "Keep the start-up messages of TensorFlow.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.profile_window()

    def profile_window(self) -> tuple[int, int] | None:
        """`profile_steps` as (first, last) update, or None when no profile was asked for."""
        if not self.profile_steps:
            return None
        try:
            first, last = (int(part) for part in self.profile_steps.split(","))
        except ValueError:
            first, last = 0, -1
        if not 0 <= first <= last:
            raise ConfigError(
                f"--profile_steps={self.profile_steps!r} is not a window of updates. Write e.g. --profile_steps=10,15."
            )
        return first, last


ROOMS: Mapping[str, type[Options]] = {
    "model": ModelConfig,
    "input": InputConfig,
    "strategy": StrategyConfig,
    "exchange": ExchangeConfig,
    "precision": PrecisionConfig,
    "optimizer": OptimizerConfig,
    "schedule": ScheduleConfig,
    "train": TrainConfig,
    "checkpoint": CheckpointConfig,
    "monitor": MonitorConfig,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExperimentConfig:
    """One experiment: a configuration for every room."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    input: InputConfig = dataclasses.field(default_factory=InputConfig)
    strategy: StrategyConfig = dataclasses.field(default_factory=StrategyConfig)
    exchange: ExchangeConfig = dataclasses.field(default_factory=ExchangeConfig)
    precision: PrecisionConfig = dataclasses.field(default_factory=PrecisionConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    monitor: MonitorConfig = dataclasses.field(default_factory=MonitorConfig)

    def as_flat_dict(self) -> dict[str, Any]:
        """Every option by its flag name, for summaries, hparams and comparison with a checkpoint."""
        flat: dict[str, Any] = {}
        for room in ROOMS:
            flat.update(dataclasses.asdict(getattr(self, room)))
        return flat

    @classmethod
    def from_flat_dict(cls, options: Mapping[str, Any]) -> ExperimentConfig:
        """The configuration with these options by flag name, everything else at its default.

        Raises:
          ConfigError: An option that does not exist, with suggestions, or an invalid value.
        """
        remaining = dict(options)
        rooms: dict[str, Any] = {}
        for room, kind in ROOMS.items():
            names = [field.name for field in dataclasses.fields(kind)]
            rooms[room] = kind(**{name: remaining.pop(name) for name in names if name in remaining})
        if remaining:
            name = next(iter(remaining))
            raise unknown_name("option", name, (f.name for kind in ROOMS.values() for f in dataclasses.fields(kind)))
        return cls(**rooms)

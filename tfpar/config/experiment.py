"""`ExperimentConfig`: the whole configuration of an experiment, and what holds for its options.

This module imports neither TensorFlow nor Keras: reading a configuration costs nothing.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from typing import Any

from tfpar.config.errors import OPTION_NAMES, ConfigError, unknown_name
from tfpar.config.fields import ConfigBase
from tfpar.config.sections import (
    CUSTOM,
    CheckpointConfig,
    ExchangeConfig,
    FederatedConfig,
    IncrementalConfig,
    InputConfig,
    ModelConfig,
    MonitorConfig,
    OptimizerConfig,
    OuterConfig,
    PrecisionConfig,
    ReinforcementConfig,
    ScheduleConfig,
    StrategyConfig,
    TrainConfig,
)

SECTIONS: dict[str, type[ConfigBase]] = {
    "model": ModelConfig,
    "input": InputConfig,
    "strategy": StrategyConfig,
    "exchange": ExchangeConfig,
    "outer": OuterConfig,
    "precision": PrecisionConfig,
    "optimizer": OptimizerConfig,
    "schedule": ScheduleConfig,
    "train": TrainConfig,
    "checkpoint": CheckpointConfig,
    "monitor": MonitorConfig,
}
# Sections that one program has beside these.
PROGRAM_SECTIONS: dict[str, type[ConfigBase]] = {
    "federated": FederatedConfig,
    "incremental": IncrementalConfig,
    "reinforcement": ReinforcementConfig,
}
# What takes their options in Python.
_TRAINERS = {
    "federated": "tfpar.outer.federated.FederatedTrainer",
    "incremental": "tfpar.incremental.IncrementalLearner",
    "reinforcement": "tfpar.rl.ReinforcementTrainer",
}


def option_fields() -> list[dataclasses.Field[Any]]:
    """The field of every option, section by section, in the order of `--help`."""
    return _fields_of(SECTIONS)


def every_field() -> list[dataclasses.Field[Any]]:
    """`option_fields`, and the fields of options that one program has."""
    return _fields_of(SECTIONS | PROGRAM_SECTIONS)


def _fields_of(sections: Mapping[str, type[ConfigBase]]) -> list[dataclasses.Field[Any]]:
    return [field for section in sections.values() for field in dataclasses.fields(section)]


OPTION_NAMES.update(field.name for field in option_fields())


# A resumed run may have other values of these: they change where, how fast, how visibly or how long it runs, but not
# what is being trained.
RESUME_MAY_CHANGE = frozenset(field.name for field in every_field() if field.metadata["may_change_on_resume"])
# Workers of one run may have different values of these, which belong to a machine or to the chief alone.
PER_HOST_OPTIONS = frozenset(field.name for field in every_field() if field.metadata["per_host"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExperimentConfig:
    """One experiment: a configuration for every section.

    Those of `PROGRAM_SECTIONS` are None in other programs, and are then no options of the experiment.
    """

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    input: InputConfig = dataclasses.field(default_factory=InputConfig)
    strategy: StrategyConfig = dataclasses.field(default_factory=StrategyConfig)
    exchange: ExchangeConfig = dataclasses.field(default_factory=ExchangeConfig)
    outer: OuterConfig = dataclasses.field(default_factory=OuterConfig)
    precision: PrecisionConfig = dataclasses.field(default_factory=PrecisionConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    monitor: MonitorConfig = dataclasses.field(default_factory=MonitorConfig)
    federated: FederatedConfig | None = None
    incremental: IncrementalConfig | None = None
    reinforcement: ReinforcementConfig | None = None

    def as_flat_dict(self) -> dict[str, Any]:
        """Every option by its flag name, for summaries, hparams and comparison with a checkpoint."""
        flat: dict[str, Any] = {}
        for section in SECTIONS | PROGRAM_SECTIONS:
            if (options := getattr(self, section)) is not None:
                flat.update(dataclasses.asdict(options))
        return flat

    def differences(self, saved: Mapping[str, Any], *, fixed: Collection[str] = ()) -> str:
        """The options that keep a saved run from being continued, as `--name: saved -> now`; empty if none does.

        Args:
          saved: The configuration of the run, by flag name, as JSON returns it. Names that it lacks are not compared.
          fixed: Options that must be the same although a resumed run may have other values of them.
        """
        current = json.loads(json.dumps(self.as_flat_dict()))
        may_change = set(RESUME_MAY_CHANGE).difference(fixed)
        for name, arguments in (("model", {"model", "model_args"}), ("dataset", {"dataset"})):
            # Objects without a name are distinguished by the checkpoint's shapes and the fingerprint of the data.
            if CUSTOM in (saved.get(name), current[name]):
                may_change |= arguments
        return "; ".join(
            f"--{name}: {saved[name]!r} -> {value!r}"
            for name, value in current.items()
            if name in saved and name not in may_change and saved[name] != value
        )

    @property
    def step_batch_size(self) -> int:
        """Examples in a step of the optimizer, for which `--base_batch_size` scales the learning rate: in a federation,
        a step of a client."""
        return self.federated.client_batch if self.federated is not None else self.input.global_batch_size

    @property
    def eval_batch_size(self) -> int:
        """Examples in a batch of evaluation and prediction, over all replicas."""
        return self.train.eval_batch_size or self.input.global_batch_size

    def evaluated(self, examples: int) -> int:
        """How many of a number of validation examples an evaluation during training uses; see `--eval_steps`."""
        return min(examples, self.train.eval_steps * self.eval_batch_size) if self.train.eval_steps else examples

    @classmethod
    def from_flat_dict(cls, options: Mapping[str, Any], *, program: str = "") -> ExperimentConfig:
        """The configuration with these options by flag name, and everything else at its default.

        Args:
          options: Values by name. Options of any program are accepted.
          program: The section of `PROGRAM_SECTIONS` whose options an error suggests too.

        Raises:
          ConfigError: An option that does not exist, with suggestions, or an invalid value.
        """
        remaining = dict(options)
        sections: dict[str, Any] = {}
        for section, kind in (SECTIONS | PROGRAM_SECTIONS).items():
            names = [field.name for field in dataclasses.fields(kind)]
            given = {name: remaining.pop(name) for name in names if name in remaining}
            if given or section in SECTIONS:
                sections[section] = kind(**given)
        if remaining:
            taken = [kind for name, kind in (SECTIONS | PROGRAM_SECTIONS).items() if name in (*sections, program)]
            known = (field.name for kind in taken for field in dataclasses.fields(kind))
            raise unknown_name("option", next(iter(remaining)), known)
        return cls(**sections)


def refuse_program_options(options: Mapping[str, Any], config: ExperimentConfig | None) -> None:
    """Refuses options of one program in a `Trainer`, which would ignore them.

    Args:
      options: Values by name.
      config: The configuration beside them; it has the section of a program under which the `Trainer` works.

    Raises:
      ConfigError: The first such option, and what takes it.
    """
    for section, trainer in _TRAINERS.items():
        if config is not None and getattr(config, section) is not None:
            continue
        for field in dataclasses.fields(PROGRAM_SECTIONS[section]):
            if field.name in options:
                raise ConfigError(
                    f"{field.name}={options[field.name]!r} is an option of {trainer}, and tfpar.Trainer does not use "
                    "it. Leave it out, or use the other."
                )
